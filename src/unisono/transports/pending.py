"""Those at a reception who have connected and not yet authenticated.

What they say is heard as it comes, never waited for: the handshake, and then, if this
job encrypts, the opening of TLS.
"""

from __future__ import annotations

import logging
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono.transports import tls
from unisono.transports.handshake import Answering

if TYPE_CHECKING:
    from unisono._native import Tls

_LOG = logging.getLogger("unisono")


@dataclass(eq=False)
class PendingConnection:
    """One of them; `rules` tell who it is once it is known, or why it is refused."""

    socket: socket.socket
    sender: str
    rules: Answering
    came: float
    tls: Tls | None = None
    _frame: bytearray = field(default_factory=bytearray)
    _unsent: bytes = b""

    def read(self) -> int:
        """Take in what has come; what to wait for next, of a selector's events.

        0 when that was the last there is to prove, or when `rules` refuse. OSError
        (BlockingIOError if nothing has come) or NotAuthentic if it cannot be.
        """
        if self.tls is not None:
            return self._shaken()
        if not self._unsent:
            self._answer()
        self._unsent = self._unsent[self._sent() :]
        if self._unsent:
            return selectors.EVENT_WRITE
        authenticated = self.rules.authenticated
        if authenticated is None:
            return 0 if self.rules.refusal is not None else selectors.EVENT_READ
        if not authenticated.tls_key:
            return 0
        self.tls = tls.begin(self.socket, authenticated.tls_key, is_client=False)
        return self._shaken()

    def _answer(self) -> None:
        wanted = self.rules.wanted
        more = self.socket.recv(wanted - len(self._frame))
        self._frame += more
        if more and len(self._frame) < wanted:
            return
        self._unsent = self.rules.take(bytes(self._frame))
        self._frame.clear()

    def _sent(self) -> int:
        try:
            return self.socket.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            return 0

    def _shaken(self) -> int:
        assert self.tls is not None
        awaited = tls.shake(self.tls)
        reads = selectors.EVENT_READ if awaited & select.POLLIN else 0
        return reads | (selectors.EVENT_WRITE if awaited & select.POLLOUT else 0)


def first_to_reject(pending: Sequence[PendingConnection]) -> PendingConnection:
    """Who makes room: of the sender with most, the oldest that has shown nothing."""
    senders = Counter(one.sender for one in pending)
    most = max(senders.values())
    return min(
        (one for one in pending if senders[one.sender] == most),
        key=lambda one: (one.rules.vouched, one.came),
    )


class RejectionLog:
    """What the log says of those turned away: a line a second, with how many."""

    def __init__(self, where: str) -> None:
        """Nobody yet."""
        self._where = where
        self._unsaid = 0
        self._next = 0.0
        self.last = ""

    def note(self, told: str) -> None:
        """One more."""
        self.last = told
        self._unsaid += 1
        now = time.monotonic()
        if now < self._next:
            return
        number = "a connection" if self._unsaid == 1 else f"{self._unsaid} connections"
        _LOG.warning("%s turned away %s, the last %s", self._where, number, told)
        self._unsaid, self._next = 0, now + 1.0
