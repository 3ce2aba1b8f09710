"""The tensors of a step: sites and costs in classes, what estimators and critics make of them.

Imports ``critics``, ``estimators``, ``record`` and what is below them; it does not import Pyro. Read ``layout.py``
first, then ``signals.py`` and ``surrogate.py``.
"""
