r"""Steps that are recorded once and compiled: from then on a step does not run the user's Python.

A recording is a graph of tensor operators, made from one whole step: guide, model, estimators, critics, statistics and
gradients. It counts only for calls like the one that it was made from. May import every folder above it, and knows
objectives only in :class:`~pyro_bpq.compiled.subject.Subject`. Read ``steps.py`` first, then
``recorder.py``.
"""
