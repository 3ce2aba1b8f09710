r"""ARM, DisARM, DisARM-Tree and ARMS: antithetic samples of finite components, compared by their costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm
from pyro_bpq.estimators.noise import exponential, uniform, uniform_given
from pyro_bpq.estimators.relaxation import parameters
from pyro_bpq.estimators.requirements import needs_binary, needs_finite


class _Antithetic(Estimator):
    """Base of the estimators that compare antithetic samples, of binary components if nothing else is said."""

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_binary


@dataclass(frozen=True)
class ARM(_Antithetic):
    r"""Compares the sample with an antithetic one, weighted by the noise; for binary components.

        g_d = (f(b̃) - f(b)) (u_d - ½) ∇α_d,    b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits, ``σ`` is the logistic function, ``u`` is uniform noise given the sample ``b``, ``b̃`` is the
    antithetic sample, and ``f`` is the cost-to-go in nats. Unbiased. :class:`DisARM` is the expectation of this
    estimator given the pair: it costs the same and never has more variance. ARM is here for reference.

    References:
        ARM: Augment-REINFORCE-merge gradient for stochastic binary networks (Yin and Zhou, 2019)
    """

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The difference of the costs times the centred noise."""
        logits, u, _, difference = _antithetic(context)
        return SiteTerm(difference.unsqueeze(-1) * (u - 0.5) * logits)


@dataclass(frozen=True)
class DisARM(_Antithetic):
    r"""Compares the sample with an antithetic one; for binary components.

        g_d = ½ (f(b) - f(b̃)) (-1)^{b̃_d} 1[b_d ≠ b̃_d] σ(|α_d|) ∇α_d,
        b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits and ``f`` is the cost-to-go in nats. Unbiased. It needs one more run of guide and model for
    every site and particle. In that run all components and plate rows of the site take their antithetic values at once,
    and sites downstream are drawn afresh.

    References:
        | DisARM: An antithetic gradient estimator for binary latent variables (Dong et al., 2020)
        | Probabilistic best subset selection via gradient-based optimization, U2G (Yin et al., 2020)
    """

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs, signed, where the pair differs."""
        logits, _, partner, difference = _antithetic(context)
        with torch.no_grad():
            sign = (context.table[1] - partner).to(logits.dtype)
            weight = -0.5 * difference.unsqueeze(-1) * sign * logits.abs().sigmoid()
        return SiteTerm(weight * logits)


def _antithetic(context: SiteContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with gradient, the noise of the sample, the index of its antithetic partner, and ``f(b̃) - f(b)``."""
    logits, program = parameters(context.table[0]), context.program
    with torch.no_grad():
        p = logits.sigmoid()
        u = uniform_given(p, context.table[1], program.generator)
        partner = (1.0 - u < p).long()
        difference = program.cost(program.from_index(partner)) - context.cost
    return logits, u, partner, difference


@dataclass(frozen=True)
class DisARMTree(_Antithetic):
    r"""Compares the sample with one that is antithetic in every binary decision of a balanced tree.

    A value ``z`` of a component is a path through the tree. At node ``n`` the path goes right with probability
    ``σ(α_n)``, the share of the right subtree in the probability of node ``n``. The partner ``z̃`` takes antithetic
    decisions. With ``f`` the cost-to-go in nats,

        g = ½ (f(z) - f(z̃)) Σ_n w_n ∇α_n,
        w_n = (b_n - b̃_n) σ(|α_n|)  on both paths,  b_n - σ(α_n)  on that of z only,  σ(α_n) - b̃_n  on that of z̃ only

    This is :class:`DisARM` for all decisions of the tree, averaged over the decisions off the paths. Unbiased. It needs
    one more run of guide and model for every site and particle. With two values it is DisARM.

    References:
        Coupled gradient estimators for discrete latent variables (Dong et al., 2021), DisARM-Tree
    """

    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs times the logits along both paths."""
        log_probs, index = context.table
        levels, program = _levels(log_probs), context.program
        own, other = torch.zeros_like(index), torch.zeros_like(index)
        terms = []
        for level, logits in enumerate(levels):
            # z passes node `own` of this level; the next bit of z says where it goes.
            at_own, at_other = _at(logits, own), _at(logits, other)
            with torch.no_grad():
                b = (index >> (len(levels) - 1 - level)) & 1
                p, q = at_own.sigmoid(), at_other.sigmoid()
                together = own == other
                antithetic = (1.0 - uniform_given(p, b, program.generator) < p).long()
                alone = (uniform(q, program.generator) < q).long()
                c = torch.where(together, antithetic, alone)
                weight = torch.where(together, (b - c) * at_own.abs().sigmoid(), b - p)
                weight_other = torch.where(together, torch.zeros_like(q), q - c)
                own, other = 2 * own + b, 2 * other + c
            terms.append(weight * at_own + weight_other * at_other)
        with torch.no_grad():
            partner = other.clamp(max=log_probs.shape[-1] - 1)
            difference = 0.5 * (context.cost - program.cost(program.from_index(partner)))
        return SiteTerm(difference.unsqueeze(-1) * sum(terms[1:], terms[0]))


def _levels(log_probs: Tensor) -> list[Tensor]:
    """Logits of going right at the nodes of a balanced binary tree, ``(..., 2^level)``, root first."""
    cardinality = log_probs.shape[-1]
    depth = max(cardinality - 1, 1).bit_length()
    missing = 2**depth - cardinality
    if missing:
        # A log-probability far below that of any real value, so that padding is never drawn.
        padding = log_probs.new_full((*log_probs.shape[:-1], missing), -1e8)
        log_probs = torch.cat((log_probs, padding), -1)
    levels = []
    for _ in range(depth):
        pairs = log_probs.reshape(*log_probs.shape[:-1], -1, 2)
        levels.append(pairs[..., 1] - pairs[..., 0])
        log_probs = torch.logsumexp(pairs, -1)
    return levels[::-1]


def _at(table: Tensor, node: Tensor) -> Tensor:
    return table.gather(-1, node.unsqueeze(-1)).squeeze(-1)


@runtime_checkable
class Copula(Protocol):
    """Exchangeable uniform variables that repel each other."""

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws the other ``samples - 1`` variables given the first, ``(samples - 1, *shape)``."""

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two of the variables are both below ``p``, for ``p`` in [0, ½]."""


@dataclass(frozen=True)
class DirichletCopula:
    r"""Uniform variables from a flat Dirichlet distribution.

        u_i = (1 - d_i)^{n-1},  d ~ Dirichlet(1, ..., 1),
        P(u_i < p, u_j < p) = max(0, 2 p^{1/(n-1)} - 1)^{n-1}

    References:
        ARMS: Antithetic-REINFORCE-multi-sample gradient for binary variables (Dimitriev and Zhou, 2021)
    """

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Breaks the rest of the stick at random."""
        rest = first ** (1.0 / (samples - 1))
        shares = exponential(first.expand(samples - 1, *first.shape), generator)
        return (1.0 - rest * shares / shares.sum(0)).clamp(min=0.0) ** (samples - 1)

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two variables are below ``p``, in closed form."""
        return (2.0 * p ** (1.0 / (samples - 1)) - 1.0).clamp(min=0.0) ** (samples - 1)


@dataclass(frozen=True)
class RotationCopula:
    r"""Uniform variables on a randomly rotated grid, in random order.

        u_i = (u + π(i)/n) mod 1,   P(u_i < p, u_j < p) = k (k - 1 + 2 (np - k)) / (n (n - 1)),  k = ⌊np⌋

    The number of ones among the samples is ``k`` or ``k + 1``: no exchangeable coupling has a lower correlation.

    References:
        On the theory of systematic sampling, II (Madow, 1949)
    """

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Returns the other points of the grid, in random order."""
        order = uniform(first.expand(samples - 1, *first.shape), generator).argsort(0) + 1
        return (first + order.to(first.dtype) / samples) % 1.0

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two variables are below ``p``, in closed form."""
        k = (samples * p).floor()
        return k * (k - 1.0 + 2.0 * (samples * p - k)) / (samples * (samples - 1.0))


@dataclass(frozen=True)
class ARMS(_Antithetic):
    r"""Leave-one-out over ``n`` negatively correlated samples, for binary components.

        g_d = 1/(n-1) Σ_i (f(b^i) - f̄) b^i_d / (1 - ρ_d) ∇α_d

    ``f`` is the cost-to-go. ``ρ_d`` is the correlation of ``b^i_d`` and ``b^j_d``. Unbiased. Two samples give
    :class:`DisARM`. Every particle has its own ``n`` samples: ``n - 1`` more runs of guide and model for every site and
    particle.

    Args:
        samples: Number of samples ``n``.
        copula: The joint law of the samples' noise.

    References:
        ARMS: Antithetic-REINFORCE-multi-sample gradient for binary variables (Dimitriev and Zhou, 2021)
    """

    samples: int = 4
    copula: Copula = DirichletCopula()

    def __post_init__(self) -> None:
        check_option(self, "samples", self.samples >= 2, "a number of at least two")
        is_copula = isinstance(self.copula, Copula) and not isinstance(self.copula, type)
        check_option(self, "copula", is_copula, "DirichletCopula() or RotationCopula()")

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred costs times the samples."""
        logits, program = parameters(context.table[0]), context.program
        with torch.no_grad():
            # Noise below the probability gives the rarer value: the samples repel each other most in this form.
            rarer = torch.where(logits > 0, 0, 1)
            p = (-logits.abs()).sigmoid()
            first = (context.table[1] == rarer).long()
            others = self.copula.complete(uniform_given(p, first, program.generator), self.samples, program.generator)
            rare = torch.cat((first.unsqueeze(0), (others < p).long()))
            index = torch.where(rarer == 1, rare, 1 - rare)
            costs = torch.stack([context.cost, *(program.cost(program.from_index(chosen)) for chosen in index[1:])])
            total = ((costs - costs.mean(0)).unsqueeze(-1) * index).sum(0) / (self.samples - 1.0)
            # 1 / (1 - ρ); p is never quite zero, but its product with another may be.
            apart = (p - self.copula.both(p, self.samples)).clamp(min=torch.finfo(p.dtype).tiny)
            weight = total * (p * ((1.0 - p) / apart)).clamp(max=1.0)
        return SiteTerm(weight * logits)
