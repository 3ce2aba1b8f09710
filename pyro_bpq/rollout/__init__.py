"""The tensors of one run: how they are stacked and summed, and averaged over processes; components of a value.

Imports ``graph`` and ``errors``. Read ``runs.py`` first.
"""
