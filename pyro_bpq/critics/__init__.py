"""Critic modules, where their rows of weights live, and how they are trained.

Optimiser, slow copies, replay buffer. Imports ``graph``, ``rollout`` and ``targets``. Read ``nets.py`` first, then
``bank.py``.
"""

__all__: tuple[str, ...] = ()
