"""Connections to a listener that are not authenticated yet.

Their bytes are read as they come, never waited for: the handshake, and then, if this
job encrypts, the handshake of TLS.
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
from unisono.transports.handshake import ServerHandshake

if TYPE_CHECKING:
    from unisono._native import Tls

_LOG = logging.getLogger("unisono")


@dataclass(eq=False)
class PendingConnection:
    """One of them; `handshake` has who it is, once known, or why it is refused."""

    socket: socket.socket
    sender: str
    handshake: ServerHandshake
    arrived: float
    tls: Tls | None = None
    _frame: bytearray = field(default_factory=bytearray)
    _unsent: bytes = b""

    def read(self) -> int:
        """Read what has come; what to wait for next, as events of a selector.

        0 when the handshake is done or has refused. OSError (BlockingIOError if nothing
        has come) or NotAuthentic if it fails.
        """
        if self.tls is not None:
            return self._continue_tls()
        if not self._unsent:
            self._answer()
        self._unsent = self._unsent[self._sent() :]
        if self._unsent:
            return selectors.EVENT_WRITE
        authenticated = self.handshake.authenticated
        if authenticated is None:
            return 0 if self.handshake.refusal is not None else selectors.EVENT_READ
        if not authenticated.tls_key:
            return 0
        self.tls = tls.begin(self.socket, authenticated.tls_key, is_client=False)
        return self._continue_tls()

    def _answer(self) -> None:
        wanted = self.handshake.wanted
        more = self.socket.recv(wanted - len(self._frame))
        self._frame += more
        if more and len(self._frame) < wanted:
            return
        self._unsent = self.handshake.take(bytes(self._frame))
        self._frame.clear()

    def _sent(self) -> int:
        try:
            return self.socket.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            return 0

    def _continue_tls(self) -> int:
        assert self.tls is not None
        awaited = tls.continue_handshake(self.tls)
        reads = selectors.EVENT_READ if awaited & select.POLLIN else 0
        return reads | (selectors.EVENT_WRITE if awaited & select.POLLOUT else 0)


def first_to_reject(pending: Sequence[PendingConnection]) -> PendingConnection:
    """Of the sender with most, the oldest that has not sent an offer."""
    senders = Counter(one.sender for one in pending)
    most = max(senders.values())
    return min(
        (one for one in pending if senders[one.sender] == most),
        key=lambda one: (one.handshake.has_offered, one.arrived),
    )


class RejectionLog:
    """Log messages about rejected connections: one a second, with their number."""

    def __init__(self, where: str) -> None:
        """None yet."""
        self._where = where
        self._unlogged = 0
        self._next = 0.0
        self.last = ""

    def add(self, what: str) -> None:
        """One more."""
        self.last = what
        self._unlogged += 1
        now = time.monotonic()
        if now < self._next:
            return
        number = (
            "a connection" if self._unlogged == 1 else f"{self._unlogged} connections"
        )
        _LOG.warning("%s rejected %s, the last %s", self._where, number, what)
        self._unlogged, self._next = 0, now + 1.0
