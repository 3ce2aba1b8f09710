"""One step as mathematics: what each site is told, the surrogate, and the loss of the critics.

Imports ``batching``, ``critics``, ``estimators`` and what is below them; it does not import Pyro. Read
``signals.py`` first, then ``surrogate.py``.
"""
