"""Threads that the library itself starts."""

from __future__ import annotations

import errno
import threading

_WAITS = 40
_WAIT_S = 0.25


class ServiceThread(threading.Thread):
    """A thread whose start() always returns, or raises OSError.

    `threading.Thread.start` waits for the thread to begin. If memory is so short that
    its first Python function cannot be called, the thread ends at once, and the wait
    never does.
    """

    def start(self) -> None:
        """Start it; OSError if there are too many threads or too little memory."""
        self._started = _Begun()  # what start() of the base class waits for
        try:
            super().start()
        except RuntimeError as why:
            raise OSError(errno.EAGAIN, f"no thread can be started: {why}") from why


class _Begun(threading.Event):
    """An event for which nobody waits longer than a new thread can need."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; if it does not come, OSError.

        In many short waits: a process that was stopped meanwhile uses up only one.
        """
        if timeout is not None:
            return super().wait(timeout)
        for _ in range(_WAITS):
            if super().wait(_WAIT_S):
                return True
        raise OSError(
            errno.ENOMEM,
            "a thread was started and has not begun: there is too little memory",
        )
