"""Backprop-Q for Pyro: train models with discrete latent variables by swapping one line."""

from pyro_bpq.config import config_bpq as config_bpq
from pyro_bpq.critics import LinearCritic as LinearCritic
from pyro_bpq.critics import MLPCritic as MLPCritic
from pyro_bpq.critics import TabularCritic as TabularCritic
from pyro_bpq.elbo import TraceBackpropQ_ELBO as TraceBackpropQ_ELBO
from pyro_bpq.estimators import AllAction as AllAction
from pyro_bpq.estimators import LeaveOneOut as LeaveOneOut
from pyro_bpq.estimators import Pathwise as Pathwise
from pyro_bpq.estimators import RunningBaseline as RunningBaseline
from pyro_bpq.estimators import ScoreFunction as ScoreFunction
from pyro_bpq.graph import CostNode as CostNode
from pyro_bpq.graph import StochasticComputationGraph as StochasticComputationGraph
from pyro_bpq.graph import StochasticNode as StochasticNode
from pyro_bpq.learner import CriticLearner as CriticLearner
from pyro_bpq.network import BackpropQNetwork as BackpropQNetwork
from pyro_bpq.replay import Replay as Replay
from pyro_bpq.slow import SlowTracking as SlowTracking
from pyro_bpq.svi import ProximalSVI as ProximalSVI
from pyro_bpq.svi import TrustRegionSVI as TrustRegionSVI

__version__ = "0.1.0"

__all__ = [
    "AllAction",
    "BackpropQNetwork",
    "CostNode",
    "CriticLearner",
    "LeaveOneOut",
    "LinearCritic",
    "MLPCritic",
    "Pathwise",
    "ProximalSVI",
    "Replay",
    "RunningBaseline",
    "ScoreFunction",
    "SlowTracking",
    "StochasticComputationGraph",
    "StochasticNode",
    "TabularCritic",
    "TraceBackpropQ_ELBO",
    "TrustRegionSVI",
    "config_bpq",
]
