r"""Says in sentences which steps are compiled, and why others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyro_bpq.errors import OptionError

if TYPE_CHECKING:
    from pyro_bpq.compiled.entry import Entry
    from pyro_bpq.compiled.recorder import Recording
    from pyro_bpq.compiled.steps import CompiledSteps


def compile_report(objective: Any) -> str:
    """What was recorded and compiled so far, and what runs eagerly and why.

    Args:
        objective: An objective, such as :class:`~pyro_bpq.TraceBackpropQ_ELBO`, or a :class:`~pyro_bpq.CompiledSVI`.

    Returns:
        Sentences, one per line.

    Raises:
        OptionError: If it is no objective of pyro_bpq.
    """
    # CompiledSVI has its objective under this name.
    objective = getattr(objective, "objective", objective)
    if not hasattr(objective, "compiled"):
        raise OptionError(
            f"compile_report({type(objective).__name__}): write compile_report(elbo), with the objective of pyro_bpq "
            "that SVI got as its loss."
        )
    steps: CompiledSteps | None = objective.compiled
    if steps is None:
        return "Steps run eagerly: write compile=True to record and compile them."
    lines = [_of_entry(entry) for entry in steps.entries]
    lines += [f"Some steps run eagerly, because {reason}." for reason in steps.reasons]
    if steps.outside:
        lines.append(f"The optimiser runs after each step, not within it, because {steps.outside}.")
    if not lines:
        return (
            "Nothing is recorded yet: the first steps run eagerly, until structure, particles and critics are settled. "
            "Several calls must then look alike. Calls do not if a whole number, a string or an array of numpy among "
            "their arguments changes from step to step: hand over a tensor or a float."
        )
    return "\n".join(lines)


def _of_entry(entry: Entry) -> str:
    recording, (record, compile_) = entry.recording, entry.seconds
    arguments = [str(tuple(kind[0])) for kind in recording.inputs.kinds[: len(recording.inputs.call.tensors)]]
    text = (
        f"Recorded: {recording.num_operators} operators, {len(recording.used) + len(recording.constants)} input "
        f"tensors, in {record:.1f} s; {_of_gradients(recording)}"
    )
    if entry.note:
        text += f"; {entry.note}"
    elif not entry.is_ready:
        text += "; being compiled, steps run eagerly meanwhile"
    elif compile_:
        text += f"; compiled in {compile_:.1f} s"
    text += f"; {entry.steps} steps taken."
    if arguments:
        shown = ", ".join(arguments[:6]) + (", ..." if len(arguments) > 6 else "")
        text += f" It serves tensors of the shapes {shown}."
    return text


def _of_gradients(recording: Recording) -> str:
    """What the step does with its gradients."""
    updated, handed = len(recording.inputs.updates), len(recording.graded)
    does = [f"it updates {updated} parameters"] if updated else []
    if handed or not updated:
        does.append(f"it gives {handed} gradients to the optimiser")
    return " and ".join(does)
