"""The loop of a launcher: wait for events, forward signals, end ranks after a failure.

The ranks are processes of this host (`local`) or of others, behind agents (`remote`).
One loop sleeps until there is something to read, a signal arrives or a deadline passes.
After the first failure the others have a grace period to report by themselves; then
they get SIGTERM, and SIGKILL soon after. Ctrl-C is forwarded once; the second kills.
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
from unisono.launch.output import LineStream, stderr_tail

_KILL_AFTER_S = 1.5  # from SIGTERM to SIGKILL


@dataclass(kw_only=True)
class SupervisedRank:
    """One rank, in the launcher."""

    number: int
    stderr: LineStream
    pid: int = 0
    host: str = ""  # empty for this host
    ended: float | None = None
    status: int = 0  # an exit code, or a signal's number with a minus sign
    ended_by_us: bool = False  # whether we signalled it to end
    stderr_tail: str = ""  # instead of that of the rank itself
    why: str = ""  # what else is known of its end


class Supervisor(ABC):
    """Event loop, grace period and signals; subclasses start and signal the ranks."""

    def __init__(self, grace_s: float) -> None:
        """Nothing is started yet; `grace_s` is the grace period after a failure."""
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._escalation: deque[tuple[float, signal.Signals]] = deque()
        self._stop_request: tuple[float, signal.Signals] | None = None  # when, which
        self._began = time.monotonic()
        self._wake = -1

    @abstractmethod
    def _all_ranks(self) -> Sequence[SupervisedRank]:
        """All ranks that have been started."""

    @abstractmethod
    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that may get one."""

    def _running(self) -> list[SupervisedRank]:
        return [rank for rank in self._all_ranks() if rank.ended is None]

    def _register(self, source: IO[bytes] | int, react: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _run_once(self, until: float) -> None:
        """Wait for events, at most until `until`, and handle them."""
        due = self._escalation[0][0] if self._escalation else float("inf")
        left = min(due, until) - time.monotonic()
        sleep = None if left == float("inf") else max(left, 0.0)
        for key, _ in self._selector.select(sleep):
            key.data()
        self._escalate()

    # --- ending

    def _start_grace_period(self) -> None:
        if not self._escalation and not any(
            rank.ended_by_us for rank in self._all_ranks()
        ):
            due = time.monotonic() + self._grace_s
            self._escalation.append((due, signal.SIGTERM))
            self._escalation.append((due + _KILL_AFTER_S, signal.SIGKILL))

    def _escalate(self) -> None:
        """Signal the ranks whose grace period is over."""
        while self._escalation and time.monotonic() >= self._escalation[0][0]:
            _, number = self._escalation.popleft()
            for rank in self._running():
                rank.ended_by_us = True
            self._signal(number)

    # --- signals to the launcher

    def _signal_handlers(self) -> contextlib.AbstractContextManager[None]:
        """A context with our signal handlers; ignored signals stay ignored."""
        return self._install_handlers()

    @contextlib.contextmanager
    def _install_handlers(self) -> Iterator[None]:
        """Install the handlers, and a pipe by which they wake the loop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._register(wake_read, partial(os.read, wake_read, 64))
        wanted: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {
            signal.SIGINT: self._forward,
            signal.SIGTERM: self._forward,
            signal.SIGHUP: self._forward,
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
            os.close(wake_read)
            os.close(self._wake)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal in the handler: the loop may wait for a slow terminal."""
        again = self._stop_request is not None and number == signal.SIGINT
        if self._stop_request is None:
            self._stop_request = time.monotonic(), signal.Signals(number)
        self._signal(signal.SIGKILL if again else signal.Signals(number))
        if again:
            for rank in self._running():
                rank.ended_by_us = True
        self._start_grace_period()
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
                ended_by_launcher=rank.ended_by_us,
                stderr_tail=_stderr_tail(rank),
                hostname=rank.host,
                why=rank.why,
            )
            for rank in self._all_ranks()
        ]
        stop_request = None
        if self._stop_request is not None:
            when, number = self._stop_request
            stop_request = when - self._began, number
        return Outcome(ends, time.monotonic() - self._began, stop_request)


def _stderr_tail(rank: SupervisedRank) -> str:
    """The end of a failed rank's stderr."""
    if not rank.status:
        return ""
    return rank.stderr_tail or stderr_tail(rank.stderr.last)
