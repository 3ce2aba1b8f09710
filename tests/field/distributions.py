"""Every distribution of Pyro and torch, with as few parameters as it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.distributions.transforms import ExpTransform
from torch import Tensor

# Bases and wrappers without a law of their own, and what has no density that a site could be scored with.
NO_LAWS = frozenset({"Distribution", "ExponentialFamily", "TorchDistribution"})


def eye(q: Tensor) -> Tensor:
    """A matrix for each row."""
    return q[..., None, None] * torch.eye(2, dtype=q.dtype)


def pair(q: Tensor) -> Tensor:
    return torch.stack((q, 2.0 * q), -1)


def shares(q: Tensor) -> Tensor:
    return torch.stack((q, q + 1.0, q + 2.0), -1)


def table(q: Tensor) -> Tensor:
    """Three rows of two numbers for each row."""
    return q[..., None, None] * torch.arange(6.0).reshape(3, 2)


def _hmm(kind: Any, q: Tensor) -> Any:
    if kind is dist.DiscreteHMM:
        moves = pair(q)[..., None, None, :].expand(*q.shape, 3, 2, 2)
        return kind(pair(q), moves, dist.Normal(pair(q)[..., None, :], 1.0), duration=3)
    one = torch.eye(1)
    noise = dist.MultivariateNormal(torch.zeros(1), one)
    if kind is dist.GammaGaussianHMM:
        return kind(dist.Gamma(q + 1.0, 1.0), noise, one.expand(2, 1, 1), noise, one, noise)
    if kind is dist.LinearHMM:
        flat = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        return kind(dist.Normal(q[..., None], 1.0).to_event(1), one.expand(2, 1, 1), flat, one, flat)
    return kind(dist.MultivariateNormal(q[..., None], one), one.expand(2, 1, 1), noise, one, noise)


def _markov_field(q: Tensor) -> Any:
    one = torch.eye(2)
    both = dist.MultivariateNormal(torch.zeros(2), one)
    return dist.GaussianMRF(dist.MultivariateNormal(q[..., None], torch.eye(1)), both.expand((2,)), both.expand((2,)))


def laws(names: str, make: Callable[[Any, Tensor], Any]) -> dict[str, Callable[[Tensor], Any]]:
    """Distributions that take the same parameters."""
    return {name: functools.partial(make, getattr(dist, name)) for name in names.split()}


LAWS: dict[str, Callable[[Tensor], Any]] = {
    **laws("Chi2 Delta Exponential HalfCauchy HalfNormal Poisson TruncatedPolyaGamma Unit", lambda law, q: law(q)),
    **laws("Beta Cauchy Gamma GammaPoisson Gumbel InverseGamma Kumaraswamy Laplace", lambda law, q: law(q, 1.0)),
    **laws("LogNormal Logistic NanMaskedNormal Normal SoftLaplace VonMises Weibull", lambda law, q: law(q, 1.0)),
    **laws("Bernoulli ContinuousBernoulli Geometric", lambda law, q: law(logits=q)),
    **laws("Categorical OneHotCategorical OneHotCategoricalStraightThrough", lambda law, q: law(logits=shares(q))),
    **laws("BetaBinomial ExtendedBetaBinomial", lambda law, q: law(q, 1.0, 5)),
    **laws("Binomial ExtendedBinomial", lambda law, q: law(5, logits=q)),
    **laws("LKJ LKJCorrCholesky", lambda law, q: law(2, q[0])),
    **laws("MultivariateNormal NanMaskedMultivariateNormal", lambda law, q: law(pair(q), eye(q))),
    **laws("RelaxedBernoulli RelaxedBernoulliStraightThrough", lambda law, q: law(torch.tensor(0.5), logits=q)),
    **laws("RelaxedOneHotCategorical", lambda law, q: law(torch.tensor(0.5), logits=shares(q))),
    **laws("RelaxedOneHotCategoricalStraightThrough", lambda law, q: law(torch.tensor(0.5), logits=shares(q))),
    **laws("Stable StableWithLogProb", lambda law, q: law(torch.tensor(1.5), torch.tensor(0.1), q)),
    **laws("DiscreteHMM GammaGaussianHMM GaussianHMM LinearHMM", _hmm),
    **laws("AVFMultivariateNormal", lambda law, q: law(q[0] * torch.ones(2), torch.eye(2), torch.zeros(2, 1, 2))),
    **laws("MixtureOfDiagNormals", lambda law, q: law(table(q), torch.ones(*q.shape, 3, 2), shares(q))),
    **laws("MixtureOfDiagNormalsSharedCovariance", lambda law, q: law(table(q), torch.ones(*q.shape, 2), shares(q))),
    **laws("MixtureSameFamily", lambda law, q: law(td.Categorical(logits=shares(q)), td.Normal(shares(q), 1.0))),
    "AffineBeta": lambda q: dist.AffineBeta(q, 1.0, 0.0, 2.0),
    "AsymmetricLaplace": lambda q: dist.AsymmetricLaplace(q, 1.0, 1.0),
    "CoalescentTimes": lambda q: dist.CoalescentTimes(torch.zeros(3), q),
    "CoalescentTimesWithRate": lambda q: dist.CoalescentTimesWithRate(torch.zeros(3), q[..., None].expand(*q.shape, 4)),
    "Dirichlet": lambda q: dist.Dirichlet(shares(q)),
    "DirichletMultinomial": lambda q: dist.DirichletMultinomial(shares(q), torch.tensor(4)),
    "Empirical": lambda q: dist.Empirical(torch.arange(3.0).expand(*q.shape, 3), shares(q)),
    "ExpandedDistribution": lambda q: dist.ExpandedDistribution(dist.Normal(q, 1.0), q.shape),
    "FisherSnedecor": lambda q: dist.FisherSnedecor(q, 3.0),
    "FoldedDistribution": lambda q: dist.FoldedDistribution(dist.Normal(q, 1.0)),
    "GaussianMRF": _markov_field,
    "GaussianScaleMixture": lambda q: dist.GaussianScaleMixture(pair(q)[0], torch.ones(2), torch.ones(2)),
    "GeneralizedPareto": lambda q: dist.GeneralizedPareto(torch.zeros(()), q, 0.2),
    "GroupedNormalNormal": lambda q: dist.GroupedNormalNormal(q, torch.ones(2), torch.ones(2), torch.tensor([0, 1])),
    "ImproperUniform": lambda q: dist.ImproperUniform(dist.constraints.real, q.shape, ()),
    "Independent": lambda q: dist.Normal(pair(q), 1.0).to_event(1),
    "IndependentHMM": lambda q: dist.IndependentHMM(_hmm(dist.GaussianHMM, q[..., None].expand(*q.shape, 1))),
    "LKJCholesky": lambda q: dist.LKJCholesky(2, q),
    "LogNormalNegativeBinomial": lambda q: dist.LogNormalNegativeBinomial(
        3.0, logits=q, multiplicative_noise_scale=torch.tensor(0.5)
    ),
    "LogisticNormal": lambda q: dist.LogisticNormal(pair(q), torch.ones(2)),
    "LowRankMultivariateNormal": lambda q: dist.LowRankMultivariateNormal(pair(q), torch.ones(2, 1), torch.ones(2)),
    "MaskedDistribution": lambda q: dist.Normal(q, 1.0).mask(False),
    "MaskedMixture": lambda q: dist.MaskedMixture(
        torch.tensor([True, False]), dist.Normal(q, 1.0), dist.Normal(-q, 1.0)
    ),
    "Multinomial": lambda q: dist.Multinomial(4, logits=shares(q)),
    "MultivariateStudentT": lambda q: dist.MultivariateStudentT(torch.tensor(3.0), pair(q), torch.eye(2)),
    "NegativeBinomial": lambda q: dist.NegativeBinomial(3, logits=-q),
    "OMTMultivariateNormal": lambda q: dist.OMTMultivariateNormal(q[0] * torch.ones(2), torch.eye(2)),
    "OneOneMatching": lambda q: dist.OneOneMatching(q[0] * torch.eye(3)),
    "OneTwoMatching": lambda q: dist.OneTwoMatching(q[0] * torch.eye(4)[:, :2]),
    "OrderedLogistic": lambda q: dist.OrderedLogistic(q, torch.tensor([-1.0, 1.0])),
    "Pareto": lambda q: dist.Pareto(torch.ones(()), q),
    "ProjectedNormal": lambda q: dist.ProjectedNormal(pair(q)),
    "Rejector": lambda q: dist.Rejector(dist.Normal(q, 1.0), lambda x: torch.zeros_like(x), torch.zeros(q.shape)),
    "SineBivariateVonMises": lambda q: dist.SineBivariateVonMises(q, q, 3.0 + q, 3.0 + q, 0.1 * q),
    "SineSkewed": lambda q: dist.SineSkewed(dist.VonMises(pair(q), 1.0).to_event(1), torch.tensor([0.2, 0.1])),
    "SkewLogistic": lambda q: dist.SkewLogistic(q, 1.0, torch.tensor(1.0)),
    "SoftAsymmetricLaplace": lambda q: dist.SoftAsymmetricLaplace(q[0], 1.0, 1.0, 1.0),
    "SpanningTree": lambda q: dist.SpanningTree(q[0] * torch.arange(3.0)),
    "StudentT": lambda q: dist.StudentT(3.0, q),
    "TransformedDistribution": lambda q: dist.TransformedDistribution(dist.Normal(q, 1.0), [ExpTransform()]),
    "Uniform": lambda q: dist.Uniform(-q, q),
    "VonMises3D": lambda q: dist.VonMises3D(torch.stack((q, q, q), -1)),
    "Wishart": lambda q: dist.Wishart(3.0 + q, torch.eye(2)),
    "ZeroInflatedDistribution": lambda q: dist.ZeroInflatedDistribution(dist.Poisson(q), gate=torch.tensor(0.3)),
    "ZeroInflatedNegativeBinomial": lambda q: dist.ZeroInflatedNegativeBinomial(3, logits=-q, gate=torch.tensor(0.3)),
    "ZeroInflatedPoisson": lambda q: dist.ZeroInflatedPoisson(q, gate=torch.tensor(0.3)),
}


def names() -> set[str]:
    """Every distribution of Pyro and torch."""
    return {
        name
        for space in (dist, td)
        for name in space.__all__
        if inspect.isclass(kind := getattr(space, name, None)) and issubclass(kind, td.Distribution)
    } - NO_LAWS
