"""Critic modules, the bank that holds their rows of weights, their targets and their training.

An option of a critic that is out of range raises ``OptionError``.

Training comprises the optimiser, the slow copies and the replay buffer. Imports ``graph`` and ``rollout``. Read
``nets.py`` first, then ``bank.py``.
"""

from pyro_bpq.critics.nets import CriticShape as CriticShape
from pyro_bpq.critics.nets import Perceptron as Perceptron

__all__ = ["CriticShape", "Perceptron"]
