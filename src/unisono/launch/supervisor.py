"""What a launcher does wherever its ranks run: sleep, pass signals on, and press.

The ranks are processes of this host (`launch`) or of others, behind agents (`fleet`);
either way one loop sleeps until something is to be read, a signal comes or a deadline
passes. After the first failure the others have a grace to report by themselves; then
they get SIGTERM, and SIGKILL soon after. Ctrl-C is passed on once; again, it kills.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any

from unisono.launch.outcome import Outcome, RankEnd
from unisono.launch.output import Speaker, last_words

_PATIENCE_S = 1.5  # from SIGTERM to SIGKILL


@dataclass(kw_only=True)
class Overseen:
    """One rank, as whoever started it sees it."""

    number: int
    stderr: Speaker
    pid: int = 0
    host: str = ""  # where it runs, if not here
    ended: float | None = None
    status: int = 0  # an exit code, or a signal's number with a minus
    pressed: bool = False  # whether we asked it to end
    words: str = ""  # in place of what it said itself


class Overseer(ABC):
    """The loop, the grace and the signals; how a rank is reached is for others."""

    def __init__(self, grace_s: float) -> None:
        """Nothing is started yet; `grace_s` is for the time after a failure."""
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._pressure: deque[tuple[float, signal.Signals]] = deque()
        self._asked: tuple[float, signal.Signals] | None = None  # from outside, to end
        self._began = time.monotonic()
        self._wake = -1

    @abstractmethod
    def _everyone(self) -> Sequence[Overseen]:
        """All ranks that were started."""

    @abstractmethod
    def _signal(self, number: signal.Signals) -> None:
        """Send it to all of them that may be sent one."""

    def _running(self) -> list[Overseen]:
        return [rank for rank in self._everyone() if rank.ended is None]

    def _watch(self, source: IO[bytes] | int, react: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _turn(self, until: float) -> None:
        """Sleep until something happens, but not past `until`; then see to it."""
        due = self._pressure[0][0] if self._pressure else float("inf")
        left = min(due, until) - time.monotonic()
        sleep = None if left == float("inf") else max(left, 0.0)
        for key, _ in self._selector.select(sleep):
            key.data()
        self._press()

    # Ending

    def _begin_grace(self) -> None:
        if not self._pressure and not any(rank.pressed for rank in self._everyone()):
            due = time.monotonic() + self._grace_s
            self._pressure.append((due, signal.SIGTERM))
            self._pressure.append((due + _PATIENCE_S, signal.SIGKILL))

    def _press(self) -> None:
        """End the ranks whose grace is over."""
        while self._pressure and time.monotonic() >= self._pressure[0][0]:
            _, number = self._pressure.popleft()
            for rank in self._running():
                rank.pressed = True
            self._signal(number)

    # Signals to the launcher

    def _hearing_signals(self) -> contextlib.AbstractContextManager[None]:
        """Handlers for as long as it lasts; what is ignored remains so."""
        return self._handlers()

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        """Those, and a pipe by which they wake the loop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        awake, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watch(awake, partial(os.read, awake, 64))
        wanted: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {
            signal.SIGINT: self._pass_on,
            signal.SIGTERM: self._pass_on,
            signal.SIGHUP: self._pass_on,
            signal.SIGTSTP: self._pause,
        }
        before = {
            number: signal.signal(number, handler)
            for number, handler in wanted.items()
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(awake)
            os.close(self._wake)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """At once, in the handler: the loop may be waiting for a slow terminal."""
        again = self._asked is not None and number == signal.SIGINT
        if self._asked is None:
            self._asked = time.monotonic(), signal.Signals(number)
        self._signal(signal.SIGKILL if again else signal.Signals(number))
        if again:
            for rank in self._running():
                rank.pressed = True
        self._begin_grace()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)

    def _outcome(self) -> Outcome:
        ends = [
            RankEnd(
                rank=rank.number,
                pid=rank.pid,
                status=rank.status,
                seconds=(rank.ended or self._began) - self._began,
                ended_by_launcher=rank.pressed,
                words=rank.words or last_words(rank.stderr.last) if rank.status else "",
                where=rank.host,
            )
            for rank in self._everyone()
        ]
        asked = self._asked and (self._asked[0] - self._began, self._asked[1])
        return Outcome(ends, time.monotonic() - self._began, asked)
