"""Backprop-Q for Pyro: train models with discrete latent variables by swapping one line."""

from pyro_bpq.compiled.options import Compile as Compile
from pyro_bpq.compiled.options import compile_report as compile_report
from pyro_bpq.critics.learner import BackwardSweep as BackwardSweep
from pyro_bpq.critics.learner import CriticLearner as CriticLearner
from pyro_bpq.critics.learner import SlowTracking as SlowTracking
from pyro_bpq.critics.nets import LinearCritic as LinearCritic
from pyro_bpq.critics.nets import MLPCritic as MLPCritic
from pyro_bpq.critics.nets import MomentCritic as MomentCritic
from pyro_bpq.critics.nets import TabularCritic as TabularCritic
from pyro_bpq.critics.nets import ValueCritic as ValueCritic
from pyro_bpq.critics.replay_buffer import Replay as Replay
from pyro_bpq.distributions import KSubset as KSubset
from pyro_bpq.distributions import PlackettLuce as PlackettLuce
from pyro_bpq.distributions import sample_chain as sample_chain
from pyro_bpq.estimators.all_action import AllAction as AllAction
from pyro_bpq.estimators.all_action import QProp as QProp
from pyro_bpq.estimators.q_estimators import LambdaReturn as LambdaReturn
from pyro_bpq.estimators.reparameterise import Pathwise as Pathwise
from pyro_bpq.estimators.score_function import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators.score_function import RunningBaseline as RunningBaseline
from pyro_bpq.estimators.score_function import ScoreFunction as ScoreFunction
from pyro_bpq.graph.network import BackpropQNetwork as BackpropQNetwork
from pyro_bpq.graph.scg import CostNode as CostNode
from pyro_bpq.graph.scg import StochasticComputationGraph as StochasticComputationGraph
from pyro_bpq.graph.scg import StochasticNode as StochasticNode
from pyro_bpq.objectives.elbo import ExpectedCost as ExpectedCost
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO as TraceBackpropQ_ELBO
from pyro_bpq.objectives.elbo import paper_settings as paper_settings
from pyro_bpq.objectives.iwae import TraceBackpropQ_IWAE as TraceBackpropQ_IWAE
from pyro_bpq.record.config import config_bpq as config_bpq
from pyro_bpq.record.statements import CostCounter as CostCounter
from pyro_bpq.record.statements import cost as cost
from pyro_bpq.record.statements import external as external
from pyro_bpq.rollout.sums import Ranks as Ranks
from pyro_bpq.svi.controlled import ProximalSVI as ProximalSVI
from pyro_bpq.svi.controlled import TrustRegionSVI as TrustRegionSVI
from pyro_bpq.svi.loops import ActorCriticSVI as ActorCriticSVI
from pyro_bpq.svi.loops import CompiledSVI as CompiledSVI

__version__ = "0.2.0"

__all__ = sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
