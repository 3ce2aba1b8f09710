"""Runs a Pyro program and splits what it did into structure (a graph) and tensors (a run).

Handlers, dependencies, costs, options of sites. Imports the folders below it and Pyro, which those below do not.
Read ``traced_run.py`` first, then ``provenance.py`` for dependencies.
"""

__all__: tuple[str, ...] = ()
