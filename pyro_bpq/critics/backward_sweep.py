r"""Option: critics learn before the gradient is formed, one after the other, as in the paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyro_bpq.errors import OptionError


@dataclass(frozen=True)
class BackwardSweep:
    r"""Critics learn in a backward sweep over the Backprop-Q network, before the gradient of the step is formed.

        w_X ← w_X + α (G_X - Q_w(Sc_X)) ∇Q_w(Sc_X),   G_X from the children *after* their step

    A step of plain gradient descent on half the squared error, in the units of the costs. With several particles or
    plate rows it is the mean over these, of a table over those that read the same entry. Targets are sample backups,
    :func:`~pyro_bpq.targets.lambda_return.lambda_return` without expectations.

    Critics then depend on the rollout whose gradient they enter. So the gradient is **biased**, that of estimators
    that are unbiased otherwise, too. Without this option critics learn after the gradient. Critics learn in
    ``differentiable_loss`` itself; a step that fails takes that back.

    Args:
        rate: Step size ``α``, or a function of the step. A table takes any ``α`` below 2, a net needs a small one.

    Raises:
        OptionError: If the rate is not positive.

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1, lines 10 to 13
    """

    rate: float | Callable[[int], float] = 0.1

    def __post_init__(self) -> None:
        if not callable(self.rate) and not self.rate > 0.0:
            raise OptionError(f"BackwardSweep(rate={self.rate!r}): write a positive number or a function of the step.")

    def at(self, step: int) -> float:
        """The step size after so many steps."""
        return float(self.rate(step)) if callable(self.rate) else float(self.rate)
