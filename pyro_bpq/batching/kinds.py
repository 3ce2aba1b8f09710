"""Names of what is summed: relations between classes, and costs that are known at every value of a site."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Known", "Relation"]


class Relation(Enum):
    """What a class of sites has to do with one of costs, sites or Q-nodes.

    Attributes:
        DOWNSTREAM: Costs downstream of a site, row by row of the plates.
        CROSSING: Costs downstream of a site that read all rows of its plates.
        TABLED: Immediate costs that are known at every value of a site.
        CROSSED: Twice the costs of a group, see :func:`~pyro_bpq.batching.crossed.crossed_costs`.
        LATER: Later sites whose control variates count for a site as a whole.
        LATER_OWN: Later sites, of whose control variates the part of their own log-probabilities counts.
        LATER_MODEL: Likewise the part of the model's costs.
        LATER_LEARNED: Q-nodes of later sites that count.
    """

    DOWNSTREAM = auto()
    CROSSING = auto()
    TABLED = auto()
    CROSSED = auto()
    LATER = auto()
    LATER_OWN = auto()
    LATER_MODEL = auto()
    LATER_LEARNED = auto()


class Known(str, Enum):
    """Immediate costs of a site that are known at every value of it: its own log-probabilities, or those of the model.

    In the order of their sums.
    """

    MODEL = "model"
    LOG_P = "p"
    LOG_Q = "q"
