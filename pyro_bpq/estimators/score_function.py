r"""The score-function estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics
from pyro_bpq.estimators.baselines import Baseline, ConstantBaseline


@dataclass(frozen=True)
class ScoreFunction(Estimator):
    r"""Score function (REINFORCE, likelihood ratio), for any site.

        g_X = (C_X - b) ∇ log q(x)

    ``C_X`` is the cost-to-go of this run. Without a baseline this is the estimator of ``TraceGraph_ELBO``.

    Args:
        baseline: ``None``, :class:`ConstantBaseline`, :class:`LeaveOneOut` or :class:`RunningBaseline`. For a baseline
            that depends on the data see :class:`CriticBaseline`.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Simple statistical gradient-following algorithms (Williams, 1992)
        | Backprop-Q (Xu et al., 2018), Eq. 18
    """

    baseline: Baseline | None = None

    is_unbiased: ClassVar[bool] = True
    takes_baseline: ClassVar[bool] = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        given = self.baseline
        if given is not None and (isinstance(given, type) or not isinstance(given, Baseline)):
            raise OptionError(f"ScoreFunction(baseline={given!r}): write LeaveOneOut(), RunningBaseline() or None.")

    @property
    def by_component(self) -> bool:
        """Whether the baseline also suits a single component; a constant that the user supplies does not."""
        return not isinstance(self.baseline, ConstantBaseline)

    @property
    def has_baseline(self) -> bool:
        """Whether the user chose a baseline."""
        return self.baseline is not None

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves every site that its baseline serves."""
        return None if self.baseline is None else self.baseline.unsupported(site)

    def statistics(self, num_particles: int) -> Statistics:
        """Running statistics of the baseline."""
        return {} if self.baseline is None else self.baseline.statistics()

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        if self.baseline is None:
            return SiteTerm(context.cost * context.score)
        centred, statistics = self.baseline(context.cost, context.statistics, context.count)
        return SiteTerm(centred * context.score, statistics)
