"""A topic model (latent Dirichlet allocation): which topic is each word of a text from? Texts: docstrings of Python."""

import itertools
import json
import math
import random
import re
import statistics
import textwrap
from collections import Counter

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

TOPICS, LENGTH, VOCABULARY, LR = 4, 12, 100, 0.05
MODULES = (json, math, random, statistics, textwrap, itertools)


def data() -> tuple[Tensor, ...]:
    texts = [getattr(thing, "__doc__", "") or "" for m in MODULES for _, thing in sorted(vars(m).items())]
    words = [[word for word in re.findall("[a-z]+", text.lower()) if len(word) > 3] for text in texts]
    often = Counter(word for text in words for word in text).most_common(VOCABULARY)
    index = {word: i for i, (word, _) in enumerate(sorted(often))}
    texts = [[index[word] for word in text if word in index][:LENGTH] for text in words]
    return (torch.tensor([text for text in texts if len(text) == LENGTH]),)


def model(texts: Tensor) -> None:
    words = pyro.param("words", lambda: 0.1 * torch.randn(TOPICS, VOCABULARY))
    with pyro.plate("texts", len(texts), dim=-2):
        shares = pyro.sample("shares", dist.Dirichlet(torch.full((TOPICS,), 0.5)))
        with pyro.plate("places", LENGTH, dim=-1):
            topic = pyro.sample("topic", dist.Categorical(shares))
            pyro.sample("word", dist.Categorical(logits=words[topic]), obs=texts)


def guide(texts: Tensor) -> None:
    counts = pyro.param("counts", torch.ones(len(texts), 1, TOPICS), constraint=dist.constraints.positive)
    reads = pyro.param("reads", lambda: 0.1 * torch.randn(VOCABULARY, TOPICS))
    with pyro.plate("texts", len(texts), dim=-2):
        shares = pyro.sample("shares", dist.Dirichlet(counts))
        with pyro.plate("places", LENGTH, dim=-1):
            pyro.sample("topic", dist.Categorical(logits=reads[texts] + shares.log()))
