r"""The gradient of a guide along its critics: no cost is needed, and the critics' errors are its bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.step.signals import Signals

__all__ = ["bootstrapped_surrogate"]


def bootstrapped_surrogate(signals: Sequence[Signals], entropy: float = 0.0, gamma: float = 1.0) -> Tensor:
    r"""The sum of what critics expect at every site, as a function of the site's own probabilities.

        S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x)),   I and Q detached

    Args:
        signals: One for all particles; or one for each, where sampled values steer the program.
        entropy: Weight ``α`` of the negative entropy of every site.
        gamma: Discount per level, with which the critics learned; the immediate costs ``I`` are discounted by it.

    Returns:
        A scalar, summed over particles; only its gradient has meaning. Sites whose critics have not been built yet
        add nothing.

    Raises:
        UnsupportedSiteError: If a site has no finite components, or no critic by choice.
    """
    terms = []
    for one in signals:
        for c in one.active:
            cls = one.layout.classes[c]
            if cls.spec.components is None or (cls.spec.critic is None and not cls.spec.tabled):
                raise UnsupportedSiteError(
                    f"Sites {', '.join(map(repr, cls.names))} cannot learn from critics alone: that takes finite "
                    "values and a critic, as of Categorical sites with critic=MLPCritic(). Use pyro.infer.SVI."
                )
            learned, table = one.learned.get(c), one.exact[c]
            table = table if table is None or gamma == 1.0 else gamma * table
            if learned is not None and learned.table is not None:
                table = learned.table if table is None else table + learned.table
            if table is not None:
                log_q = one.batches[c].log_probs
                terms.append((log_q.exp() * (table + entropy * log_q if entropy else table)).sum())
    return torch.stack(terms).sum() if terms else torch.zeros(())
