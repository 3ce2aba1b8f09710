r"""Checks that the tables of a summed program tell the costs of its runs at any joint values."""

from __future__ import annotations

import torch

from pyro_bpq.plan.plan import SumPlan
from pyro_bpq.reruns.apart import Comparison
from pyro_bpq.reruns.probes import probe_generator
from pyro_bpq.reruns.row_runs import agree
from pyro_bpq.reruns.runs_at import RunsAt
from pyro_bpq.step.exact_sum import costs_at

# Steps whose number is a multiple of it are checked, those of the first comparisons besides.
EVERY = 32
# Number of joint values that are compared. Large programs have fewer, but no fewer than rows of their tables: their
# values hold at most so many elements together.
JOINT_VALUES, MOST_ELEMENTS = 16, 1 << 16


def num_joint_values(rows: int, elements: int) -> int:
    """Number of joint values at which a program runs; ``elements`` are those of its largest value in all rows."""
    return max(rows, min(JOINT_VALUES, MOST_ELEMENTS // max(1, elements // rows)))


def tables_hold(compared: Comparison, plan: SumPlan, seed: int) -> bool:
    """Whether runs at values that are drawn for each site on its own cost what the tables say.

    In a row of the tables all sites have the same value. A cost that has begun to read one more site, because of a flag
    or of a list of parents, still has a table, but a wrong one. ``compared.many`` is the run that fills the tables.
    ``compared.together`` runs ``compared.number`` joint values at once. They do not hold where that run fails, or where
    its costs depend on noise besides its sites.
    """
    sites, generator, number = compared.many.guide_trace.nodes, probe_generator(seed), compared.number
    index, values = {}, {}
    for name in plan.shared:
        value = sites[name]["value"].detach()
        values[name] = value[:1].expand(number, *value.shape[1:])
    for name, split in plan.components.items():
        fn, value = sites[name]["fn"], sites[name]["value"]
        drawn = torch.randint(split.cardinality, (number, *fn.batch_shape[1:]), generator=generator)
        index[name] = drawn.to(value.device)
        values[name] = split.value(index[name].unsqueeze(-1), fn).to(value.dtype)
    costs = RunsAt(compared.trace, compared.many.subsamples, compared.has_buffers).costs(compared.together, values)
    if costs is None:
        return False
    with torch.no_grad():
        expected = costs_at(compared.many, plan, compared.nesting, index)
    pairs = [torch.broadcast_tensors(costs[name], table) for name, table in expected.items()]
    return agree([pair[0] for pair in pairs], [pair[1] for pair in pairs])
