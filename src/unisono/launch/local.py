"""The launcher for one host: starts n processes, forwards their output, ends them.

Each rank is an ordinary process, `python script.py ...`, with its rank and world size
in the environment (UNISONO_RANK and so on, and torchrun's variables). It leads a
process group of its own, so that its own children can be ended with it, and writes to
two pipes. One loop sleeps until a pipe has bytes, a rank exits, a signal arrives, or a
deadline passes.

When a rank fails, the others have a grace period of some seconds to notice and to
report by themselves; then they get SIGTERM, and SIGKILL soon after. The *first* failure
is reported: the earliest one by a rank that was killed or raised an error of its own. A
rank that raises PeerLost only reports that another has failed.

No process is left behind, however the launcher ends. A reaper process blocks in `read`
on a pipe whose other end the launcher holds: when the launcher is gone without saying
so, even by kill -9, the reaper kills the process groups of all ranks. Ranks register
there themselves, between fork and exec, so none ever runs unregistered. (The kernel's
PR_SET_PDEATHSIG would end the ranks but not their children, and needs a program between
launcher and script.) Ranks that have exited stay zombies until all have: so their pid
is not reused and no other process is killed by mistake.
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
from unisono.launch.binding import cores_of_ranks
from unisono.launch.environment import HostRanks, host_variables, rank_variables
from unisono.launch.limits import refuse_too_many
from unisono.launch.memory_kills import MemoryKills
from unisono.launch.outcome import Outcome
from unisono.launch.output import LineStream, RankOutput
from unisono.launch.processes import (
    Reaper,
    group_is_alive,
    input_of_rank_0,
    pump_terminal,
)
from unisono.launch.supervisor import SupervisedRank, Supervisor

_EXIT_WAIT_S = 1.0  # for processes that ranks left running to exit by themselves
_POLL_S = 0.02  # where there is no pidfd


def launch(
    command: Sequence[str],
    n: int | HostRanks,
    output: RankOutput,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> Outcome:
    """Run `command` as n ranks until all have exited.

    `n` may be a part of a larger world, too. `environment` is added to this process's
    own; UNISONO_JOB in it names the job. In the main thread, SIGINT, SIGTERM and SIGHUP
    are forwarded while it runs, and Ctrl-Z stops the ranks as well.
    """
    here = HostRanks.all_of(n) if isinstance(n, int) else n
    return LocalJob(command, here, output, environment or {}, grace_s).run()


@dataclass(kw_only=True)
class LocalRank(SupervisedRank):
    """A rank that is a process of this host."""

    process: subprocess.Popen[bytes]
    handle: int | None = None  # a pidfd


class LocalJob(Supervisor):
    """The ranks of one host while they run: a whole job, or an agent's part of it."""

    def __init__(
        self,
        command: Sequence[str],
        here: HostRanks,
        output: RankOutput,
        environment: Mapping[str, str],
        grace_s: float,
    ) -> None:
        """A job that is not started; `environment` is added to this process's own."""
        super().__init__(grace_s)
        self._command, self._here, self._output = command, here, output
        job = environment.get("UNISONO_JOB") or secrets.token_hex(16)
        self._environment = host_variables(here, environment, job)
        self._ranks: list[LocalRank] = []
        self._groups: set[int] = set()  # process groups that may be sent a signal
        self._pipes: dict[IO[bytes], LineStream] = {}
        self._cores: list[set[int]] | None = None
        self._drain_until = float("inf")
        self._polls = False

    def _all_ranks(self) -> Sequence[LocalRank]:
        return self._ranks

    def run(self) -> Outcome:
        """Start the ranks, forward output until all have exited, clean up."""
        with self._selector, Reaper() as reaper, self._signal_handlers():
            try:
                self._start(reaper)
                self._run_until_ended()
                self._end_remaining_groups()
                self._drain()
            finally:
                self._signal(signal.SIGKILL)
                for rank in self._ranks:
                    rank.process.wait()
                    if rank.handle is not None:
                        os.close(rank.handle)
                for pipe in self._pipes:
                    pipe.close()
                self._output.close()
        return self._outcome()

    # --- starting

    def _start(self, reaper: Reaper) -> None:
        refuse_too_many(self._here.ranks)
        self._memory_kills = MemoryKills()
        self._cores = cores_of_ranks(self._here.binding, self._here.ranks)
        for number in self._here.numbers:
            if self._stop_request:
                return
            out, err = self._output.streams(number)
            try:
                process = self._process(number, reaper)
            except OSError as why:
                raise BadArgument(
                    f"rank {number} of {self._here.world_size} cannot be started: "
                    f"{why.strerror} ({self._command[0]})"
                ) from why
            rank = LocalRank(
                number=number, process=process, pid=process.pid, stderr=err
            )
            self._ranks.append(rank)
            self._groups.add(process.pid)
            self._rank_started(rank)
            if self._stop_request:  # it arrived before this rank could be signalled
                self._signal(self._stop_request[1])
            for pipe, stream in ((process.stdout, out), (process.stderr, err)):
                assert pipe is not None
                self._pipes[pipe] = stream
                self._register(pipe, partial(self._read, pipe))
            self._register_exit(rank)
            if process.stdin:
                self._connect_input(process.stdin)

    def _rank_started(self, rank: LocalRank) -> None:
        """Called when a rank has started; for subclasses."""

    def _connect_input(self, pipe: IO[bytes]) -> None:
        """Connect rank 0's standard input."""
        threading.Thread(target=pump_terminal, args=(pipe,), daemon=True).start()

    def _input(self) -> int | None:
        return input_of_rank_0()

    def _process(self, number: int, reaper: Reaper) -> subprocess.Popen[bytes]:
        local = number - self._here.first
        cores = self._cores[local] if self._cores else None

        def prepare() -> None:
            reaper.register()
            if cores:
                os.sched_setaffinity(0, cores)

        with warnings.catch_warnings():
            # Newer Pythons warn of code between fork and exec if there are threads:
            # it could wait for a lock that one of them held. Ours takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.DEVNULL if number else self._input(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment | rank_variables(number, local),
                process_group=0,
                preexec_fn=prepare,
            )

    def _register_exit(self, rank: LocalRank) -> None:
        try:
            rank.handle = os.pidfd_open(rank.process.pid)
        except (AttributeError, OSError):  # a system without pidfds
            self._polls = True
        else:
            self._register(rank.handle, partial(self._check_exit, rank))

    # --- running

    def _run_until_ended(self) -> None:
        """Run until all ranks have exited and all their output is read."""
        while self._running() or self._pipes:
            if time.monotonic() >= self._drain_until:
                return
            poll = time.monotonic() + _POLL_S if self._polls else float("inf")
            self._run_once(min(self._drain_until, poll))
            if self._polls:
                for rank in self._ranks:
                    if rank.ended is None:
                        self._check_exit(rank)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read once; True if there may be more."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._pipes[pipe].write(data)
            return True
        self._pipes.pop(pipe).finish()
        self._selector.unregister(pipe)
        pipe.close()
        return False

    def _check_exit(self, rank: LocalRank) -> None:
        """Record a rank's exit status, but leave it a zombie."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, rank.process.pid, flags)
        if found is None:
            return
        rank.ended = time.monotonic()
        if rank.handle is not None:
            self._selector.unregister(rank.handle)
            os.close(rank.handle)
            rank.handle = None
        exited = found.si_code == os.CLD_EXITED
        rank.status = found.si_status if exited else -found.si_status
        if rank.status == -signal.SIGKILL and not rank.ended_by_us:
            rank.why = self._memory_kills.evidence(rank.pid)
        if rank.status:
            self._start_grace_period()
        if not self._running():
            self._drain_until = rank.ended + _EXIT_WAIT_S

    # --- ending

    def _signal(self, number: signal.Signals) -> None:
        for group in list(self._groups):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _end_remaining_groups(self) -> None:
        """End processes that ranks left running; first they may exit by themselves."""
        left, self._groups = (
            self._groups,
            set(),
        )  # their numbers may be reused from here on
        for rank in self._ranks:
            rank.process.wait()
        self._groups = set(filter(group_is_alive, left))
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number:
                self._signal(number)
            until = time.monotonic() + _EXIT_WAIT_S
            while self._groups and time.monotonic() < until:
                time.sleep(_POLL_S)
                self._groups = set(filter(group_is_alive, self._groups))
        self._groups.clear()

    def _drain(self) -> None:
        """Read what is left in pipes that a process outside the groups holds open."""
        for pipe in list(self._pipes):
            os.set_blocking(pipe.fileno(), False)
            reads = 0
            while reads < 64 and self._read(pipe):
                reads += 1
            if pipe in self._pipes:
                self._pipes[pipe].finish()
