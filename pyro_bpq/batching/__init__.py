"""Which sites and costs are handled in one batched call, and the tensors of such a class of sites.

Imports ``graph``, ``rollout``, ``targets``, ``critics`` and ``estimators``. Read ``layout.py`` first, then
``site_batch.py``.
"""

__all__: tuple[str, ...] = ()
