r"""Options of compiled steps, and the report of what was made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyro_bpq.errors import OptionError

# The name of a backend, or a function from a graph and example inputs to a function of these inputs.
Backend = str | Callable[..., Any]

_NAMES = ("inductor", "cudagraphs", "eager")


@dataclass(frozen=True)
class Compile:
    """Options of recording and compiling steps.

    Args:
        backend: What compiles a recorded step. ``"inductor"``: torch's own compiler, which needs a C++ compiler and
            takes from seconds to minutes. ``"cudagraphs"``: replays the kernels of a GPU. ``"eager"``: the recorded
            operators run as they are; ready at once. Or a function of a graph module and a list of example inputs, as
            ``torch.compile`` takes.
        background: Whether a thread compiles, while the recorded operators run as they are. Such a run does not repeat
            number for number. ``None`` leaves it open: steps of more than 5,000 operators are compiled so.
        max_recordings: Largest number of recordings that are made. Attempts that failed, and recordings that were
            dropped, count too. Each kind of call (shapes of the arguments, their values if they are no tensors,
            training flags) needs one recording. Further kinds of calls run eagerly.

    Raises:
        OptionError: If an option is out of range.
    """

    backend: Backend = "inductor"
    background: bool | None = None
    max_recordings: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.backend, type) or (not callable(self.backend) and self.backend not in _NAMES):
            raise OptionError(
                f"compile: backend={self.backend!r} is unknown; write one of {', '.join(map(repr, _NAMES))}, or a "
                "function of a graph module and example inputs."
            )
        if not isinstance(self.max_recordings, int) or self.max_recordings < 1:
            raise OptionError(f"Compile(max_recordings={self.max_recordings!r}): write a positive whole number.")

    @staticmethod
    def of(option: Any) -> Compile | None:
        """The options that ``compile=...`` of an objective means: a bool, a backend, or options.

        Args:
            option: ``False`` or ``None`` for no compilation, ``True`` for the defaults, a backend, or options.

        Raises:
            OptionError: If it is something else.
        """
        if option is None or isinstance(option, bool):
            return Compile() if option else None
        if isinstance(option, Compile):
            return option
        if isinstance(option, str) or callable(option):
            return Compile(option)
        raise OptionError(f"compile={option!r}: write True, the name of a backend, or Compile(...).")


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
    if objective.compiled is None:
        return "Steps run eagerly: write compile=True to record and compile them."
    return str(objective.compiled)
