"""Critic targets: lambda-returns, the rules of a network, advantages, and the paper's Algorithm 1.

Imports ``graph`` and ``rollout``. Read ``lambda_return.py`` first.
"""
