"""What each critic of a layout really reads, in words: the last column of ``print(elbo.network)``."""

from __future__ import annotations

from dataclasses import replace

from pyro_bpq.batching.layout import Layout
from pyro_bpq.critics.attention import MemberCritic
from pyro_bpq.critics.joint import reads_value
from pyro_bpq.critics.nets import TabularCritic
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.q_node import QNode


def described(layout: Layout) -> BackpropQNetwork | None:
    """The network of a layout with a text for each learned Q-node, see :attr:`BackpropQNetwork.reads`."""
    network = layout.network
    if network is None:
        return None
    return replace(network, reads=tuple((node.name, _reads(layout, node)) for node in network.learned))


def _reads(layout: Layout, node: QNode) -> str:
    """What the critic of a Q-node reads."""
    spec = layout.specs[node.site]
    critic = spec.critic
    if critic is None:
        return "no critic"
    parts = []
    if spec.components is not None:
        parts.append(f"{node.site}'s value")
    elif reads_value(critic):
        parts.append(f"{node.site}'s value as it is")
    elif spec.has_moments:
        parts.append(f"{node.site}'s value by its first two powers")
    seen, summed = layout.members(node)
    if seen and not summed:
        how = " one by one" if isinstance(critic, MemberCritic) else ""
        parts.append(f"all {len(seen)} others{how}" if len(seen) > 4 else f"{', '.join(seen)}{how}")
    elif seen:
        parts.append(f"{', '.join(seen)}, the sum of {summed} more")
    if isinstance(critic, TabularCritic):
        return f"table of {'; '.join(parts) or 'one number'}"
    if spec.has_params and (spec.components is not None or spec.has_moments):
        parts.append(f"{node.site}'s distribution")
    if spec.context:
        parts.append(f"{spec.context} feature{'s' if spec.context > 1 else ''} of context")
    if spec.share is not None:
        parts.append("the number in its name")
    return "; ".join(parts) or "nothing: it is one number"
