r"""The loss of a model and a guide as a ``torch.nn.Module``, for torch's own optimisers."""

from __future__ import annotations

import warnings
from typing import Any

from pyro import poutine
from pyro.infer.elbo import ELBOModule
from torch import Tensor

from pyro_bpq.errors import BPQWarning


class LossModule(ELBOModule):
    """Pyro's module of a loss. Its first call warns of parameters that ``parameters()`` lacks.

    Such are parameters of ``pyro.param`` in plain functions: they lie in Pyro's parameter store, and an optimiser of
    ``parameters()`` would leave them as they are without a word.
    """

    def __init__(self, model: Any, guide: Any, elbo: Any) -> None:
        super().__init__(model, guide, elbo)
        self._was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The differentiable loss, a scalar in nats."""
        if self._was_called:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        with poutine.trace(param_only=True) as capture:
            loss: Tensor = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._was_called = True
        nodes: Any = capture.trace.nodes
        own = {id(parameter) for parameter in self.parameters()}
        lost = [name for name, site in nodes.items() if id(_leaf(site["value"])) not in own]
        if lost:
            warnings.warn(
                f"The parameters {lost} belong to no module, so that parameters() lacks them and an optimiser of it "
                "does not train them. Make model and guide PyroModules that hold them, as by self.w = "
                "PyroParam(torch.zeros(2)); or train with pyro.infer.SVI.",
                BPQWarning,
                stacklevel=2,
            )
        return loss


def _leaf(value: Any) -> Any:
    unconstrained = getattr(value, "unconstrained", None)
    return value if unconstrained is None else unconstrained()
