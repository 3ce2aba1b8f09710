"""Training loops that take the place of ``pyro.infer.SVI``: proximal, trust region, actor and critic.

Imports ``objectives`` and what is below. Read ``controlled.py`` first.
"""

__all__: tuple[str, ...] = ()
