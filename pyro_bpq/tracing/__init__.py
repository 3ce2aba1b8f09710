"""Runs a Pyro program and splits what it did into structure (a graph) and tensors (a run).

It holds handlers, costs and options of sites, and says when a run is recorded. It imports Pyro and the folders of lower
layers. Read ``traced_run.py`` first, then ``tracer.py``, then ``recordings.py``.
"""
