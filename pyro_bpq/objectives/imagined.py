r"""The gradient of a guide along its critics: no cost is needed, and the critics' errors are its bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.step.critic_step import NEEDS_LEAF
from pyro_bpq.step.signal_table import moved_value, q_slope, q_value
from pyro_bpq.step.signals import Signals


def bootstrapped_surrogate(signals: Sequence[Signals], entropy: float = 0.0, gamma: float = 1.0) -> Tensor:
    r"""The sum of what critics expect at every site, as a function of the site's own distribution.

        S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x))   with finite components
        S = Σ_X ∂Q_X(x)/∂x x(ε; θ) - α H[q_X]                 without, for estimators that take the slope of the critic
        S = Σ_X (Q_X(x) - V_X) log q_X(x) - α H[q_X]          for others

    ``I``, ``Q`` and its slope are detached.
    """
    terms = []
    for one in signals:
        for c in one.active:
            spec, names = one.layout.classes[c].spec, ", ".join(map(repr, one.layout.classes[c].names))
            if spec.critic is None and not spec.tabled:
                raise UnsupportedSiteError(
                    f"Sites {names} cannot learn from critics alone, since they have none. Write "
                    'infer={"bpq": {"critic": MLPCritic()}} at sites of finite values, {"estimator": QPathwise()} at '
                    "continuous ones, or use pyro.infer.SVI."
                )
            if spec.components is None:
                if c in one.learned:
                    terms.append(_continuous(one, c))
                    terms += [-entropy * _entropy(one, c, names)] if entropy else []
                continue
            learned, table = one.learned.get(c), one.exact(c)
            table = table if table is None or gamma == 1.0 else gamma * table
            if learned is not None and learned.table is not None:
                table = learned.table if table is None else table + learned.table
            if table is not None:
                log_q = one.batches[c].log_probs
                terms.append((log_q.exp() * (table + entropy * log_q if entropy else table)).sum())
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _continuous(signals: Signals, c: int) -> Tensor:
    """The term of sites without finite components."""
    if NEEDS_LEAF in signals.layout.classes[c].spec.estimator.needs:
        return (q_slope(signals, c) * moved_value(signals, c)).sum()
    advantage = q_value(signals, c) - signals.learned[c].level
    return (advantage * signals.batches[c].score).sum()


def _entropy(signals: Signals, c: int, names: str) -> Tensor:
    """Sum of the sites' entropies in nats."""
    try:
        return signals.batches[c].stack(lambda site: site.fn.entropy(), 0).sum()
    except NotImplementedError as error:
        raise UnsupportedSiteError(f"Sites {names} have no entropy in closed form; write entropy=0.0.") from error
