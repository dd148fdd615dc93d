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
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from unisono.errors import BadArgument
from unisono.launch.outcome import Outcome
from unisono.launch.output import Speaker, Stage
from unisono.launch.processes import (
    Warden,
    group_is_alive,
    input_of_rank_0,
    pump_terminal,
)
from unisono.launch.supervisor import Overseen, Overseer

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
    return Job(command, n, stage, environment or {}, grace_s).run()


@dataclass(kw_only=True)
class Child(Overseen):
    """A rank that is a process of this host."""

    process: subprocess.Popen[bytes]
    handle: int | None = None  # by which the kernel tells of its end


class Job(Overseer):
    """The ranks of this host while they run: all of a job's, or an agent's share."""

    def __init__(
        self,
        command: Sequence[str],
        n: int,
        stage: Stage,
        environment: Mapping[str, str],
        grace_s: float,
    ) -> None:
        """Ready to run; `environment` is added to our own."""
        super().__init__(grace_s)
        self._command, self._n, self._stage = command, n, stage
        self._environment = {
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **environment,
            "UNISONO_JOB": secrets.token_hex(16),
            "UNISONO_WORLD_SIZE": str(n),
            "UNISONO_LOCAL_WORLD_SIZE": str(n),
        }
        self._numbers = range(n)
        self._ranks: list[Child] = []
        self._groups: set[int] = set()  # those that may be sent a signal
        self._pipes: dict[IO[bytes], Speaker] = {}
        self._linger_until = float("inf")
        self._polls = False

    def _everyone(self) -> Sequence[Child]:
        return self._ranks

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
        for number in self._numbers:
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
            rank = Child(number=number, process=process, pid=process.pid, stderr=err)
            self._ranks.append(rank)
            self._groups.add(process.pid)
            self._note_start(rank)
            if self._asked:  # it came too late to be passed on by the handler
                self._signal(self._asked[1])
            for pipe, speaker in ((process.stdout, out), (process.stderr, err)):
                assert pipe is not None
                self._pipes[pipe] = speaker
                self._watch(pipe, partial(self._hear, pipe))
            self._watch_end(rank)
            if process.stdin:
                self._feed(process.stdin)

    def _note_start(self, rank: Child) -> None:
        """For whoever wants to know."""

    def _feed(self, pipe: IO[bytes]) -> None:
        """See to it that rank 0 is given what it is to read."""
        threading.Thread(target=pump_terminal, args=(pipe,), daemon=True).start()

    def _input(self) -> int | None:
        return input_of_rank_0()

    def _process(self, number: int, warden: Warden) -> subprocess.Popen[bytes]:
        local = number - self._numbers.start
        place = {"UNISONO_RANK": str(number), "UNISONO_LOCAL_RANK": str(local)}
        with warnings.catch_warnings():
            # Newer Pythons warn of code between fork and exec if there are threads:
            # it might wait for a lock that one of them held. Ours takes none.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.DEVNULL if number else self._input(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment | place,
                process_group=0,
                preexec_fn=warden.enrol,
            )

    def _watch_end(self, rank: Child) -> None:
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
            poll = time.monotonic() + _POLL_S if self._polls else float("inf")
            self._turn(min(self._linger_until, poll))
            if self._polls:
                for rank in self._ranks:
                    if rank.ended is None:
                        self._see_end(rank)

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

    def _see_end(self, rank: Child) -> None:
        """Take note of how a rank ended, but leave it a zombie."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        seen = os.waitid(os.P_PID, rank.process.pid, how)
        if seen is None:
            return
        rank.ended = time.monotonic()
        if rank.handle is not None:
            self._selector.unregister(rank.handle)
            os.close(rank.handle)
            rank.handle = None
        exited = seen.si_code == os.CLD_EXITED
        rank.status = seen.si_status if exited else -seen.si_status
        if rank.status:
            self._begin_grace()
        if not self._running():
            self._linger_until = rank.ended + _LINGER_S

    # Ending

    def _signal(self, number: signal.Signals) -> None:
        for group in list(self._groups):
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
