"""Further evaluations of a program: at other values, at all values, with held values, with sites summed out.

Imports ``plan``, ``step``, ``record`` and what is below them. Read ``values.py`` first, then ``at_values.py`` and
``hindsight.py``, and ``tables.py``.
"""
