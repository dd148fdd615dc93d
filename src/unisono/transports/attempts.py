"""Attempts to connect to other ranks, while the rank that makes them does other things.

    attempts = Attempts(endpoint)
    attempts.begin(2)
    pause_until(endpoint, links, until)
    for rank, outcome in attempts.ended(): ...       a link, or an error
    attempts.close()

Where an attempt may take long, each has a thread of its own, at most `MOST` at a time:
a rank that cannot be reached delays no other. An attempt that is abandoned ends by
itself, soon; nothing is heard of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from unisono.service_threads import ServiceThread
from unisono.transports.endpoints import ControlLink, ShrinkEndpoint

MOST = 16
"""Attempts at the same time; more wait for one to end."""
_END_S = 5.0
"""`look` ends an attempt sooner, but not while a name is looked up."""


class AttemptAbandoned(Exception):
    """Nobody wants this connection any more."""


@dataclass(eq=False)
class _Attempt:
    rank: int
    is_abandoned: bool = False

    def look(self) -> None:
        """End the attempt if nobody wants it any more."""
        if self.is_abandoned:
            raise AttemptAbandoned(f"rank {self.rank}")


class Attempts:
    """The attempts of one rank, at one of its endpoints."""

    def __init__(self, endpoint: ShrinkEndpoint) -> None:
        """None yet."""
        self._endpoint = endpoint
        self._guard = threading.Lock()
        self._current: dict[int, _Attempt] = {}
        self._waiting: deque[_Attempt] = deque()
        self._ended: deque[tuple[int, ControlLink | Exception]] = deque()
        self._working = 0
        self._threads: list[ServiceThread] = []

    def __contains__(self, rank: object) -> bool:
        """Whether there is an attempt whose end was not told yet."""
        with self._guard:
            return rank in self._current or any(rank == one for one, _ in self._ended)

    def begin(self, rank: int) -> None:
        """Begin to connect to a rank; not while there is an attempt already."""
        attempt = _Attempt(rank)
        with self._guard:
            self._current[rank] = attempt
            if not self._endpoint.is_local:
                self._waiting.append(attempt)
                if self._working >= MOST:
                    return
                self._working += 1
        if self._endpoint.is_local:  # the kernel answers at once
            self._make(attempt)
            return
        thread = ServiceThread(
            target=self._work, name="unisono-connecting", daemon=True
        )
        try:
            thread.start()
        except OSError:  # no thread can be started: then it takes its time here
            self._work()
            return
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def ended(self) -> list[tuple[int, ControlLink | Exception]]:
        """The attempts that have ended since the last call."""
        with self._guard:
            found = list(self._ended)
            self._ended.clear()
        return found

    def has_ended(self) -> bool:
        """Whether there are some."""
        return bool(self._ended)

    def abandon(self, but: Container[int] = ()) -> None:
        """End all attempts, except those to some ranks."""
        with self._guard:
            for rank in [one for one in self._current if one not in but]:
                self._current.pop(rank).is_abandoned = True
            dropped = [each for each in self._ended if each[0] not in but]
            self._ended = deque(each for each in self._ended if each[0] in but)
        for _, outcome in dropped:
            if isinstance(outcome, ControlLink):
                outcome.close()

    def close(self) -> None:
        """End all attempts, and wait until their threads hold nothing any more."""
        self.abandon()
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._threads.clear()

    def _work(self) -> None:
        """Make attempts, as long as some wait."""
        while True:
            with self._guard:
                if not self._waiting:
                    self._working -= 1
                    return
                attempt = self._waiting.popleft()
            if not attempt.is_abandoned:
                self._make(attempt)

    def _make(self, attempt: _Attempt) -> None:
        outcome: ControlLink | Exception
        try:
            outcome = self._endpoint.connect(attempt.rank, attempt.look)
        except Exception as why:
            outcome = why
        with self._guard:
            is_wanted = not attempt.is_abandoned
            if is_wanted:
                del self._current[attempt.rank]
                self._ended.append((attempt.rank, outcome))
                self._endpoint.wake()
        if not is_wanted and isinstance(outcome, ControlLink):
            outcome.close()
