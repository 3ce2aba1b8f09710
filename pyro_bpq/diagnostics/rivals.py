r"""The estimators that :func:`~pyro_bpq.diagnostics.compare_estimators` measures unless others are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_bpq.diagnostics.comparison import DEFAULT
from pyro_bpq.estimators import LeaveOneOut, ScoreFunction
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.short import short

LOO = "leave-one-out"
_STORED = "__baseline_avg_downstream_cost_"


class GraphELBO(TraceGraph_ELBO):
    """Pyro's ``TraceGraph_ELBO`` with its baselines switched on or off, whatever the guide says.

    Attributes:
        is_learning: Whether averages move.
    """

    def __init__(self, has_baselines: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_baselines, self.is_learning = has_baselines, True
        self._averages: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"GraphELBO(has_baselines={self.has_baselines})"

    def train(self, mode: bool = True) -> None:
        """Lets averages move, or keeps them."""
        self.is_learning = mode

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """A step of Pyro's."""
        store = pyro.get_param_store()
        before = {name: store[name] for name in store.keys() if name.startswith(_STORED)}
        _put(before, self._averages)
        try:
            with poutine.block(hide_fn=lambda site: site["type"] == "param" and str(site["name"]).startswith(_STORED)):
                wrapped = poutine.infer_config(guide, self._options)  # type: ignore[arg-type]
                return float(super().loss_and_grads(model, wrapped, *args, **kwargs))  # type: ignore[no-untyped-call]
        finally:
            after = {name: store[name].detach() for name in store.keys() if name.startswith(_STORED)}
            _put(after, before)
            if self.is_learning:
                self._averages = after

    def _options(self, site: Any) -> dict[str, Any]:
        """What ``infer`` of a site is to be."""
        if not self.has_baselines or site["is_observed"] or getattr(site["fn"], "has_rsample", False):
            return {"baseline": {}}
        return {"baseline": site["infer"].get("baseline") or {"use_decaying_avg_baseline": True}}


def _put(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Puts some entries into the param store in place of others."""
    store = pyro.get_param_store()
    for name in old:
        del store[name]
    for name, value in new.items():
        store[name] = value


@dataclass(frozen=True)
class Rival:
    """An ELBO to be built."""

    kind: Callable[..., Any]  # its class
    options: Mapping[str, Any] = field(default_factory=dict)  # what the class is called with

    def build(self) -> Any:
        """The ELBO."""
        return self.kind(**self.options)

    @property
    def in_turn(self) -> Rival | None:
        """The same with its particles one after the other; ``None`` if it does not ask for a plate of particles."""
        if "vectorize_particles" not in self.options:
            return None
        return Rival(self.kind, {name: v for name, v in self.options.items() if name != "vectorize_particles"})

    @property
    def written(self) -> str:
        """What to write for it; empty for a class of this module, which is not to be imported."""
        if self.kind is GraphELBO:
            return ""
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def default_rivals(num_particles: int) -> dict[str, Rival]:
    """The ELBOs, by name."""
    several = {"num_particles": max(2, num_particles), "vectorize_particles": True}
    return {
        DEFAULT: Rival(TraceBackpropQ_ELBO),
        f"{DEFAULT}, {several['num_particles']} particles": Rival(TraceBackpropQ_ELBO, several),
        f"{DEFAULT}, no critic": Rival(TraceBackpropQ_ELBO, {"critic": None}),
        LOO: Rival(TraceBackpropQ_ELBO, {**several, "estimator": ScoreFunction(LeaveOneOut())}),
        "Trace_ELBO": Rival(Trace_ELBO),
        f"Trace_ELBO, {several['num_particles']} particles": Rival(Trace_ELBO, several),
        "TraceGraph_ELBO": Rival(GraphELBO, {"has_baselines": False}),
        "TraceGraph_ELBO, baselines": Rival(GraphELBO, {"has_baselines": True}),
    }


def took(elbo: Any) -> dict[str, str]:
    """The estimator of each site, and its critic; empty for ELBOs of other libraries, and before the first step."""
    plan = elbo.plan if isinstance(elbo, TraceBackpropQ_ELBO) else None
    if plan is None:
        return {}
    found = {}
    for name, spec in plan.layout.specs.items():
        nodes = () if plan.layout.network is None else plan.layout.network.q_nodes(name)
        has_critic = spec.critic is not None and any(node.is_learned for node in nodes)
        found[name] = short(spec.estimator) + (f" with {short(spec.critic)}" if has_critic else "")
    return found


def signature(elbo: Any) -> Any:
    """Equal for ELBOs that compute the same on the program of their last step; ``None`` where that is not known."""
    found = took(elbo)
    return (elbo.num_particles, tuple(sorted(found.items()))) if found else None
