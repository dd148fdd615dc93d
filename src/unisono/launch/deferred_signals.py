"""Signals that wait while a process is started.

Python ignores what a handler raises while it runs the functions that are registered
for the time after a fork: an interrupt at that moment would be lost. And one between
the start of a process and the note of it would leave that process behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_taken: dict[signal.Signals, _Handler] = {}


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Call the handlers of signals that arrive within it at its end.

    Only handlers in Python, which run on the main thread alone. A signal that arrives
    a second time is not deferred: what is done here may wait for ever.
    """
    if threading.current_thread() is not threading.main_thread() or _taken:
        yield
        return
    arrived: dict[signal.Signals, FrameType | None] = {}
    handlers: dict[signal.Signals, _Handler] = {}

    def defer(number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if which in arrived:
            handlers[which](number, frame)
        else:
            arrived[which] = frame

    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    try:
        _taken.update(handlers)
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        try:
            restore_signals()
        finally:
            _call(handlers, arrived)


def restore_signals() -> None:
    """Handle signals as before; for a process that was forked within it, too."""
    try:
        while _taken:
            number = next(iter(_taken))
            signal.signal(number, _taken[number])
            del _taken[number]
    finally:
        if _taken:  # a handler has raised
            restore_signals()


def _call(
    handlers: dict[signal.Signals, _Handler],
    arrived: dict[signal.Signals, FrameType | None],
) -> None:
    """Call the handlers of all that arrived, also if some raise."""
    if arrived:
        number = next(iter(arrived))
        try:
            handlers[number](number, arrived.pop(number))
        finally:
            _call(handlers, arrived)
