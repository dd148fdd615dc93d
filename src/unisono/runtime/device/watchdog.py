"""Bounds the time in which a thread may be inside the driver.

To free memory CUDA waits for all streams, and no thread can copy or launch meanwhile. A
stream that waits for a call between hosts, and the thread that runs the call, would
then wait for each other for ever. So another thread, which asks nothing of the driver,
lets the call fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unisono.service_threads import ServiceThread

_LOOK_S = 0.25


class Watchdog:
    """Calls `expire` if it is not touched for as long as it is told to wait."""

    def __init__(self, expire: Callable[[], None]) -> None:
        """A thread is started when it is first needed."""
        self._expire = expire
        self._busy = threading.Event()
        self._closed = False
        self._limit_s = 0.0
        self._touched = 0.0
        self._thread: threading.Thread | None = None

    def begin(self, limit_s: float) -> None:
        """Watch, until end()."""
        self._limit_s = limit_s
        self.touch()
        self._busy.set()
        if self._thread is None:
            self._thread = ServiceThread(
                target=self._watch, name="unisono cuda watchdog", daemon=True
            )
            self._thread.start()

    def touch(self) -> None:
        """The thread that is watched goes on."""
        self._touched = time.monotonic()

    def end(self) -> None:
        """There is nothing to watch."""
        self._busy.clear()

    def close(self) -> None:
        """Let the thread end, and forget `expire`, whose owner is released with it."""
        self._closed = True
        self._expire = _nothing
        self._busy.set()

    def _watch(self) -> None:
        while self._busy.wait() and not self._closed:
            time.sleep(_LOOK_S)
            late = time.monotonic() - self._touched > self._limit_s
            if late and self._busy.is_set() and not self._closed:
                self._busy.clear()
                self._expire()


def _nothing() -> None:
    pass
