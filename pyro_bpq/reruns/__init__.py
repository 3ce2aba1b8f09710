"""Extra runs of a program: at other values, at all values, with held values, with sites summed out.

Imports ``plan``, ``step``, ``record`` and what is below them. Read ``at_values.py`` first, then
``flips.py`` and ``hindsight.py``, and ``tables.py``.
"""
