"""Whoever connects to a rank that does not answer waits, as one does in a call.

Others that wait meanwhile must not take it for the one that is late. So it says whom it
waits for: where the ranks of its host see it, again and again so that they see it live,
and to other hosts when it lasts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono._native import Comm

_LASTS = 4
"""Other hosts are told after this part of somebody's patience, as in a call."""
_LOOKS = 16
"""And a rank is seen to live so often in it."""


@contextlib.contextmanager
def connecting(comm: Comm, me: int, rank: int, patience_s: float) -> Iterator[None]:
    """While its context is open, rank `me` waits for another to take a connection."""
    done = threading.Event()
    looks = 0

    def tell() -> None:
        nonlocal looks
        while not done.wait(patience_s / _LOOKS):
            looks += 1
            comm.announce_connecting(rank, looks == _LOOKS // _LASTS)

    comm.announce_connecting(rank, False)
    telling = threading.Thread(target=tell, name="unisono-connecting", daemon=True)
    telling.start()
    try:
        yield
    finally:
        done.set()
        telling.join()
        comm.announce_connecting(me, looks >= _LOOKS // _LASTS)
