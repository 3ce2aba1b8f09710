"""Groups sites and costs into classes for batched calls, and stacks the tensors of a class of sites.

Imports ``graph``, ``rollout``, ``critics`` and ``estimators``. Read ``layout.py`` first, then
``site_batch.py``.
"""
