"""Chooses by measurement how a program's gradients are estimated.

:mod:`~pyro_bpq.choice.candidates` lists what may be tried. :mod:`~pyro_bpq.choice.measured` compares, and holds what
was measured and what was chosen. May import every folder above it. Read ``measured.py`` first.
"""

from pyro_bpq.choice.candidates import FIXED, Candidate
from pyro_bpq.choice.measured import MeasuredChoice

__all__ = ["FIXED", "Candidate", "MeasuredChoice"]
