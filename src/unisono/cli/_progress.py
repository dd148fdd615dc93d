"""What a command is doing, on a terminal, after two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from unisono.launch.screen import is_terminal
from unisono.transports.waiting import NOTICE_S, noticed


class Progress:
    """A line on a terminal that is gone before the next row is printed.

    A terminal that cannot erase a line gets a new one every two seconds.
    """

    def __init__(self, doing: str = "measuring") -> None:
        """Nothing is shown yet."""
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._erases = is_terminal(sys.stderr)
        self._shown = False
        self._doing = doing
        self.what = ""

    def __call__(self, part: str) -> None:
        """Show what is being done now."""
        if not self._terminal or time.monotonic() - self._began <= NOTICE_S:
            return
        text = f"{self._doing} {self.what}: {part}"
        if self._erases:
            self._shown = True
            sys.stderr.write(f"\r\x1b[K{text}")
        else:
            self._began = time.monotonic()
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line before a row is printed."""
        self._began = time.monotonic()
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def waiting(what: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """A context that computes one thing; after two seconds a terminal shows what."""
    return noticed(what) if sys.stderr.isatty() else contextlib.nullcontext()
