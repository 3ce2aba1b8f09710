"""Which function of the program runs, and whether it would learn something of an error or of a check."""

from __future__ import annotations

import dis
import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from pyro_bpq.record.calls import OWN
from pyro_bpq.record.key import is_library

# Modules that read booleans and shapes only to check arguments; the caller sees no effect of it.
_LIBRARIES = ("torch.distributions.", "pyro.distributions.", "pyro.poutine.", "pyro.util", "pyro.primitives")


def catcher(outer: FrameType | None) -> FrameType | None:
    """The function of the user's within ``outer`` that would catch an error raised now; ``None`` if none would.

    A ``with`` counts where the function names ``suppress``. Other context managers are taken to let errors through, and
    so are libraries.
    """
    for frame in _frames(outer):
        if not is_library(frame.f_globals.get("__name__") or ""):
            if any(start <= frame.f_lasti < end for start, end in _caught(frame.f_code)):
                return frame
    return None


def entering() -> FrameType:
    """The function with the ``with`` statement that is entered."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _frames(outer: FrameType | None = None) -> Iterator[FrameType]:
    """The functions that run, from the one that called the caller to one that is ``outer``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not outer:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The instructions of a function whose errors it catches, as ranges of offsets."""
    lines, suppresses = dis.Bytecode(code), "suppress" in code.co_names
    names, entries = {line.offset: line.opname for line in lines}, getattr(lines, "exception_entries", None)
    if entries is None:  # Python 3.10: an instruction begins a block, and names its handler
        begins = ("SETUP_FINALLY", "SETUP_WITH")[: 1 + suppresses]
        return tuple((line.offset, line.argval) for line in lines if line.opname in begins)
    ends = {"PUSH_EXC_INFO": None if suppresses else "WITH_EXCEPT_START"}
    return tuple(
        (entry.start, entry.end)
        for entry in entries
        if (name := names[entry.target]) in ends and names[entry.target + 2] != ends[name]
    )


def is_library_check() -> bool:
    """Whether the nearest caller outside of torch's internals and of this package is one of the libraries."""
    for frame in _frames():
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_LIBRARIES):
            return frame.f_code.co_name != "__eq__"  # the caller of == gets the answer
        if module != "torch" and not module.startswith(("torch.", "pyro_bpq.")):
            return False
    return False


def line_of_the_program() -> str:
    """The line of the program that runs."""
    for frame in _frames():
        module = frame.f_globals.get("__name__") or ""
        if not module.startswith(("torch", "pyro.", *OWN)) and not frame.f_code.co_filename.startswith("<"):
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{text!r} in {frame.f_code.co_name}, line {frame.f_lineno}"
    return "a library"
