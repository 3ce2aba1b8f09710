r"""What shows whether an estimator helps, and what is wrong if it does not.

:func:`diagnose` says what keeps a program from learning. :func:`compare_estimators` measures estimators side by side,
and :func:`plot_comparison` draws them; :func:`gradient_moments` is the measurement for one. :func:`plot_run` draws a
run; ``render.py`` has the pictures. None of them changes the ELBO or the parameters. May import every other folder.
Read ``diagnose.py`` first, then ``compare.py``.
"""

from pyro_bpq.diagnostics.compare import compare_estimators as compare_estimators
from pyro_bpq.diagnostics.comparison import Comparison as Comparison
from pyro_bpq.diagnostics.comparison import Row as Row
from pyro_bpq.diagnostics.diagnose import Diagnosis as Diagnosis
from pyro_bpq.diagnostics.diagnose import Finding as Finding
from pyro_bpq.diagnostics.diagnose import diagnose as diagnose
from pyro_bpq.diagnostics.render import plot_comparison as plot_comparison
from pyro_bpq.diagnostics.render import plot_run as plot_run
from pyro_bpq.testing.moments import GradientMoments as GradientMoments
from pyro_bpq.testing.moments import gradient_moments as gradient_moments

__all__ = sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
