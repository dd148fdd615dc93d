"""One line on a terminal that shows what is being measured, after two seconds."""

from __future__ import annotations

import sys
import time

_AFTER_S = 2.0


class Progress:
    """Shown on a terminal only, after two seconds, and gone before the next row."""

    def __init__(self) -> None:
        """Nothing is shown yet."""
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown = False
        self.what = ""

    def __call__(self, doing: str) -> None:
        """Show what is being done now."""
        if self._terminal and time.monotonic() - self._began > _AFTER_S:
            self._shown = True
            sys.stderr.write(f"\r\x1b[Kmeasuring {self.what}: {doing}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line before a row is printed."""
        self._began = time.monotonic()
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
