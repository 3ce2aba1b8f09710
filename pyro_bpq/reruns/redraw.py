r"""Runs programs again with some sites at stored values and the others drawn from the current guide.

An update of ``Q_X`` holds all of ``An_X + X``, which contains the scope of ``Q_X``. The target also needs the children
of ``X`` and their other parents. These sites are drawn afresh. A Q-node of another site ``Z`` may learn from the same
rollout if every held site that affects its costs is in ``An_Z + Z``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Set
from typing import Any

from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, nn

from pyro_bpq.graph.bitsets import union
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import leaf_of


class StaleError(Exception):
    """A stored value no longer fits the program."""


class Hold(Messenger):
    """Holds latent sites and subsample indices at given values, and records the sites' distributions; others draw."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.fns = values, dict[str, Any]()

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        # A recording knows the model's site by the very tensor that the guide has, which replay has put in already.
        if msg["done"] or msg["is_observed"] or name not in self.values:
            return
        value = msg["value"] = self.values[name]
        msg["done"] = True
        # The first distribution is the guide's. The model's distribution of the site may have a smaller shape.
        if not isinstance(fn, _Subsample) and name not in self.fns:
            self.fns[name] = fn
            if tuple(value.shape) != tuple(fn.batch_shape + fn.event_shape):
                raise StaleError(f"Site {name!r} has another shape than when it was stored.")


def learned_sites(network: BackpropQNetwork) -> tuple[str, ...]:
    """Sites with a learned Q-node, in program order."""
    names = {node.site for node in network.learned}
    return tuple(node.name for node in network.graph.nodes if node.name in names)


def known_sites(network: BackpropQNetwork, site: str) -> frozenset[str]:
    """The sites that the Q-functions of a site condition on: ``An_X + X``, in history form all up to X."""
    graph = network.graph
    return frozenset(graph.node_names(graph.known_bits(graph.index[site], network.form)))


def held_sites(network: BackpropQNetwork, site: str, form: str = "redrawn") -> frozenset[str]:
    """The sites that an update of the Q-nodes of a site holds at stored values: those of :func:`known_sites`.

    The stored form adds the co-parents, which are the other parents of the site's children, and the rest of the
    children's scopes, without descendants of the site.
    """
    graph, more = network.graph, set[str]()
    children = {child for node in network.q_nodes(site) for child in network.children(node.name)}
    for child in children if form == "stored" else ():
        if child in graph.cost_index:
            more |= {*graph.parents(child)}
        else:
            more |= {*graph.parents(network.q_node(child).site), *network.q_node(child).scope}
    return known_sites(network, site) | (more - graph.descendants(site))


def trainable(network: BackpropQNetwork, held: Set[str]) -> frozenset[str]:
    """Names of the Q-nodes with correct targets if ``held`` has stored values and other sites are redrawn."""
    graph, found = network.graph, set()
    bits = graph.bits_of([name for name in held if name in graph.index])
    for node in network.learned:
        reads = graph.cost_set_bits(node.remote)
        relevant = reads | union(graph.ancestor_bits, reads)
        if not bits & relevant & ~graph.known_bits(graph.index[node.site], network.form):
            found.add(node.name)
    return frozenset(found)


def stored_values(network: BackpropQNetwork, traced: TracedRun, form: str) -> dict[str, Tensor]:
    """The tensors of a run that a rollout stores: values that some update holds, and subsample indices."""
    wanted = frozenset[str]().union(*(held_sites(network, site, form) for site in learned_sites(network)))
    sites = traced.run.sites
    values = {name: sites[name].value.detach().clone() for name in sites if name in wanted}
    return {**values, **{name: index.clone() for name, index in traced.subsamples.items()}}


def traced_leaves(trace: Any) -> dict[str, Tensor]:
    """The leaf parameters in a trace, by name."""
    values = {name: site["value"] for name, site in trace.nodes.items() if site["type"] == "param"}
    leaves = {name: leaf_of(value) for name, value in values.items() if isinstance(value, Tensor)}
    return {name: leaf for name, leaf in leaves.items() if leaf.is_leaf and leaf.requires_grad}


def guide_leaves(traced: TracedRun, guide: Any) -> dict[str, Tensor]:
    """The leaf parameters that a run of the guide reached, by name."""
    leaves = traced_leaves(traced.guide_trace)
    # One program may wrap a policy and an environment.
    for part in (guide, *(guide.args if isinstance(guide, functools.partial) else ())):
        module = poutine.unwrap(part) if callable(part) else part
        if isinstance(module, nn.Module):
            seen = {id(leaf) for leaf in leaves.values()}
            leaves.update({name: p for name, p in module.named_parameters() if id(p) not in seen})
    return leaves


@contextlib.contextmanager
def swapped(leaves: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters other values within the context."""
    own = {name: leaf.data for name, leaf in leaves.items() if name in values}
    try:
        for name in own:
            leaves[name].data = values[name]
        yield
    finally:
        for name, value in own.items():
            leaves[name].data = value
