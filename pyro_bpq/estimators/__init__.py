"""Gradient estimators, one family a file."""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.arms import ARMS as ARMS
from pyro_bpq.estimators.arms import DirichletCopula as DirichletCopula
from pyro_bpq.estimators.arms import RotationCopula as RotationCopula
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.baselines import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.baselines import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.disarm import ARM as ARM
from pyro_bpq.estimators.disarm import DisARM as DisARM
from pyro_bpq.estimators.disarm_tree import DisARMTree as DisARMTree
from pyro_bpq.estimators.double_cv import RODEO as RODEO
from pyro_bpq.estimators.double_cv import DoubleCV as DoubleCV
from pyro_bpq.estimators.gumbel_softmax import Concrete as Concrete
from pyro_bpq.estimators.gumbel_softmax import GumbelStraightThrough as GumbelStraightThrough
from pyro_bpq.estimators.lambda_return import LambdaReturn as LambdaReturn
from pyro_bpq.estimators.measure_valued import MeasureValued as MeasureValued
from pyro_bpq.estimators.muprop import MuProp as MuProp
from pyro_bpq.estimators.pathwise import Pathwise as Pathwise
from pyro_bpq.estimators.q_prop import QProp as QProp
from pyro_bpq.estimators.reinmax import ReinMax as ReinMax
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.estimators.straight_through import StraightThrough as StraightThrough
from pyro_bpq.estimators.sum_and_sample import SumAndSample as SumAndSample
from pyro_bpq.estimators.unordered_set import UnorderedSet as UnorderedSet

__all__ = [
    "ARM",
    "ARMS",
    "RODEO",
    "AllAction",
    "Concrete",
    "DirichletCopula",
    "DisARM",
    "DisARMTree",
    "DoubleCV",
    "Estimator",
    "GumbelStraightThrough",
    "LambdaReturn",
    "LeaveOneOut",
    "MeasureValued",
    "MuProp",
    "Pathwise",
    "QProp",
    "ReinMax",
    "RotationCopula",
    "RunningBaseline",
    "ScoreFunction",
    "SiteContext",
    "SiteTerm",
    "StraightThrough",
    "SumAndSample",
    "UnorderedSet",
]
