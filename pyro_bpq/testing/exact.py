"""The exact loss and its gradient, by enumeration of every joint state, and what is compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer import RenyiELBO
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.subsample_messenger import _Subsample
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_bpq.errors import (
    OptionError,
    SiteNotFoundError,
    StructureChangedError,
    TooManyOutcomesError,
    UnsupportedProgramError,
)
from pyro_bpq.objectives.elbo import ExpectedCost
from pyro_bpq.objectives.iwae import TraceBackpropQ_IWAE
from pyro_bpq.record.watch import samples
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing.choices import ChoiceMessenger, walk
from pyro_bpq.testing.moments import OWN_NOISE, GradientReader, expected_gradient, take_step

# Joint values of particles whose number was left open.
_FEW = 2000


def _cost(program: Program, num_outcomes: int, only_costs: bool) -> Tensor:
    """Runs guide and model; returns ``log q - log p`` plus costs, scaled and masked, in nats."""
    model, guide, args, kwargs = program
    messenger = poutine.unwrap(guide)
    if isinstance(messenger, GuideMessenger):
        guide(*args, **kwargs)
        model_trace, guide_trace = messenger.get_traces()
    else:
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        model = model or (lambda *args, **kwargs: None)
        if not only_costs:
            return _total(guide_trace, 1.0) - marginal_log_prob(model, guide_trace, args, kwargs, num_outcomes)
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    return _total(guide_trace, 1.0, only_costs) + _total(model_trace, -1.0, only_costs)


def _total(trace: Any, sign: float, only_costs: bool = False) -> Tensor:
    """Sum of a trace's signed log-probabilities and costs; a cost site's log-density is minus its cost."""
    total = torch.zeros(())
    pruned = prune_subsample_sites(trace)
    pruned.compute_log_prob()
    for site in samples(pruned).values():
        is_cost = "bpq_cost" in site["infer"]
        if is_cost or not only_costs:
            total = total + (-1.0 if is_cost else sign) * site["log_prob_sum"]
    return total


def _objective(program: Program, num_outcomes: int, only_costs: bool, keep_score: bool) -> Tensor:
    """Sums ``q(state) * cost(state)`` over all states, differentiably."""
    choices, total = ChoiceMessenger(num_outcomes, keep_score), torch.zeros(())
    for probability, cost in walk(choices, lambda: _cost(program, num_outcomes, only_costs)):
        score = sum(choices.score, torch.zeros_like(cost))
        # The exponential is one; its gradient makes the probability differentiable.
        total = total + probability * (score - score.detach()).exp() * cost
    return total


def exact_loss(
    model: Callable[..., Any] | None,
    guide: Callable[..., Any],
    *args: Any,
    num_outcomes: int = 200_000,
    only_costs: bool = False,
    **kwargs: Any,
) -> Tensor:
    r"""Computes the negative ELBO plus the expected cost, by enumeration.

        J = Σ_state q(state) · (log q(state) - log p(state) + costs(state)).

    Sites with ``infer={"enumerate": ...}`` that only the model has are summed out of ``p``.

    Args:
        model: Model, run with the guide's values by ``poutine.replay``; ``None`` for none.
        guide: Guide whose latent sites have finite support; see :mod:`pyro_bpq.testing`.
        *args: Arguments of both.
        num_outcomes: Limit on the number of joint states.
        only_costs: Whether only cost statements count, as in ``ExpectedCost``.
        **kwargs: Keyword arguments of both.

    Returns:
        The loss in nats, a scalar, detached.

    Raises:
        SiteNotFoundError: If the guide lacks a latent site of the model that is not marked to be enumerated.
        OptionError: If there are more than ``num_outcomes`` states.
        UnsupportedSiteError: If a site has no finite support.
    """
    with torch.no_grad():
        return _objective(Program(model, guide, args, kwargs), num_outcomes, only_costs, keep_score=False)


def exact_gradient(
    model: Callable[..., Any] | None,
    guide: Callable[..., Any],
    *args: Any,
    parameters: Mapping[str, Tensor] | None = None,
    num_outcomes: int = 200_000,
    only_costs: bool = False,
    **kwargs: Any,
) -> dict[str, Tensor]:
    r"""Computes the gradient of the loss (negative ELBO) by enumeration and one call of autograd.

        ∇ Σ_state q(state) · (log q(state) - log p(state)).

    The log-probabilities are Pyro's, with scales and masks. The probability of a state has neither, because a masked
    site is drawn too. A :class:`TwoPoint` site contributes the expectation over its noise, with a differentiable value,
    a subsampled plate the expectation over all subsets of its size.

    Args:
        model: Model, run with the guide's values by ``poutine.replay``.
        guide: Guide whose latent sites have finite support; see :mod:`pyro_bpq.testing`.
        *args: Arguments of both.
        parameters: Leaves to differentiate, by name. Default: all leaves that ``pyro.param`` and ``pyro.module`` reach,
            unconstrained and under the names of the param store, and the parameters of model and guide if modules.
        num_outcomes: Limit on the number of joint states.
        only_costs: Whether only cost statements count, as in ``ExpectedCost``.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        Gradient of each parameter, detached, in its shape; zero if the parameter has no influence. The
        ``.grad`` fields are not touched.

    Raises:
        SiteNotFoundError: If the guide lacks a latent site of the model that is not marked to be enumerated.
        OptionError: If there are more than ``num_outcomes`` states.
        UnsupportedSiteError: If a site has no finite support.
        UnsupportedProgramError: If the program draws outside of its sites.
    """
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        objective = _objective(Program(model, guide, args, kwargs), num_outcomes, only_costs, keep_score=True)
    return reader.gradient(objective)


class _MarkedChoices(ChoiceMessenger):
    """Chooses the values of marked sites; subsets of plates are drawn in the first run and kept."""

    def __init__(self, num_outcomes: int, guide_trace: Any) -> None:
        super().__init__(num_outcomes)
        self.guide_trace = guide_trace
        self.names: set[str] = set()
        self.subsets: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            msg["value"] = self.subsets.get(msg["name"], msg["value"])
        elif not msg["is_observed"] and msg["name"] not in self.guide_trace:
            if msg["infer"].get("enumerate") is not None:
                self.names.add(msg["name"])
                super()._pyro_sample(msg)
            elif msg["value"] is None:
                raise SiteNotFoundError(
                    f"Site {msg['name']!r} is a latent of the model that the guide lacks. Add "
                    f"pyro.sample({msg['name']!r}, ...) to the guide, or observe it with obs=."
                )

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            self.subsets[msg["name"]] = msg["value"]


def marginal_log_prob(model: Callable[..., Any], guide_trace: Any, args: Any, kwargs: Any, num_outcomes: int) -> Tensor:
    r"""Sums the marked sites out of the model's probability, over all joint states one by one.

        log p = s · log Σ_state exp(log p(state) / s)

    What depends on the marked sites has the scale ``s``, which acts outside of the logarithm; masks act inside. The
    mask of a marked site itself is ignored.

    Returns:
        The log-probability in nats, a scalar.
    """
    choices = _MarkedChoices(num_outcomes, guide_trace)

    def run() -> Any:
        replayed = poutine.replay(model, trace=guide_trace)
        trace = prune_subsample_sites(poutine.trace(replayed).get_trace(*args, **kwargs))
        trace.compute_log_prob()
        return samples(trace)

    # The choices are the outer handler, so that they act after the replay.
    states = [sites for _, sites in walk(choices, run)]
    if any(sites.keys() != states[0].keys() for sites in states):
        raise UnsupportedProgramError(
            f"Which sites the model has depends on the values of {sorted(choices.names)}, which are summed out. Keep "
            "all sites at all values, and hide those that do not count by poutine.mask(mask=...)."
        )
    terms = {name: torch.stack([_term(sites[name], name in choices.names) for sites in states]) for name in states[0]}
    varying = choices.names | {name for name, term in terms.items() if bool((term != term[0]).any())}
    scales = {_scale(states[0][name]) for name in varying}
    if len(scales) > 1 or any(map(math.isnan, scales)):
        raise UnsupportedProgramError(
            f"Sites that depend on {sorted(choices.names)} have scales {sorted(map(str, scales))}. They are summed out "
            "together, which needs one number: put them under the same poutine.scale(scale=0.5) and the same plates."
        )
    total, scale = sum(terms.values(), torch.zeros(())).expand(len(states)), next(iter(scales), 0.0)
    return scale * (total / scale).logsumexp(0) if scale else total[0]


def _scale(site: Any) -> float:
    """The scale of a site; NaN if its elements have scales of their own."""
    scale = torch.as_tensor(site["scale"]).detach()
    return float(scale) if scale.numel() == 1 else math.nan


def _term(site: Any, is_marked: bool) -> Tensor:
    term: Tensor = site["scale"] * site["unscaled_log_prob"] if is_marked else site["log_prob"]
    return term.sum()


def assert_unbiased(
    elbo: Any, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, atol: float = 1e-10, **kwargs: Any
) -> None:
    r"""Asserts that the expected gradient of a step equals the exact gradient, for every parameter.

        max |expected - exact| <= atol.

    Args:
        elbo: An ELBO with ``loss_and_grads``, frozen by ``elbo.eval()``; of an ``ExpectedCost`` only cost statements
            count.
        model: Model.
        guide: Guide whose latent sites have finite support; see :mod:`pyro_bpq.testing`.
        *args: Arguments of both.
        atol: Largest error of a component; the default is for float64.
        **kwargs: Keyword arguments of both, and the options of :func:`expected_moments`.

    Raises:
        AssertionError: If the gradients of a parameter differ, or if the exact gradient is zero, so that the
            comparison tests nothing.
        OptionError: If the ELBO is a bound of several samples, whose gradient is another one, or if it left the number
            of particles open, and these have many joint values.
        StructureChangedError: If an estimator draws noise of its own, and ``noise`` does not have it.
    """
    is_bound = isinstance(elbo, TraceBackpropQ_IWAE | RenyiELBO)
    if is_bound and (number := getattr(elbo, "num_inner", elbo.num_particles)) > 1:
        raise OptionError(
            f"assert_unbiased compares with the gradient of the ELBO of one sample, and {type(elbo).__name__} has "
            f"a bound of {number} samples. Compare expected_gradient(...) with the gradient of that bound, or "
            "write num_particles=1."
        )
    of_step = ("use_differentiable_loss", "noise")
    of_both = {k: v for k, v in kwargs.items() if k not in of_step}
    exact = exact_gradient(model, guide, *args, only_costs=isinstance(elbo, ExpectedCost), **of_both)
    _largest(exact, atol)
    is_open = getattr(getattr(elbo, "particles", None), "is_open", False) and elbo.num_particles > 1
    try:
        expected = expected_gradient(elbo, model, guide, *args, **({"num_outcomes": _FEW} if is_open else {}) | kwargs)
    except TooManyOutcomesError as error:
        if not is_open:
            raise
        raise OptionError(
            f"The number of particles was left open, and all values of {elbo.num_particles} particles are too many to "
            "sum over: write num_particles=1."
        ) from error
    if report := _differences(exact, expected, atol):
        again = expected_gradient(elbo, model, guide, *args, **kwargs) if kwargs.get("noise") is None else expected
        if not all(torch.allclose(again[n], own, rtol=0.0, atol=atol, equal_nan=True) for n, own in expected.items()):
            raise StructureChangedError(OWN_NOISE)
        if any(gradient.dtype != torch.float64 for gradient in exact.values()):
            report.append("Not all parameters are float64: torch.set_default_dtype(torch.float64), or a larger atol.")
        raise AssertionError("\n".join([f"{type(elbo).__name__} is biased (atol={atol}):", *report]))


def _largest(exact: Mapping[str, Tensor], zero: float = 0.0) -> float:
    """Largest component of a gradient, which must be above ``zero``."""
    scale = max((float(g.abs().max()) for g in exact.values() if g.numel()), default=0.0)
    if scale <= zero:
        raise AssertionError(
            f"The exact gradient is zero for all of {sorted(exact)}: this program tests nothing. Give its "
            "parameters asymmetric values."
        )
    return scale


def _differences(exact: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> list[str]:
    """Describes every parameter whose gradients differ by more than ``atol`` or are not finite."""
    pairs = {name: (truth, expected.get(name, torch.zeros_like(truth))) for name, truth in exact.items()}
    return [
        f"  parameter {name!r}: largest error {float((found - truth).abs().max()):.3g}\n"
        f"    exact    {truth.tolist()}\n    expected {found.tolist()}"
        for name, (truth, found) in pairs.items()
        if not bool(((found - truth).abs() <= atol).all())
    ]


def sample_gradients(
    elbo: Any,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int,
    parameters: Mapping[str, Tensor] | None = None,
    use_differentiable_loss: bool = False,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Runs a step many times without updating anything and stacks its gradients.

    Args:
        elbo: An ELBO with ``loss_and_grads``, in the mode that the caller has set.
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        num_samples: Number of steps.
        parameters: Leaves to read, by name. Default: as in :func:`exact_gradient`.
        use_differentiable_loss: Whether to call ``differentiable_loss(...).backward()`` instead.
        **kwargs: Keyword arguments of both.

    Returns:
        Gradients of the loss, shape ``(num_samples, *parameter.shape)``; zero if a step did not
        reach a parameter. The ``.grad`` fields are restored.

    Raises:
        OptionError: If ``num_samples`` is not positive.
    """
    if num_samples < 1:
        raise OptionError(f"sample_gradients(num_samples={num_samples!r}): write a positive number.")
    program = Program(model, guide, args, kwargs)
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        gradients = [take_step(elbo, program, reader, use_differentiable_loss) for _ in range(num_samples)]
    steps = [reader.named(gradient) for gradient in gradients]
    return {name: torch.stack([step[name] for step in steps]) for name in reader.names.values()}


def z_scores(
    samples: Mapping[str, Tensor], exact: Mapping[str, Tensor], *, max_relative_error: float = 0.05
) -> dict[str, Tensor]:
    r"""Measures the error of a mean gradient in standard errors.

        z = (mean - exact) / SE,   SE = standard deviation / √N.

    An unbiased estimator has ``|z| < 5`` almost surely. A power gate rejects a test that could not
    fail: ``SE`` of every component must be below ``max_relative_error`` times the gradient's scale. The scale is the
    largest component of the exact gradient over all parameters.

    Args:
        samples: Gradients by parameter, shape ``(N, *shape)``, independent along the first dimension.
        exact: Exact gradients of the tested parameters, shape ``shape``.
        max_relative_error: Limit of the power gate.

    Returns:
        z-score of each component, shape ``shape``; zero, or infinite, where all samples are equal.

    Raises:
        AssertionError: If the power gate is not passed, or a sample is not finite.
    """
    scale, found = _largest(exact), dict[str, Tensor]()
    for name, truth in exact.items():
        own, num_samples = samples[name], len(samples[name])
        if num_samples < 2 or not bool(own.isfinite().all()):
            raise AssertionError(f"Parameter {name!r}: needs two or more samples, all finite.")
        error, standard_error = own.mean(0) - truth, own.std(0) / math.sqrt(num_samples)
        relative = float(standard_error.max()) / scale if standard_error.numel() else 0.0
        if relative > max_relative_error:
            needed = math.ceil(num_samples * (relative / max_relative_error) ** 2)
            raise AssertionError(
                f"Parameter {name!r}: the standard error is {relative:.1%} of the gradient's scale, above "
                f"{max_relative_error:.1%}: too weak a test. Use about {needed} samples instead of {num_samples}."
            )
        rounding = 1e3 * torch.finfo(truth.dtype).eps * scale
        # Where all samples are equal the quotient says nothing.
        fixed = torch.where(error.abs() <= rounding, 0.0, error.sign() * math.inf).to(error.dtype)
        found[name] = torch.where(standard_error <= rounding, fixed, error / standard_error)
    return found
