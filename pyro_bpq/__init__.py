"""Backprop-Q for Pyro: train models with discrete latent variables by swapping one line."""

from pyro_bpq.compiled.options import Compile, compile_report
from pyro_bpq.critics.joint import MomentCritic, ValueCritic
from pyro_bpq.critics.learner import BackwardSweep, CriticLearner, SlowTracking
from pyro_bpq.critics.nets import LinearCritic, MLPCritic, TabularCritic
from pyro_bpq.critics.replay_buffer import Replay
from pyro_bpq.estimators.all_action import AllAction, QProp
from pyro_bpq.estimators.lambda_return import LambdaReturn
from pyro_bpq.estimators.reparameterise import Pathwise
from pyro_bpq.estimators.score_function import LeaveOneOut, RunningBaseline, ScoreFunction
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import CostNode, StochasticComputationGraph, StochasticNode
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.objectives.expected_cost import ExpectedCost
from pyro_bpq.objectives.iwae import TraceBackpropQ_IWAE
from pyro_bpq.objectives.paper import paper_settings
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.svi.actor_critic import ActorCriticSVI
from pyro_bpq.svi.compiled_svi import CompiledSVI
from pyro_bpq.svi.controlled import ProximalSVI, TrustRegionSVI
from pyro_bpq.tracing.config import config_bpq
from pyro_bpq.tracing.cost_statement import CostCounter, cost

__version__ = "0.1.0"

__all__ = [
    "ActorCriticSVI",
    "AllAction",
    "BackpropQNetwork",
    "BackwardSweep",
    "Compile",
    "CompiledSVI",
    "CostCounter",
    "CostNode",
    "CriticLearner",
    "ExpectedCost",
    "LambdaReturn",
    "LeaveOneOut",
    "LinearCritic",
    "MLPCritic",
    "MomentCritic",
    "Pathwise",
    "ProximalSVI",
    "QProp",
    "Ranks",
    "Replay",
    "RunningBaseline",
    "ScoreFunction",
    "SlowTracking",
    "StochasticComputationGraph",
    "StochasticNode",
    "TabularCritic",
    "TraceBackpropQ_ELBO",
    "TraceBackpropQ_IWAE",
    "TrustRegionSVI",
    "ValueCritic",
    "compile_report",
    "config_bpq",
    "cost",
    "paper_settings",
]
