"""Gradient estimators, one family a file."""

from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.base import Estimator as Estimator
from pyro_bpq.estimators.base import SiteContext as SiteContext
from pyro_bpq.estimators.base import SiteTerm as SiteTerm
from pyro_bpq.estimators.baselines import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.baselines import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.disarm import DisARM as DisARM
from pyro_bpq.estimators.lambda_return import LambdaReturn as LambdaReturn
from pyro_bpq.estimators.pathwise import Pathwise as Pathwise
from pyro_bpq.estimators.q_prop import QProp as QProp
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.estimators.straight_through import StraightThrough as StraightThrough

__all__ = [
    "AllAction",
    "DisARM",
    "Estimator",
    "LambdaReturn",
    "LeaveOneOut",
    "Pathwise",
    "QProp",
    "RunningBaseline",
    "ScoreFunction",
    "SiteContext",
    "SiteTerm",
    "StraightThrough",
]
