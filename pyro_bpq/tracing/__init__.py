"""Runs a Pyro program and splits what it did into structure (a graph) and tensors (a run).

It holds handlers, dependency tracking, costs and options of sites. It imports Pyro and the folders of lower layers;
those do not import Pyro. Read ``traced_run.py`` first, then ``provenance.py`` for dependencies.
"""
