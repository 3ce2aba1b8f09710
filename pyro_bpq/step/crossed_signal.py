"""What the other particles' costs-to-go change by beside a particle's own past."""

from __future__ import annotations

from torch import Tensor

from pyro_bpq.batching.crossed import crossed_costs
from pyro_bpq.batching.kinds import Relation
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.step.asked import RolloutTensors


def of_class(signals: RolloutTensors, c: int) -> Tensor | None:
    """The changes for the sites of a class, ``(G, M, plates)`` in nats, detached; ``None`` where none is known.

    Summed over the costs downstream of a site, averaged over the other particles
    (:func:`~pyro_bpq.batching.crossed.crossed_costs`).
    """
    layout, rollout, batch = signals.layout, signals.rollout, signals.batches[c]
    if rollout.num_particles == 1:
        return None
    if "crossed" not in signals.shared:
        # The same for all classes.
        signals.shared["crossed"] = [crossed_costs(group, rollout, signals.costs) for group in layout.crossed]
    found, plates = [], layout.classes[c].spec.plates
    for g, change in enumerate(signals.shared["crossed"]):
        selected = layout.matrix(Relation.CROSSED, c, g, change)
        if selected is not None:
            found.append(selected @ sum_to_plates(change, layout.crossed[g].cls.plates, plates))
    shape = (len(layout.classes[c].names), *batch.batch_shape)
    return sum(found[1:], found[0]).expand(shape) if found else None
