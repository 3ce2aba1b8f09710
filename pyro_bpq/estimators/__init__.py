"""Gradient estimators, one family a file. A file is imported when one of its names is first asked for."""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyro_bpq.estimators.all_action import AllAction as AllAction
    from pyro_bpq.estimators.arms import ARMS as ARMS
    from pyro_bpq.estimators.arms import DirichletCopula as DirichletCopula
    from pyro_bpq.estimators.arms import RotationCopula as RotationCopula
    from pyro_bpq.estimators.base import Estimator as Estimator
    from pyro_bpq.estimators.base import SiteContext as SiteContext
    from pyro_bpq.estimators.base import SiteTerm as SiteTerm
    from pyro_bpq.estimators.baselines import ConstantBaseline as ConstantBaseline
    from pyro_bpq.estimators.baselines import LeaveOneOut as LeaveOneOut
    from pyro_bpq.estimators.baselines import RunningBaseline as RunningBaseline
    from pyro_bpq.estimators.baselines import TrimmedBaseline as TrimmedBaseline
    from pyro_bpq.estimators.crossed_leave_one_out import CrossedLeaveOneOut as CrossedLeaveOneOut
    from pyro_bpq.estimators.debiased_straight_through import DebiasedStraightThrough as DebiasedStraightThrough
    from pyro_bpq.estimators.disarm import ARM as ARM
    from pyro_bpq.estimators.disarm import DisARM as DisARM
    from pyro_bpq.estimators.disarm_tree import DisARMTree as DisARMTree
    from pyro_bpq.estimators.double_cv import RODEO as RODEO
    from pyro_bpq.estimators.double_cv import DoubleCV as DoubleCV
    from pyro_bpq.estimators.generalised import GeneralisedReparameterisation as GeneralisedReparameterisation
    from pyro_bpq.estimators.gumbel_softmax import Concrete as Concrete
    from pyro_bpq.estimators.gumbel_softmax import GumbelStraightThrough as GumbelStraightThrough
    from pyro_bpq.estimators.hindsight import Hindsight as Hindsight
    from pyro_bpq.estimators.lambda_return import LambdaReturn as LambdaReturn
    from pyro_bpq.estimators.lax import LAX as LAX
    from pyro_bpq.estimators.laxq import LAXQ as LAXQ
    from pyro_bpq.estimators.measure_valued import MeasureValued as MeasureValued
    from pyro_bpq.estimators.muprop import MuProp as MuProp
    from pyro_bpq.estimators.optimal_scale import OptimalScale as OptimalScale
    from pyro_bpq.estimators.parent_advantage import ParentAdvantage as ParentAdvantage
    from pyro_bpq.estimators.pathwise import Pathwise as Pathwise
    from pyro_bpq.estimators.q_estimators import CriticBaseline as CriticBaseline
    from pyro_bpq.estimators.q_estimators import QAdvantage as QAdvantage
    from pyro_bpq.estimators.q_estimators import QAllAction as QAllAction
    from pyro_bpq.estimators.q_estimators import QControlVariate as QControlVariate
    from pyro_bpq.estimators.q_estimators import QRelaxation as QRelaxation
    from pyro_bpq.estimators.q_estimators import QScoreFunction as QScoreFunction
    from pyro_bpq.estimators.q_pathwise import QPathwise as QPathwise
    from pyro_bpq.estimators.q_prop import QProp as QProp
    from pyro_bpq.estimators.q_relax import QRELAX as QRELAX
    from pyro_bpq.estimators.rebar import REBAR as REBAR
    from pyro_bpq.estimators.rebar import LearnedTemperature as LearnedTemperature
    from pyro_bpq.estimators.reinmax import ReinMax as ReinMax
    from pyro_bpq.estimators.relax import RELAX as RELAX
    from pyro_bpq.estimators.relax import RELAXQ as RELAXQ
    from pyro_bpq.estimators.relaxation import Annealed as Annealed
    from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
    from pyro_bpq.estimators.second_run import SecondRun as SecondRun
    from pyro_bpq.estimators.straight_through import StraightThrough as StraightThrough
    from pyro_bpq.estimators.sum_and_sample import SumAndSample as SumAndSample
    from pyro_bpq.estimators.unordered_set import UnorderedSet as UnorderedSet
    from pyro_bpq.estimators.variates import NetworkVariate as NetworkVariate

_NAMES = MappingProxyType(
    {
        "all_action": "AllAction",
        "arms": "ARMS DirichletCopula RotationCopula",
        "base": "Estimator SiteContext SiteTerm",
        "baselines": "ConstantBaseline LeaveOneOut RunningBaseline TrimmedBaseline",
        "crossed_leave_one_out": "CrossedLeaveOneOut",
        "debiased_straight_through": "DebiasedStraightThrough",
        "disarm": "ARM DisARM",
        "disarm_tree": "DisARMTree",
        "double_cv": "RODEO DoubleCV",
        "generalised": "GeneralisedReparameterisation",
        "gumbel_softmax": "Concrete GumbelStraightThrough",
        "hindsight": "Hindsight",
        "lambda_return": "LambdaReturn",
        "lax": "LAX",
        "laxq": "LAXQ",
        "measure_valued": "MeasureValued",
        "muprop": "MuProp",
        "optimal_scale": "OptimalScale",
        "parent_advantage": "ParentAdvantage",
        "pathwise": "Pathwise",
        "q_estimators": "CriticBaseline QAdvantage QAllAction QControlVariate QRelaxation QScoreFunction",
        "q_pathwise": "QPathwise",
        "q_prop": "QProp",
        "q_relax": "QRELAX",
        "rebar": "REBAR LearnedTemperature",
        "reinmax": "ReinMax",
        "relax": "RELAX RELAXQ",
        "relaxation": "Annealed",
        "score_function": "ScoreFunction",
        "second_run": "SecondRun",
        "straight_through": "StraightThrough",
        "sum_and_sample": "SumAndSample",
        "unordered_set": "UnorderedSet",
        "variates": "NetworkVariate",
    }
)


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = sorted(" ".join(_NAMES.values()).split())
