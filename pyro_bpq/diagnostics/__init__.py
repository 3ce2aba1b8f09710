r"""Tools that show whether an estimator helps, and what is wrong if it does not.

:func:`diagnose` reports its findings in sentences. :func:`compare_estimators` measures estimators side by side, and
:func:`plot_comparison` draws them. :func:`gradient_moments` and :func:`critic_fit` return the figures. :class:`History`
with :func:`plot_diagnostics` and :class:`LogCallback` follow a training. None of them changes the ELBO or the
parameters. May import every other folder. Read ``diagnose.py`` first, then ``compare.py``.
"""

from pyro_bpq.diagnostics.compare import compare_estimators
from pyro_bpq.diagnostics.comparison import Comparison, Row
from pyro_bpq.diagnostics.critic_fit import CriticFit, Fit, critic_fit
from pyro_bpq.diagnostics.diagnose import diagnose
from pyro_bpq.diagnostics.findings import Diagnosis, Finding
from pyro_bpq.diagnostics.history import History, LogCallback
from pyro_bpq.diagnostics.moments import GradientMoments, gradient_moments
from pyro_bpq.diagnostics.plot import plot_comparison, plot_diagnostics

__all__ = [
    "Comparison",
    "CriticFit",
    "Diagnosis",
    "Finding",
    "Fit",
    "GradientMoments",
    "History",
    "LogCallback",
    "Row",
    "compare_estimators",
    "critic_fit",
    "diagnose",
    "gradient_moments",
    "plot_comparison",
    "plot_diagnostics",
]
