"""The stochastic computation graph and its Backprop-Q networks: names and sets of names, no tensors.

Imports ``errors`` only. Read ``scg.py`` first, then ``network.py``.
"""
