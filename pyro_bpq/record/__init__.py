"""Writes a run down as operators, and answers from them what depends on what, and what it would cost at other values.

It knows tensors, draws and costs, not programs: ``tracing`` runs those. Imports the folders of lower layers. Read
``recording.py`` first, then ``tape.py`` for how a run is written down and ``elements.py`` for what an element reads.
"""
