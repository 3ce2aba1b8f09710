"""Critic targets: lambda-returns, the rules of a network, and advantages.

Imports ``graph`` and ``rollout``. Read ``lambda_return.py`` first.
"""
