"""Gradient estimators, one family a file."""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.baselines import ConstantBaseline as ConstantBaseline
from pyro_bpq.estimators.baselines import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.baselines import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.disarm import DisARM as DisARM
from pyro_bpq.estimators.generalised import GeneralisedReparameterisation as GeneralisedReparameterisation
from pyro_bpq.estimators.lax import LAX as LAX
from pyro_bpq.estimators.pathwise import Pathwise as Pathwise
from pyro_bpq.estimators.q_estimators import CriticBaseline as CriticBaseline
from pyro_bpq.estimators.q_estimators import QAdvantage as QAdvantage
from pyro_bpq.estimators.q_estimators import QAllAction as QAllAction
from pyro_bpq.estimators.q_estimators import QControlVariate as QControlVariate
from pyro_bpq.estimators.q_estimators import QRelaxation as QRelaxation
from pyro_bpq.estimators.q_estimators import QScoreFunction as QScoreFunction
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
    "LAX",
    "REBAR",
    "RELAX",
    "RELAXQ",
    "AllAction",
    "Annealed",
    "ConstantBaseline",
    "CriticBaseline",
    "DisARM",
    "Estimator",
    "GeneralisedReparameterisation",
    "LearnedTemperature",
    "LeaveOneOut",
    "NetworkVariate",
    "OptimalScale",
    "Pathwise",
    "QAdvantage",
    "QAllAction",
    "QControlVariate",
    "QRelaxation",
    "QScoreFunction",
    "RunningBaseline",
    "ScoreFunction",
    "SiteContext",
    "SiteTerm",
    "StraightThrough",
]
