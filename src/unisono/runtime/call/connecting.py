"""A rank that waits for a connection reports which rank it waits for.

Others that wait for it meanwhile must not take it for the late one. So it announces the
rank that it waits for: in shared memory for ranks of its host, repeatedly so that they
see it alive, and to other hosts if the wait is long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.service_threads import ServiceThread

if TYPE_CHECKING:
    from unisono._native import Comm

_REMOTE_PART = 4
"""Other hosts are notified after this part of the warning time, as in a call."""
_BEATS = 16
"""How often it is announced within the warning time."""


@contextlib.contextmanager
def connecting(comm: Comm, me: int, rank: int, warn_after_s: float) -> Iterator[None]:
    """A context in which rank `me` waits for `rank` to accept a connection."""
    done = threading.Event()
    beats = 0

    def announce() -> None:
        nonlocal beats
        while not done.wait(warn_after_s / _BEATS):
            beats += 1
            comm.announce_connecting(rank, beats == _BEATS // _REMOTE_PART)

    comm.announce_connecting(rank, False)
    announcer = ServiceThread(target=announce, name="unisono-connecting", daemon=True)
    announcer.start()
    try:
        yield
    finally:
        done.set()
        announcer.join()
        comm.announce_connecting(me, beats >= _BEATS // _REMOTE_PART)
