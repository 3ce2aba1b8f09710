r"""One thread at a time: steps and replay of an objective run programs, and what runs them belongs to the process."""

from __future__ import annotations

import threading
from typing import Any

from pyro_bpq.errors import BusyError


class Turn:
    """Refuses a thread while another one is inside; the same thread may enter again.

    It does not wait: Pyro's handlers, which a waiting step is in already, are those of all threads. A copy or a pickle
    is free: the lock belongs to the process.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "A step or elbo.replay(...) of this objective is under way in another thread. Both run programs, whose "
                "handlers, parameters and random numbers all threads share: let them take turns, with one lock around "
                "svi.step(...) and elbo.replay(...), or call elbo.replay(...) between steps."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: Any) -> Turn:
        return Turn()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()
