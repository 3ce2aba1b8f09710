"""Training loops that replace ``pyro.infer.SVI``: proximal, trust region, actor and critic, compiled.

Imports ``objectives`` and the layers below it. Read ``loops.py`` first.
"""
