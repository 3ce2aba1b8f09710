"""Enumerations: relations between classes, and kinds of costs that are known at every value of a site."""

from __future__ import annotations

from enum import Enum, auto


class Relation(Enum):
    """A relation of a class of sites to a class of costs, sites or Q-nodes.

    Attributes:
        DOWNSTREAM: Costs downstream of a site, row by row of the plates.
        CROSSING: Costs downstream of a site that one row of its plates may affect in other rows.
        TABLED: Immediate costs that are known at every value of a site.
        CROSSED: The costs of a group, twice over, see :func:`~pyro_bpq.batching.crossed.crossed_costs`.
        LATER: Later sites whose whole control variate counts for a site.
        LATER_OWN: Later sites whose control variate counts in the part of their own log-probabilities.
        LATER_MODEL: Later sites whose control variate counts in the part of the model's costs.
        LATER_LEARNED: Q-nodes of later sites whose part of the control variate counts.
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
    """Kinds of immediate costs that are known at every value of a site.

    ``LOG_Q`` and ``LOG_P`` are the site's own log-probabilities, ``MODEL`` other costs of the model. Costs are summed
    in the order of the enumeration.
    """

    MODEL = "model"
    LOG_P = "p"
    LOG_Q = "q"
