# %% [markdown]
# # Write your own estimator
#
# **What is won beside Pyro.** In Pyro an estimator is an ELBO: you must write tracing, plates and particles again. Here
# it has thirty lines, and a test shows that it is unbiased. A figure then compares it with `TraceGraph_ELBO` and
# leave-one-out.
#
# An estimator is a frozen dataclass that turns the tensors of like-shaped sites into a surrogate: a term whose
# gradient is the gradient estimate. The library does the rest (tracing, plates, particles, critics, state).
#
# The example is the score function with the constant baseline $b$ of least variance. It is not the mean of the
# cost-to-go $C$, but its mean weighted by the squared norm of the score $s$:
#
# $$ b = \frac{E[\,|s|^2\, C\,]}{E[\,|s|^2\,]}. $$

# %%
import os
from dataclasses import dataclass
from typing import ClassVar

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor

from pyro_bpq import LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, update_mean
from pyro_bpq.testing import assert_unbiased, expected_moments

torch.set_default_dtype(torch.float64)
SMOKE = bool(os.environ.get("SMOKE_TEST"))

# %% [markdown]
# ## The protocol
#
# Tensors come with the shape `(G sites, M particles, plates...)`. `log_probs` has the shape `(..., D, K)` for `D`
# finite components of `K` values. The example uses it to compute the score with respect to the logits, one-hot minus
# probabilities.
#
# - `unsupported` returns a sentence if it cannot serve a site.
# - `statistics` returns the names and initial values of the running statistics of a site. New values take effect
#   *after* the step: a baseline that depends on the sample that it corrects would cause bias.
# - `is_unbiased` is a promise, which we check below. The other defaults of the base class are right for this estimator.


# %%
@dataclass(frozen=True)
class WeightedBaseline(Estimator):
    """Score function minus the constant of least variance, from earlier steps."""

    decay: float = 0.99

    is_unbiased: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        return None if site.components is not None else "WeightedBaseline() needs a finite support"

    def statistics(self) -> dict[str, float]:
        return {"weighted_cost": 0.0, "weight": 0.0}

    def __call__(self, context: SiteContext) -> SiteTerm:
        baseline = context.statistics["weighted_cost"] / context.statistics["weight"].clamp(min=1e-12)
        baseline = baseline.reshape(-1, *(1,) * (context.cost.dim() - 1))
        weight = squared_score(context)
        statistics = {
            "weighted_cost": update_mean(
                context.statistics["weighted_cost"], site_mean(weight * context.cost), context.count, self.decay
            ),
            "weight": update_mean(context.statistics["weight"], site_mean(weight), context.count, self.decay),
        }
        return SiteTerm((context.cost - baseline) * context.score, statistics)


def squared_score(context: SiteContext) -> Tensor:
    with torch.no_grad():
        probs = context.log_probs.exp()
        picked = torch.nn.functional.one_hot(context.index, probs.shape[-1])
        return (picked - probs).square().sum((-2, -1))


def site_mean(value: Tensor) -> Tensor:
    """Mean over all but the site axis."""
    return value.flatten(1).mean(1)


# %% [markdown]
# ## A program to test it on


# %%
def model() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=torch.tensor(0.3))).long()
    b = pyro.sample("b", dist.Categorical(logits=torch.tensor([[0.1, -0.5, 0.7], [0.4, 0.2, -0.9]])[a]))
    pyro.sample("x", dist.Normal(a + 0.8 * b, 0.7), obs=torch.tensor(2.1))


def guide() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor(1.5)))).long()
    pyro.sample("b", dist.Categorical(logits=pyro.param("qb", torch.tensor([[0.2, 0.4, -0.3], [0.9, -0.1, 0.5]]))[a]))


def trained(estimator, steps: int = 20 if SMOKE else 500) -> TraceBackpropQ_ELBO:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(num_particles=1, estimator=estimator)
    for _ in range(steps):
        elbo.loss_and_grads(model, guide)
    return elbo.eval()


# %% [markdown]
# ## Is it unbiased?
#
# `assert_unbiased` compares the expected gradient over all joint outcomes with the exact gradient, to $10^{-10}$. It
# uses the statistics at the end of training. A test is useful only if it can fail. So here is the same estimator with a
# fault: its baseline contains half of the cost from which it is subtracted.

# %%
assert_unbiased(trained(WeightedBaseline()), model, guide)
print("WeightedBaseline: equal to the exact gradient")


class Faulty(WeightedBaseline):
    def __call__(self, context: SiteContext) -> SiteTerm:
        term = super().__call__(context)
        return term._replace(surrogate=term.surrogate - 0.5 * context.cost * context.score)


try:
    assert_unbiased(trained(Faulty()), model, guide)
except AssertionError as error:
    print("Faulty:", str(error).splitlines()[0], str(error).splitlines()[1].strip())

# %% [markdown]
# ## Is it any good?
#
# The same enumeration gives the exact variance, without sampling.

# %%
for estimator in (ScoreFunction(), ScoreFunction(RunningBaseline()), WeightedBaseline(), None):
    variance = expected_moments(trained(estimator), model, guide).total_variance
    print(f"{estimator or 'one particle, AllAction'!s:50s} variance {variance:.4f}")

# %% [markdown]
# A step also takes time. `compare_estimators` measures variance and time, of your own estimators, Pyro's ELBOs and
# leave-one-out:

# %%
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 300, "num_samples": 100}
rivals = {
    "default": TraceBackpropQ_ELBO(),
    "AllAction": TraceBackpropQ_ELBO(num_particles=1),
    "WeightedBaseline": WeightedBaseline(),
    "leave-one-out, 2 particles": TraceBackpropQ_ELBO(2, estimator=ScoreFunction(LeaveOneOut())),
    "TraceGraph_ELBO": TraceGraph_ELBO(),
}
pyro.clear_param_store()
comparison = compare_estimators(model, guide, estimators=rivals, progress=False, **quick)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# This comparison holds only for this program at these parameters: measure on your own program. `AllAction` sums
# immediate costs over the values of a site. The default takes the mean of many particles in one call.
#
# To use it at a single site: `infer={"bpq": {"estimator": WeightedBaseline()}}`. `docs/extending` has more skeletons (a
# critic, a target, the features of a distribution). Next: `10_many_processes`.
#
# ## Something to try
#
# - Weigh by the fourth power of the score. Is it still unbiased? Is it better?
# - Plant a fault of your own into `Faulty`. Does `assert_unbiased` find it?
