"""Gradient estimators, one family per file.

They read the tensors of a class of sites and return a term of the surrogate. An option that is out of range raises
``OptionError``. Imports ``rollout`` and ``critics``. Read ``base.py`` first, then ``score_function.py``.
"""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.all_action import QProp as QProp
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.debiased_straight_through import DebiasedStraightThrough as DebiasedStraightThrough
from pyro_bpq.estimators.disarm import ARM as ARM
from pyro_bpq.estimators.disarm import ARMS as ARMS
from pyro_bpq.estimators.disarm import DirichletCopula as DirichletCopula
from pyro_bpq.estimators.disarm import DisARM as DisARM
from pyro_bpq.estimators.disarm import DisARMTree as DisARMTree
from pyro_bpq.estimators.disarm import RotationCopula as RotationCopula
from pyro_bpq.estimators.distinct_values import SumAndSample as SumAndSample
from pyro_bpq.estimators.distinct_values import UnorderedSet as UnorderedSet
from pyro_bpq.estimators.hindsight import Hindsight as Hindsight
from pyro_bpq.estimators.lambda_return import LambdaReturn as LambdaReturn
from pyro_bpq.estimators.lambda_return import ParentAdvantage as ParentAdvantage
from pyro_bpq.estimators.lax import LAX as LAX
from pyro_bpq.estimators.lax import LAXQ as LAXQ
from pyro_bpq.estimators.measure_valued import MeasureValued as MeasureValued
from pyro_bpq.estimators.q_estimators import CriticBaseline as CriticBaseline
from pyro_bpq.estimators.q_estimators import QAdvantage as QAdvantage
from pyro_bpq.estimators.q_estimators import QAllAction as QAllAction
from pyro_bpq.estimators.q_estimators import QControlVariate as QControlVariate
from pyro_bpq.estimators.q_estimators import QPathwise as QPathwise
from pyro_bpq.estimators.q_estimators import QRelaxation as QRelaxation
from pyro_bpq.estimators.q_estimators import QScoreFunction as QScoreFunction
from pyro_bpq.estimators.relax import QRELAX as QRELAX
from pyro_bpq.estimators.relax import REBAR as REBAR
from pyro_bpq.estimators.relax import RELAX as RELAX
from pyro_bpq.estimators.relax import RELAXQ as RELAXQ
from pyro_bpq.estimators.relaxation import Annealed as Annealed
from pyro_bpq.estimators.relaxation import LearnedTemperature as LearnedTemperature
from pyro_bpq.estimators.reparameterise import GeneralisedReparameterisation as GeneralisedReparameterisation
from pyro_bpq.estimators.reparameterise import Pathwise as Pathwise
from pyro_bpq.estimators.score_function import ConstantBaseline as ConstantBaseline
from pyro_bpq.estimators.score_function import CrossedLeaveOneOut as CrossedLeaveOneOut
from pyro_bpq.estimators.score_function import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.score_function import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.estimators.score_function import SecondRun as SecondRun
from pyro_bpq.estimators.score_function import TrimmedBaseline as TrimmedBaseline
from pyro_bpq.estimators.slopes import RODEO as RODEO
from pyro_bpq.estimators.slopes import DoubleCV as DoubleCV
from pyro_bpq.estimators.slopes import MuProp as MuProp
from pyro_bpq.estimators.straight_through import Concrete as Concrete
from pyro_bpq.estimators.straight_through import GumbelStraightThrough as GumbelStraightThrough
from pyro_bpq.estimators.straight_through import ReinMax as ReinMax
from pyro_bpq.estimators.straight_through import StraightThrough as StraightThrough
from pyro_bpq.estimators.variates import NetworkVariate as NetworkVariate
from pyro_bpq.estimators.variates import OptimalScale as OptimalScale

__all__ = sorted(name for name in globals() if name[0].isupper())
