"""The tensors of one run, how they are stacked, and sums and running means over them.

Imports ``graph`` and ``errors``. Read ``runs.py`` first.
"""
