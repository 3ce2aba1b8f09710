"""Gradient estimators, one family a file."""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.baselines import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.baselines import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.disarm import DisARM as DisARM
from pyro_bpq.estimators.lax import LAX as LAX
from pyro_bpq.estimators.pathwise import Pathwise as Pathwise
from pyro_bpq.estimators.rebar import REBAR as REBAR
from pyro_bpq.estimators.rebar import LearnedTemperature as LearnedTemperature
from pyro_bpq.estimators.relax import RELAX as RELAX
from pyro_bpq.estimators.relax import RELAXQ as RELAXQ
from pyro_bpq.estimators.relaxation import Annealed as Annealed
from pyro_bpq.estimators.scales import OptimalScale as OptimalScale
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.estimators.straight_through import StraightThrough as StraightThrough
from pyro_bpq.estimators.variates import NetworkVariate as NetworkVariate

__all__ = [
    "AllAction",
    "Annealed",
    "DisARM",
    "Estimator",
    "LAX",
    "LearnedTemperature",
    "LeaveOneOut",
    "NetworkVariate",
    "OptimalScale",
    "Pathwise",
    "REBAR",
    "RELAX",
    "RELAXQ",
    "RunningBaseline",
    "ScoreFunction",
    "SiteContext",
    "SiteTerm",
    "StraightThrough",
]
