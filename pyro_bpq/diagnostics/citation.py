r"""BibTeX of the methods that an ELBO uses, read from the References sections of what it is made of."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from pyro_bpq import critics, targets
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO

__all__ = ["Reference", "citation", "references"]

_PYRO = """@article{bingham2019pyro,
  author  = {Bingham, Eli and Chen, Jonathan P. and Jankowiak, Martin and Obermeyer, Fritz and Pradhan, Neeraj and
             Karaletsos, Theofanis and Singh, Rohit and Szerlip, Paul A. and Horsfall, Paul and Goodman, Noah D.},
  title   = {Pyro: Deep Universal Probabilistic Programming},
  journal = {Journal of Machine Learning Research},
  volume  = {20},
  pages   = {28:1--28:6},
  year    = {2019},
  url     = {http://jmlr.org/papers/v20/18-403.html}
}"""

_ENTRY = re.compile(r"(?P<title>.+?) \((?P<authors>[^()]+?),? (?P<year>(?:19|20)\d\d)\)")
_EPRINT = re.compile(r"arxiv\.org/abs/(\d{4}\.\d{4,5})")
# Words that stand between a title and its estimator's nickname, as in "..., U2G (Yin et al., 2020)", stay in the title.
_SMALL = frozenset("a an the on of for get to in with by and".split())

# Full authors and arXiv numbers, by the first words of the title; all that is not here stays as the docstring has it.
_KNOWN = MappingProxyType(
    {
        "backprop-q": (
            "Xu, Xiaoran and Zu, Songpeng and Zhang, Yuan and Zhou, Hanning and Feng, Wei",
            "1807.09511",
            "Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs",
        ),
        "auto-encoding variational bayes": ("Kingma, Diederik P. and Welling, Max", "1312.6114", ""),
        "simple statistical gradient-following": (
            "Williams, Ronald J.",
            "",
            "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        ),
        "buy 4 reinforce": (
            "Kool, Wouter and van Hoof, Herke and Welling, Max",
            "",
            "Buy 4 {REINFORCE} Samples, Get a Baseline for Free!",
        ),
        "variational inference for monte carlo": ("Mnih, Andriy and Rezende, Danilo J.", "1602.06725", ""),
        "local expectation gradients": ("Titsias, Michalis K. and L{\\'a}zaro-Gredilla, Miguel", "", ""),
        "disarm": ("Dong, Zhe and Mnih, Andriy and Tucker, George", "2006.10680", ""),
        "probabilistic best subset": (
            "Yin and others",
            "",
            "Probabilistic best subset selection via gradient-based optimization",
        ),
        "dueling network": (
            "Wang, Ziyu and Schaul, Tom and Hessel, Matteo and van Hasselt, Hado and Lanctot, Marc and "
            "de Freitas, Nando",
            "1511.06581",
            "",
        ),
        "high-dimensional continuous control": (
            "Schulman, John and Moritz, Philipp and Levine, Sergey and Jordan, Michael and Abbeel, Pieter",
            "1506.02438",
            "",
        ),
        "the road less scheduled": (
            "Defazio, Aaron and Yang, Xingyu and Mehta, Harsh and Mishchenko, Konstantin and Khaled, Ahmed and "
            "Cutkosky, Ashok",
            "2405.15682",
            "",
        ),
        "estimating or propagating gradients": (
            "Bengio, Yoshua and L{\\'e}onard, Nicholas and Courville, Aaron",
            "1308.3432",
            "",
        ),
    }
)


@dataclass(frozen=True)
class Reference:
    """A paper.

    Args:
        title: Its title.
        authors: Authors in BibTeX's form.
        year: Year.
        eprint: Number at arXiv, or ``""``.
    """

    title: str
    authors: str
    year: str
    eprint: str = ""

    @property
    def key(self) -> str:
        """Name of the entry: first author, year, first word of the title."""
        author = re.sub(r"[^A-Za-z]", "", re.sub(r"\{\\'(\w)\}", r"\1", self.authors.split(" and ")[0].split(",")[0]))
        words = [re.sub(r"[^a-z0-9]", "", word) for word in self.title.lower().split()]
        return f"{author.lower()}{self.year}{next((word for word in words if word and word not in _SMALL), '')}"

    def bibtex(self) -> str:
        """The entry, with nothing that is not known for certain."""
        rows = {"author": self.authors, "title": self.title, "year": self.year}
        if self.eprint:
            rows |= {"eprint": self.eprint, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.eprint}"}
        width = max(map(len, rows))
        lines = ",\n".join(f"  {name:<{width}} = {{{value}}}" for name, value in rows.items())
        return f"@misc{{{self.key},\n{lines}\n}}"


def references(thing: Any) -> tuple[Reference, ...]:
    """The papers that a docstring names in its References section.

    Args:
        thing: A module, class, function, or an object of a class.

    Returns:
        The papers, in order; none if there is no such section.
    """
    has_doc = inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isroutine(thing)
    text = inspect.getdoc(thing if has_doc else type(thing)) or ""
    _, found, section = text.partition("References:\n")
    if not found:
        return ()
    entries: list[str] = []
    for line in section.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        entry = line.strip()
        if entry.startswith("|"):
            entries.append(entry[1:].strip())
        elif entry and (not entries or _ENTRY.match(entries[-1])):
            entries.append(entry)
        elif entry:
            entries[-1] += f" {entry}"
    parsed: list[Reference] = []
    for entry in entries:
        link, match = _EPRINT.search(entry), _ENTRY.match(entry)
        if match:
            parsed.append(_complete(match["title"], match["authors"], match["year"], link[1] if link else ""))
        elif link and parsed and not parsed[-1].eprint:
            last = parsed[-1]
            parsed[-1] = Reference(last.title, last.authors, last.year, link[1])
    return tuple(parsed)


def _complete(title: str, authors: str, year: str, eprint: str) -> Reference:
    for start, (names, number, whole) in _KNOWN.items():
        if title.lower().startswith(start):
            return Reference(whole or title, names, year, number or eprint)
    names = authors.replace(" et al.", " and others").replace(" et al", " and others").rstrip(",")
    return Reference(title, names, year, eprint)


def citation(elbo: TraceBackpropQ_ELBO) -> str:
    """BibTeX of the methods in use, with a comment above each that says what for.

    Estimators and baselines are those of the last step, by site; before the first step, those that were asked for.

    >>> from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
    >>> text = citation(TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None))
    >>> [line for line in text.splitlines() if line.startswith("@")]
    ['@misc{xu2018backpropq,', '@article{bingham2019pyro,', '@misc{williams1992simple,']

    Args:
        elbo: The ELBO.

    Returns:
        The text of a ``.bib`` file.
    """
    uses: dict[str, list[str]] = {}
    entries: dict[str, str] = {}

    def use(what: str, found: tuple[Reference, ...]) -> None:
        for reference in found:
            entries.setdefault(reference.key, reference.bibtex())
            purposes = uses.setdefault(reference.key, [])
            if what not in purposes:
                purposes.append(what)

    use("TraceBackpropQ_ELBO", references(elbo))
    entries["bingham2019pyro"], uses["bingham2019pyro"] = _PYRO, ["Pyro"]
    has_critic = False
    for estimator, critic, sites in _in_use(elbo):
        where = f" at {', '.join(sites[:4])}{' and others' if len(sites) > 4 else ''}" if sites else ""
        for part in _parts(estimator):
            use(f"{type(part).__name__}{where}", references(part))
        if critic is not None:
            has_critic = True
            use(f"critics: {type(critic).__name__}", references(critic) or references(critics))
    if has_critic:
        use("lambda-returns", references(targets))
        if elbo.learner is not None and elbo.learner.optimizer is None:
            use("optimiser of the critics", references(AveragedAdam))
    return "\n\n".join(f"% {'; '.join(uses[key])}\n{entry}" for key, entry in entries.items())


def _in_use(elbo: TraceBackpropQ_ELBO) -> list[tuple[Any, Any, tuple[str, ...]]]:
    """Estimator, critic and names of each class of sites."""
    if elbo._last_plan is not None:
        classes = elbo._last_plan[3].layout.classes
        return [
            (cls.spec.estimator, cls.spec.critic if cls.spec.estimator.uses_critic else None, cls.names)
            for cls in classes
        ]
    estimator = elbo.planner.estimator
    critic = elbo.planner.critic if estimator is None or estimator.uses_critic else None
    return [(estimator, critic, ())]


def _parts(thing: Any) -> list[Any]:
    """An estimator and the options it is made of that are objects of this or another package, such as baselines."""
    if thing is None:
        return []
    inner = [getattr(thing, item.name) for item in fields(thing)] if is_dataclass(thing) else []
    return [thing, *(part for value in inner if is_dataclass(value) for part in _parts(value))]
