r"""Sets the values of latent sites of a program."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.record.laws import draw
from pyro_bpq.rollout.features import Components, finite_components


class AllValues(Messenger):
    """Sets every latent site of finite support to its value ``k`` in row ``k``; reparameterised sites are drawn once.

    A site of fewer values than rows begins again with its first one. All other sites are drawn as usual. An object
    serves one run of guide and model.

    Args:
        rows: Number of rows.
        nesting: Number of batch dimensions, that of the rows included.
        is_compact: Whether values have size one in plates where they are not scored, and those that are drawn once have
            no dimension for the rows: ``locs[z]`` then means what it means in a run of its own.
        is_scored: Whether the log-probabilities of these values are computed. Else zeros stand for them: the
            distributions tell them for all values.
    """

    def __init__(self, rows: int, nesting: int, is_compact: bool = False, is_scored: bool = True) -> None:
        super().__init__()
        self.rows, self.nesting, self.is_compact, self.is_scored = rows, nesting, is_compact, is_scored
        self._values = dict[str, Tensor]()

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or isinstance(fn, _Subsample):
            return
        split = None if fn.has_rsample else finite_components(fn)
        if split is None and not fn.has_rsample:
            return
        if len(fn.batch_shape) != self.nesting:
            raise UnsupportedProgramError(f"Site {name!r} has no dimension for the rows of its values.")
        if name not in self._values:
            # The guide comes first; the model has its value.
            made = draw(name, fn)[:1] if split is None else self._all(fn, split)
            self._values[name] = made if split else made[0] if self.is_compact else made.expand(fn.shape())
        msg["value"], msg["done"] = self._values[name], True
        if split is not None and not self.is_scored:
            # Pyro computes what a site of a trace lacks.
            zero = msg["value"].new_zeros((), dtype=torch.get_default_dtype())
            zeros = msg["log_prob"] = msg["unscaled_log_prob"] = zero.expand(fn.batch_shape)
            msg["log_prob_sum"], msg["score_parts"] = zero, ScoreParts(zeros, zeros, 0)  # type: ignore[arg-type]

    def _all(self, fn: Any, split: Components) -> Tensor:
        parameters = split.parameters(fn)
        is_small = self.is_compact and not self.is_scored
        batch = torch.Size([self.rows, *(1,) * (self.nesting - 1)]) if is_small else fn.batch_shape
        index = torch.arange(self.rows, device=parameters.device) % split.cardinality
        value = split.value(index.reshape(-1, *(1,) * self.nesting).expand(*batch, split.size), fn)
        return value.to(parameters.dtype) if split.kind in ("bernoulli", "one_hot") else value
