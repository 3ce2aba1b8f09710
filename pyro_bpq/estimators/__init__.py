"""Gradient estimators, one family per file.

They read the tensors of a class of sites and return a term of the surrogate. An option that is out of range raises
``OptionError``. The functions are for estimators of your own, such as those in ``examples/estimators/``. Imports
``rollout``. Read ``base.py`` first, then ``score_function.py``.
"""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.all_action import QProp as QProp
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteInfo as SiteInfo
from pyro_bpq.estimators.base import SiteProgram as SiteProgram
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.base import Statistics as Statistics
from pyro_bpq.estimators.base import cost_per_row as cost_per_row
from pyro_bpq.estimators.base import event_sum as event_sum
from pyro_bpq.estimators.base import site_mean as site_mean
from pyro_bpq.estimators.differences import Differences as Differences
from pyro_bpq.estimators.hindsight import Hindsight as Hindsight
from pyro_bpq.estimators.q_estimators import CriticBaseline as CriticBaseline
from pyro_bpq.estimators.q_estimators import LambdaReturn as LambdaReturn
from pyro_bpq.estimators.q_estimators import ParentAdvantage as ParentAdvantage
from pyro_bpq.estimators.q_estimators import QAdvantage as QAdvantage
from pyro_bpq.estimators.q_estimators import QAllAction as QAllAction
from pyro_bpq.estimators.q_estimators import QControlVariate as QControlVariate
from pyro_bpq.estimators.q_estimators import QPathwise as QPathwise
from pyro_bpq.estimators.q_estimators import QScoreFunction as QScoreFunction
from pyro_bpq.estimators.relax import QRELAX as QRELAX
from pyro_bpq.estimators.relax import REBAR as REBAR
from pyro_bpq.estimators.relax import RELAX as RELAX
from pyro_bpq.estimators.relax import RELAXQ as RELAXQ
from pyro_bpq.estimators.relax import Concrete as Concrete
from pyro_bpq.estimators.relax import GumbelStraightThrough as GumbelStraightThrough
from pyro_bpq.estimators.relax import QRelaxation as QRelaxation
from pyro_bpq.estimators.relax import ReinMax as ReinMax
from pyro_bpq.estimators.relax import StraightThrough as StraightThrough
from pyro_bpq.estimators.relaxation import Annealed as Annealed
from pyro_bpq.estimators.relaxation import exponential as exponential
from pyro_bpq.estimators.relaxation import gumbel as gumbel
from pyro_bpq.estimators.relaxation import uniform as uniform
from pyro_bpq.estimators.relaxation import uniform_given as uniform_given
from pyro_bpq.estimators.reparameterise import LAX as LAX
from pyro_bpq.estimators.reparameterise import LAXQ as LAXQ
from pyro_bpq.estimators.reparameterise import Pathwise as Pathwise
from pyro_bpq.estimators.requirements import needs_binary as needs_binary
from pyro_bpq.estimators.requirements import needs_continuous as needs_continuous
from pyro_bpq.estimators.requirements import needs_finite as needs_finite
from pyro_bpq.estimators.requirements import needs_float_value as needs_float_value
from pyro_bpq.estimators.requirements import needs_particles as needs_particles
from pyro_bpq.estimators.requirements import needs_single as needs_single
from pyro_bpq.estimators.score_function import CrossedLeaveOneOut as CrossedLeaveOneOut
from pyro_bpq.estimators.score_function import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.score_function import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.estimators.score_function import SecondRun as SecondRun
from pyro_bpq.estimators.score_function import TrimmedBaseline as TrimmedBaseline
from pyro_bpq.estimators.score_function import leave_one_out as leave_one_out
from pyro_bpq.estimators.slopes import DebiasedStraightThrough as DebiasedStraightThrough
from pyro_bpq.estimators.slopes import DisARM as DisARM
from pyro_bpq.estimators.slopes import MuProp as MuProp
from pyro_bpq.estimators.variates import NetworkVariate as NetworkVariate
from pyro_bpq.estimators.variates import OptimalScale as OptimalScale
from pyro_bpq.rollout.features import base_distribution as base_distribution

__all__ = sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
