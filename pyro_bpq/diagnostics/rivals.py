r"""The estimators that :func:`~pyro_bpq.diagnostics.compare_estimators` measures unless others are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_bpq.estimators import LeaveOneOut, ScoreFunction
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.short import short

__all__ = ["DEFAULT", "LOO", "GraphELBO", "default_rivals", "in_turn", "signature", "took", "written"]

DEFAULT, LOO = "default", "leave-one-out"
_STORED = "__baseline_avg_downstream_cost_"


class GraphELBO(TraceGraph_ELBO):
    """Pyro's ``TraceGraph_ELBO`` with its baselines switched on or off, whatever the guide says.

    Args:
        has_baselines: Whether sites that are not reparameterised have a baseline: the guide's own, else Pyro's decaying
            average. Averages are kept here, and not in the param store.

    Attributes:
        is_learning: Whether averages move.
    """

    def __init__(self, has_baselines: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_baselines, self.is_learning = has_baselines, True
        self._averages: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"GraphELBO(has_baselines={self.has_baselines})"

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """A step of Pyro's."""
        store = pyro.get_param_store()
        before = {name: store[name] for name in store.keys() if name.startswith(_STORED)}
        _put(before, self._averages)
        try:
            with poutine.block(hide_fn=_is_average):
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


def _is_average(message: Any) -> bool:
    return message["type"] == "param" and str(message["name"]).startswith(_STORED)


def default_rivals(num_particles: int) -> dict[str, Callable[[], Any]]:
    """What makes each ELBO, by name.

    Args:
        num_particles: Number of particles of leave-one-out, and of the default with several.
    """
    several = max(2, num_particles)
    return {
        DEFAULT: TraceBackpropQ_ELBO,
        f"{DEFAULT}, {several} particles": lambda: TraceBackpropQ_ELBO(several, vectorize_particles=True),
        "default, no critic": lambda: TraceBackpropQ_ELBO(critic=None),
        LOO: lambda: TraceBackpropQ_ELBO(several, vectorize_particles=True, estimator=ScoreFunction(LeaveOneOut())),
        "Trace_ELBO": Trace_ELBO,
        "TraceGraph_ELBO": lambda: GraphELBO(False),
        "TraceGraph_ELBO, baselines": lambda: GraphELBO(True),
    }


def in_turn(name: str, elbo: Any) -> Any:
    """The same ELBO with its particles one after the other; ``None`` if it has no plate of particles.

    Args:
        name: Its name among the default rivals.
        elbo: The ELBO.
    """
    if not (isinstance(elbo, TraceBackpropQ_ELBO) and elbo.vectorize_particles):
        return None
    number = elbo.num_particles
    if name == LOO:
        return TraceBackpropQ_ELBO(number, estimator=ScoreFunction(LeaveOneOut()))
    return TraceBackpropQ_ELBO(number)


def written(name: str, elbo: Any) -> str:
    """What to write for a default rival.

    Args:
        name: Its name.
        elbo: The ELBO.
    """
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        return f"{name}()" if name == "Trace_ELBO" else ""
    options = [str(elbo.num_particles), "vectorize_particles=True"] if elbo.vectorize_particles else []
    if not options and name != DEFAULT and elbo.num_particles > 1:
        options = [str(elbo.num_particles)]
    options += ["estimator=ScoreFunction(LeaveOneOut())"] * (name == LOO)
    options += ["critic=None"] * ("no critic" in name)
    return f"TraceBackpropQ_ELBO({', '.join(options)})"


def took(elbo: Any) -> dict[str, str]:
    """The estimator of each site, and its critic; empty for ELBOs of other libraries, and before the first step."""
    plan = elbo.plan if isinstance(elbo, TraceBackpropQ_ELBO) else None
    if plan is None:
        return {}
    found = {}
    for name, spec in plan.layout.specs.items():
        has_critic = spec.critic is not None and any(node.is_learned for node in _nodes(plan, name))
        found[name] = short(spec.estimator) + (f" with {short(spec.critic)}" if has_critic else "")
    return found


def _nodes(plan: Any, site: str) -> tuple[Any, ...]:
    network = plan.layout.network
    return () if network is None else tuple(network.q_nodes(site))


def signature(elbo: Any) -> Any:
    """Equal for ELBOs that compute the same on the program of their last step; ``None`` where that is not known."""
    found = took(elbo)
    return (elbo.num_particles, tuple(sorted(found.items()))) if found else None
