"""The page of `unisono top --web`: a job that runs, in a browser.

The page asks every few seconds, and is told what a snapshot says as plain data. Only
who has the token is answered. The job is asked only while somebody looks, and at most
once in the given time, however many do.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from unisono.errors import BadArgument
from unisono.view.assets import script, text
from unisono.view.server import LOOPBACK, Files, PageServer, Parameters

_FILES: Files = {
    "/": ("text/html", lambda: text("top.html")),
    "/top.js": ("text/javascript", lambda: script("top")),
    "/style.css": ("text/css", lambda: text("style.css")),
    "/top.css": ("text/css", lambda: text("top.css")),
}


class TopPage(PageServer):
    """The server of the page; `look` makes a snapshot, None once the job has ended."""

    def __init__(
        self,
        look: Callable[[], dict[str, object] | None],
        *,
        every: float = 1.0,
        port: int = 0,
        listen: str = LOOPBACK,
    ) -> None:
        """Listen; `every` is how many seconds lie between two snapshots at least."""
        answers = {"/api/snapshot": self._snapshot}
        super().__init__(
            "top",
            _FILES,
            answers,
            port=port,
            listen=listen,
            token=secrets.token_urlsafe(32),
        )
        self.told = threading.Event()
        """Set when a page has been told that the job has ended."""
        self._look, self._every = look, every
        self._last: dict[str, object] = {}
        self._at = float("-inf")
        self._ended = False

    def _snapshot(self, parameters: Parameters) -> dict[str, object]:
        """What was seen last; called by one thread at a time."""
        if parameters:
            raise BadArgument(f"top: {next(iter(parameters))}: nothing can be chosen")
        now = time.monotonic()
        if not self._ended and now - self._at >= self._every:
            seen = self._look()
            self._at = now
            self._ended = seen is None
            self._last = self._last if seen is None else seen
        if self._ended:
            self.told.set()
        return {"every": self._every, "ended": self._ended, "seen": self._last}
