"""Runs guide and model, writes a run down as operators, and answers from them what depends on what.

Also what costs are at other values, and when a run is recorded. It holds handlers, costs and options of sites. It
imports Pyro and the folders of lower layers. Read ``function.py`` first, then ``tape.py`` for how a run is written
down, ``elements.py`` for what an element reads, ``tracer.py`` for how programs run, and ``recordings.py``.
"""
