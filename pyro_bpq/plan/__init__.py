"""Decides what a step does on a structure: estimator, critic and exact costs of each site.

Imports ``record`` and what is below it; nothing here runs a program. Read ``rules.py`` first, then ``planner.py``.
"""
