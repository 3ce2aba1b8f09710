"""Whether a program would catch an error that is raised now: it would learn something of the values behind it."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType

from pyro_bpq.record.key import is_library


def catcher(outer: FrameType | None) -> FrameType | None:
    """The function of the user's within ``outer`` that would catch an error raised now; ``None`` if none would.

    A ``with`` counts where the function names ``suppress``. Other context managers are taken to let errors through, and
    so are libraries.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outer:
        caught = _caught(frame.f_code)
        if caught and not is_library(frame.f_globals.get("__name__") or ""):
            if any(start <= frame.f_lasti < end for start, end in caught):
                return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The instructions of a function whose errors it catches, as ranges of offsets."""
    lines = dis.Bytecode(code)
    names, entries = {line.offset: line.opname for line in lines}, getattr(lines, "exception_entries", None)
    if entries is None:  # before Python 3.11: which of them is not known
        return ((0, len(code.co_code)),) if "SETUP_FINALLY" in names.values() else ()
    ends = {"PUSH_EXC_INFO": None if "suppress" in code.co_names else "WITH_EXCEPT_START"}
    return tuple(
        (entry.start, entry.end)
        for entry in entries
        if (name := names[entry.target]) in ends and names[entry.target + 2] != ends[name]
    )
