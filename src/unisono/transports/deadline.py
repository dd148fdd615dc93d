"""A socket with one deadline for all that is read and written."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

LOOK_S = 0.2
"""How often `look` is called."""


class Until:
    """While its context is open; the socket's timeout is as before afterwards."""

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """From now on. `look` is called now and then, and may raise."""
        self._sock, self._before = sock, sock.gettimeout()
        self._deadline = time.monotonic() + timeout_s
        self._look = look

    def __enter__(self) -> Until:
        """The same."""
        return self

    def __exit__(self, *error: object) -> None:
        """Put the timeout back."""
        if self._sock.fileno() >= 0:
            self._sock.settimeout(self._before)

    def send(self, raw: bytes) -> None:
        """All of it, or TimeoutError; a peer that is gone is noticed when reading."""
        try:
            while raw:
                self._arm()
                with contextlib.suppress(TimeoutError):  # or the next look says so
                    raw = raw[self._sock.send(raw) :]
        except ConnectionError:
            return

    def receive(self, size: int) -> bytes:
        """As many bytes, or fewer if the other has closed."""
        raw = b""
        try:
            while len(raw) < size:
                self._arm()
                try:
                    more = self._sock.recv(size - len(raw))
                except TimeoutError:
                    continue
                if not more:
                    break
                raw += more
        except ConnectionError:
            return b""
        return raw

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake was not done in time")
        self._look()
        self._sock.settimeout(min(left, LOOK_S))
