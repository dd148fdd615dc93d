"""The launcher: n processes of one host, started, listened to, and ended together.

Each rank is an ordinary process, `python script.py ...`, that finds its place in the
environment (UNISONO_RANK and so on). It leads a process group of its own, so that its
own children can be ended with it, and speaks through two pipes. One loop sleeps until
a pipe has bytes, a rank ends, a signal comes, or a deadline passes.

When a rank fails, the others have a grace of some seconds to notice and to report by
themselves; then they get SIGTERM, and SIGKILL soon after. The *first* failure is what
matters to the reader: the earliest one by a rank that was killed or raised an error of
its own. A rank that raises PeerLost only tells of somebody else's end.

Nothing is left behind, however the launcher ends. A warden sleeps in `read` on a pipe
of which the launcher holds the other end: when the launcher is gone without a farewell,
even by kill -9, the warden kills the groups of all ranks. The ranks enrol there
themselves, between fork and exec, so there is no moment in which one runs unknown to
it. (The kernel's own means, PR_SET_PDEATHSIG, would end the ranks but not their
children, and needs a program between us and the script.) And ended ranks stay zombies
until all have ended: nobody else can be given their number and be killed for them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any

from unisono.errors import BadArgument
from unisono.runtime.lines import Speaker, Stage, last_words
from unisono.runtime.outcome import Outcome, RankEnd
from unisono.runtime.processes import (
    Warden,
    group_is_alive,
    input_of_rank_0,
    pump_terminal,
)

_PATIENCE_S = 1.5  # from SIGTERM to SIGKILL
_LINGER_S = 1.0  # for what ranks leave running to end by itself
_POLL_S = 0.02  # where the kernel cannot tell of an end


def launch(
    command: Sequence[str],
    n: int,
    stage: Stage,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> Outcome:
    """Run `command` as n ranks to their end, whatever that is.

    `environment` is added to our own. In the main thread, SIGINT, SIGTERM and SIGHUP
    are passed on while it runs, and Ctrl-Z pauses the ranks as well.
    """
    return _Job(command, n, stage, environment or {}, grace_s).run()


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    stderr: Speaker
    handle: int | None = None  # by which the kernel tells of its end
    ended: float | None = None
    status: int = 0  # an exit code, or a signal's number with a minus
    pressed: bool = False  # whether we asked it to end


class _Job:
    """The ranks while they run."""

    def __init__(
        self,
        command: Sequence[str],
        n: int,
        stage: Stage,
        environment: Mapping[str, str],
        grace_s: float,
    ) -> None:
        self._command, self._n, self._stage, self._grace_s = command, n, stage, grace_s
        self._environment = {
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **environment,
            "UNISONO_JOB": secrets.token_hex(16),
            "UNISONO_WORLD_SIZE": str(n),
            "UNISONO_LOCAL_WORLD_SIZE": str(n),
        }
        self._ranks: list[_Rank] = []
        self._groups: set[int] = set()  # those that may be sent a signal
        self._pipes: dict[IO[bytes], Speaker] = {}
        self._selector = selectors.DefaultSelector()
        self._pressure: deque[tuple[float, signal.Signals]] = deque()
        self._asked: tuple[float, signal.Signals] | None = None  # from outside, to end
        self._began = time.monotonic()
        self._linger_until = float("inf")
        self._polls = False

    def run(self) -> Outcome:
        """Start, listen, end."""
        with self._selector, Warden() as warden, self._hearing_signals():
            try:
                self._start(warden)
                self._listen()
                self._end_leftovers()
                self._drain()
            finally:
                self._signal(signal.SIGKILL)
                for rank in self._ranks:
                    rank.process.wait()
                    if rank.handle is not None:
                        os.close(rank.handle)
                for pipe in self._pipes:
                    pipe.close()
                self._stage.close()
        return self._outcome()

    # Starting

    def _start(self, warden: Warden) -> None:
        for number in range(self._n):
            if self._asked:
                return
            out, err = self._stage.speakers(number)
            try:
                process = self._process(number, warden)
            except OSError as why:
                raise BadArgument(
                    f"rank {number} of {self._n} cannot be started: {why.strerror} "
                    f"({self._command[0]})"
                ) from why
            rank = _Rank(number, process, err)
            self._ranks.append(rank)
            self._groups.add(process.pid)
            if self._asked:  # it came too late to be passed on by the handler
                self._signal(self._asked[1])
            for pipe, speaker in ((process.stdout, out), (process.stderr, err)):
                assert pipe is not None
                self._pipes[pipe] = speaker
                self._watch(pipe, partial(self._hear, pipe))
            self._watch_end(rank)
            if process.stdin:
                threading.Thread(
                    target=pump_terminal, args=(process.stdin,), daemon=True
                ).start()

    def _process(self, number: int, warden: Warden) -> subprocess.Popen[bytes]:
        place = {"UNISONO_RANK": str(number), "UNISONO_LOCAL_RANK": str(number)}
        with warnings.catch_warnings():
            # Newer Pythons warn of code between fork and exec if there are threads:
            # it might wait for a lock that one of them held. Ours takes none.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.DEVNULL if number else input_of_rank_0(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment | place,
                process_group=0,
                preexec_fn=warden.enrol,
            )

    def _watch(self, source: IO[bytes] | int, react: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _watch_end(self, rank: _Rank) -> None:
        try:
            rank.handle = os.pidfd_open(rank.process.pid)
        except (AttributeError, OSError):  # a system without
            self._polls = True
        else:
            self._watch(rank.handle, partial(self._see_end, rank))

    # Listening

    def _listen(self) -> None:
        """Until all ranks have ended, and all has been heard."""
        while self._running() or self._pipes:
            if time.monotonic() >= self._linger_until:
                return
            for key, _ in self._selector.select(self._longest_sleep()):
                key.data()
            if self._polls:
                for rank in self._running():
                    self._see_end(rank)
            self._press()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.ended is None]

    def _longest_sleep(self) -> float | None:
        due = self._pressure[0][0] if self._pressure else float("inf")
        left = min(due, self._linger_until) - time.monotonic()
        if self._polls:
            left = min(left, _POLL_S)
        return None if left == float("inf") else max(left, 0.0)

    def _hear(self, pipe: IO[bytes]) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._pipes[pipe].hear(data)
            return True
        self._pipes.pop(pipe).finish()
        self._selector.unregister(pipe)
        pipe.close()
        return False

    def _see_end(self, rank: _Rank) -> None:
        """Take note of how a rank ended, but leave it a zombie."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        seen = os.waitid(os.P_PID, rank.process.pid, how)
        if seen is None:
            return
        if rank.handle is not None:
            self._selector.unregister(rank.handle)
            os.close(rank.handle)
            rank.handle = None
        rank.ended = time.monotonic()
        exited = seen.si_code == os.CLD_EXITED
        rank.status = seen.si_status if exited else -seen.si_status
        if rank.status:
            self._begin_grace()
        if not self._running():
            self._linger_until = rank.ended + _LINGER_S

    # Ending

    def _begin_grace(self) -> None:
        if not self._pressure and not any(rank.pressed for rank in self._ranks):
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

    def _signal(self, number: signal.Signals) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _end_leftovers(self) -> None:
        """End what ranks left running, after a moment to end by itself."""
        left, self._groups = self._groups, set()  # no signals to numbers set free
        for rank in self._ranks:
            rank.process.wait()
        self._groups = set(filter(group_is_alive, left))
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number:
                self._signal(number)
            until = time.monotonic() + _LINGER_S
            while self._groups and time.monotonic() < until:
                time.sleep(_POLL_S)
                self._groups = set(filter(group_is_alive, self._groups))
        self._groups.clear()

    def _drain(self) -> None:
        """What still lies in pipes that a survivor outside the groups holds open."""
        for pipe in list(self._pipes):
            os.set_blocking(pipe.fileno(), False)
            reads = 0
            while reads < 64 and self._hear(pipe):
                reads += 1
            if pipe in self._pipes:
                self._pipes[pipe].finish()

    # Signals to the launcher

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """Handlers, and a pipe that wakes the loop; what is ignored remains so."""
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
                pid=rank.process.pid,
                status=rank.status,
                seconds=(rank.ended or self._began) - self._began,
                ended_by_launcher=rank.pressed,
                words=last_words(rank.stderr.last) if rank.status else "",
            )
            for rank in self._ranks
        ]
        asked = self._asked and (self._asked[0] - self._began, self._asked[1])
        return Outcome(ends, time.monotonic() - self._began, asked)
