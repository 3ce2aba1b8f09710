r"""Runs besides the first of a step: of further particles, without a trace, and with sites at stored values.

Further particles serve programs that cannot run in a plate. The first particle is the user's own run. What the others
draw and cost are rows of one flat function, the recording of the first, for many at once. So ``z[0]`` and ``z.sum()``
mean what they mean in a run of one particle.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from pyro.poutine.subsample_messenger import _Subsample
from pyro.poutine.trace_struct import Trace
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn

from pyro_bpq.critics.bank import is_of_critic
from pyro_bpq.record.function import Function, Uncut, flat, seeded
from pyro_bpq.record.laws import mapped, tensors_of
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.statements import Answers
from pyro_bpq.record.traced_run import TracedRun, named, record_run
from pyro_bpq.record.values import Value, put_back
from pyro_bpq.record.watch import gradients_of, samples

# What of a site's message is computed anew.
_PARTS = ("fn", "value", "log_prob", "unscaled_log_prob", "log_prob_sum", "score_parts", "scale", "mask")


def further_particles(first: TracedRun, bound: Bound | None, number: int) -> list[TracedRun]:
    """Runs of further particles, which differ from the first one in what they draw; ``bound`` is that run.

    Raises:
        Uncut: If something cannot be computed again, or not for many particles at once.
    """
    for name, own in first.options.items():
        if getattr(own.estimator, "attaches", False):
            raise Uncut(f"{own.estimator} attaches a gradient to the value of {name!r}")
    if bound is None or first.untraced or not bound.recorded.traced:
        raise Uncut("a value that no operator has made")
    rows = {value: tensor.unbind(0) for value, tensor in _many(bound, number).items()}
    return [_particle(first, bound, 1 + number, rows, i) for i in range(number)]


def _many(bound: Bound, number: int) -> dict[Value, Tensor]:
    """What the traces of so many new particles hold, by value, ``(number, ...)``, without what all share.

    Raises:
        Uncut: If something cannot be computed again, or not for many particles at once.
    """
    own, masks = bound.recorded, bound.recorded.recording.masks
    wanted = tuple(dict.fromkeys(value for value in own.traced if masks[value]))
    try:
        function = own.kept(("many", number, wanted), lambda: _of_many(bound, number, wanted))
    except (NotImplementedError, RuntimeError) as error:
        raise Uncut(f"it failed: {error}") from error
    return dict(zip(wanted, function(*(bound.tensors[value] for value in function.asked)), strict=True))


def _of_many(bound: Bound, number: int, wanted: Sequence[Value]) -> Function:
    recording, tensors = bound.recorded.recording, bound.tensors
    function = recording.cut(wanted, redrawn=frozenset(site.value for site in bound.recorded.drawn.values()))
    given = function.given
    if not recording.lasts(given) or any(effects_of(node.func).is_random for node in function.nodes):
        raise Uncut("the program draws noise of its own")

    def rows(index: Tensor, *own: Tensor) -> list[Tensor]:
        return plain.with_draws(lambda draw: partial(draw.rows, index))(*own)

    def run(*own: Tensor) -> list[Tensor]:
        every = torch.func.vmap(rows, (0, *(None for _ in own)), randomness="different")
        found: list[Tensor] = every(torch.arange(number), *own)
        return found

    with BlockMessenger(hide_types=["bpq_draw"]):
        plain = function.without_writes(tensors)
        return flat(run, [tensors[value] for value in given], given)


def _particle(first: TracedRun, bound: Bound, number: int, rows: Any, i: int) -> TracedRun:
    """One of them."""
    names = iter(bound.recorded.traced)

    def own(tensor: Tensor) -> Tensor:
        name = next(names)
        return rows[name][i] if name in rows else tensor

    guide, model = (_changed(trace, own) for trace in (first.guide_trace, first.model_trace))
    for cost, site, _ in named(samples(guide), samples(model)):
        # Scale and mask are those of the run, as they are for costs at other values: the recording may be older.
        if cost in bound.weights and not (bound.is_plain(cost) and site["log_prob"] is site["unscaled_log_prob"]):
            _weigh(site, *bound.weights[cost])
    again = record_run(model, guide, samples(guide), number, first.subsamples)
    return replace(again, recorded=first.recorded, flags=first.flags)


def _weigh(site: Any, scale: Any, mask: Any) -> None:
    """Scales and masks the log-probability of a site."""
    log_prob, parts = scale_and_mask(site["unscaled_log_prob"], scale, mask), site.get("score_parts")
    site.update(scale=scale, mask=mask, log_prob=log_prob, log_prob_sum=log_prob.sum())
    if parts is not None:
        term = log_prob if isinstance(parts.entropy_term, Tensor) else parts.entropy_term
        site["score_parts"] = parts._replace(log_prob=log_prob, entropy_term=term)


def parts_of(guide_trace: Any, model_trace: Any) -> list[Tensor]:
    """The tensors of traces in a fixed order."""
    sites = [*samples(guide_trace).values(), *samples(model_trace).values()]
    return tensors_of([site[part] for site in sites for part in _PARTS if part in site])


def _changed(trace: Any, change: Callable[[Tensor], Tensor]) -> Trace:
    copied: Any = Trace()
    for name, site in trace.nodes.items():
        if site["type"] == "sample":
            new = {part: mapped(site[part], change) for part in _PARTS if part in site}
            copied.nodes[name] = {**site, **new}
        elif site["type"] == "param":
            copied.nodes[name] = site
    return copied


@torch.no_grad()
def costs_agree(traced: TracedRun, bound: Bound) -> bool:
    """Whether the operators of an earlier run give the costs of a run, up to rounding."""
    try:
        found = bound.again(traced.run.costs)
    except (Uncut, KeyError, RuntimeError):
        return False

    def agree(own: Tensor, other: Tensor) -> Tensor:
        rounding = min(100.0 * torch.finfo(own.dtype).eps, 0.01)
        return torch.isclose(own, other, rounding, rounding).all()

    # One read on the host.
    return bool(torch.stack([agree(own, found[name]) for name, own in traced.run.costs.items()]).all())


def gradients_agree(traced: TracedRun, bound: Bound) -> bool:
    """Whether the operators of a run have the gradient of the run itself: hooks and ``no_grad`` are not among them."""
    wanted, loss = bound.recorded.differentiable, traced.run.differentiable
    if wanted is None or not loss.requires_grad:
        return wanted is not None
    # Reparameterised values lead on to the parameters of their laws.
    values = {site.value: traced.run.sites[name].value for name, site in bound.recorded.drawn.items()}
    (again,) = bound.recorded.recording.cut([wanted]).at({**bound.tensors, **values})
    leaves = [tensor for tensor in bound.tensors.values() if tensor.is_leaf and tensor.requires_grad and tensor.numel()]
    native, other = (gradients_of(total, leaves, retain_graph=True) for total in (loss, again))
    pairs = ((own.get(leaf, torch.zeros_like(leaf)) for own in (native, other)) for leaf in leaves)
    return all(torch.allclose(own, found, rtol=1e-3, atol=1e-3 * float(own.abs().max())) for own, found in pairs)


class LentBuffers:
    """Gives each module that a run calls on its thread copies of its buffers, and takes them back afterwards."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._own: dict[nn.Module, dict[str, Tensor | None]] = {}

    def __enter__(self) -> LentBuffers:
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._lend)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for module, buffers in self._own.items():
            _put(module, buffers)

    def _lend(self, module: nn.Module, _: object) -> None:
        if threading.get_ident() != self._thread or is_of_critic(module):
            return
        # The parts of a scripted module are called by no hook.
        for part in module.modules() if isinstance(module, torch.jit.ScriptModule) else (module,):
            if part._buffers and part not in self._own:
                own = self._own[part] = dict(part._buffers.items())
                # The run writes into clones only: autograd may hold the originals.
                _put(part, {name: None if buffer is None else buffer.clone() for name, buffer in own.items()})


def _put(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():  # a scripted module has no dictionary to update
        module._buffers[name] = buffer


class _Unheard(BlockMessenger):
    """Keeps statements from the handlers around. No program sees it, so it makes no other call."""


@contextlib.contextmanager
def isolated(seed: int, hides_params: bool = True) -> Iterator[None]:
    """Runs programs from a given seed; generators, module buffers and captured parameters stay unchanged."""
    before = get_rng_state()
    try:
        with seeded(seed), LentBuffers(), _Unheard(hide_types=["param"] if hides_params else []):
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        set_rng_state(before)


class Draws:
    """Marks the state of the CPU's global generator and of buffers, so that a step can run again."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()
        self.answers = Answers()
        pairs = [(module, *pair) for module in modules for pair in module._buffers.items()]
        self._buffers = [(*pair, None if pair[-1] is None else pair[-1].detach().clone()) for pair in pairs]

    @torch.no_grad()
    def again(self, runs: Sequence[TracedRun] = ()) -> None:
        """Goes back to the mark, and undoes what runs since then have written if they were recorded.

        The draws since the mark are repeated from now on.
        """
        for run in reversed(runs):
            put_back({} if run.recorded is None else run.recorded.recording.written)
        torch.set_rng_state(self._state)
        self.answers.position = 0
        _rewind(self._mark)
        for module, name, own, kept in self._buffers:
            module._buffers[name] = own if own is None or kept is None else own.copy_(kept)


# These messages tell handlers that draw in place of the generator of a mark, and of a return to it.
_mark = effectful(lambda: None, type="bpq_mark")
_rewind = effectful(lambda mark: None, type="bpq_rewind")


class StaleError(Exception):
    """A stored value no longer fits the program."""


class Hold(Messenger):
    """Holds latent sites and subsample indices at given values, and records the sites' distributions; others draw."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.fns = values, dict[str, Any]()

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        # A recording knows the model's site by the very tensor that the guide has, which replay has put in already.
        if msg["done"] or msg["is_observed"] or name not in self.values:
            return
        value = msg["value"] = self.values[name]
        msg["done"] = True
        # The first distribution is the guide's. The model's distribution of the site may have a smaller shape.
        if not isinstance(fn, _Subsample) and name not in self.fns:
            self.fns[name] = fn
            if tuple(value.shape) != tuple(fn.batch_shape + fn.event_shape):
                raise StaleError(f"Site {name!r} has another shape than when it was stored.")
