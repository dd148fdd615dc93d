"""`unisono.spawn`: a function as n processes, its results by rank.

    def work(comm, x):
        return comm.all_reduce(np.full(3, x + comm.rank))

    if __name__ == "__main__":
        print(unisono.spawn(work, 4, args=(10,)))

Every rank of a new world, a child of this process, runs the function. When one fails,
the others have a grace period to report by themselves and are then ended. The first
failure is raised here, as the original exception if it can be sent, with the traceback
of its rank as a note. As in the launcher, a rank that was killed or raised an error of
its own comes before those that report PeerLost.

Function, arguments and results travel by pickle, over pipes that only this process and
its own children hold: one user, nothing from any network.

Every rank leads a process group, so that its own children end with it, and waits for
the exit of this process: if it is killed, the ranks kill themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from unisono.errors import BadArgument, PeerLost, UnisonoError, unknown, whole_number
from unisono.launch.deferred_signals import deferred_signals, restore_signals
from unisono.launch.exceptions import RankReport, pickled_error
from unisono.launch.processes import group_is_alive, signal_name
from unisono.runtime.call.options import names_options

_GRACE_S = 5.0  # for the others to report
_KILL_AFTER_S = 1.5  # from SIGTERM to SIGKILL
_METHODS = ("spawn", "fork", "forkserver")

Method = Literal["spawn", "fork", "forkserver"]


@names_options(
    {
        "timeout": "timeout_s",
        "nprocs": "n",
        "world_size": "n",
        "start_method": "method",
        "join": "spawn always waits for the ranks, and returns their results",
    }
)
def spawn(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    method: Method = "spawn",
) -> list[Any]:
    """Run `fn(comm, *args)` on n processes and return the results by rank.

    `timeout_s` is the deadline of every collective. `method` is how multiprocessing
    starts them: "spawn" and "forkserver" need a function that can be imported, "fork"
    takes any, but not the threads of this process.
    """
    n = whole_number("spawn: n", n)
    if n < 1:
        raise BadArgument(f"spawn: n = {n}: a world has at least one rank")
    if method not in _METHODS:
        raise unknown("method of spawn", str(method), _METHODS)
    job = _SpawnedJob(n, (fn, tuple(args), secrets.token_hex(16), timeout_s), method)
    return job.run()


@dataclass
class _SpawnedRank:
    """One rank, in the parent process."""

    rank: int
    process: BaseProcess
    pipe: Connection
    pid: int
    handle: int | None = None  # a pidfd
    closed: bool = False
    report: RankReport | None = None
    at: float = 0.0  # when it reported, or else exited
    running: bool = True
    ended_by_us: bool = False  # whether we signalled it to end

    def receive(self) -> None:
        """Receive its report, or note that there is none."""
        self.closed = True
        try:
            data = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return
        self.at = time.monotonic()
        try:
            self.report = pickle.loads(data)
        except Exception as why:
            error = BadArgument(f"spawn: the result of {self} cannot be read: {why}")
            self.report = RankReport(failed=True, error=error)

    def check_exit(self) -> None:
        """Record that the process has exited; without a report that is a failure."""
        if not self.closed and self.pipe.poll():
            self.receive()
        self.process.join(_KILL_AFTER_S)  # a fork server reports it a little later
        self.running = False
        if self.report is not None or self.ended_by_us:
            return
        self.at = time.monotonic()
        code = self.process.exitcode or 0
        how = (
            f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        )
        text = f"spawn: {self} {how} before it returned"
        if code > 0:
            text += "; see its output (is the call to spawn guarded by "
            text += "if __name__ == '__main__'?)"
        self.report = RankReport(failed=True, error=self._lost(text))

    def start_error(self) -> BaseException:
        """The error to raise for it."""
        report = self.report or RankReport()
        error = report.error
        if error is None:
            error = UnisonoError(f"spawn: {self} raised {report.summary}")
        elif not isinstance(error, Exception):  # SystemExit is not raised here
            error = self._lost(
                f"spawn: {self} ended by {report.summary}, without result"
            )
        if report.traceback:
            error.add_note(f"On {self} of spawn:\n\n{report.traceback}")
        return error

    def signal(self, number: int) -> None:
        """Signal its process group, or the process if it does not lead one yet."""
        try:
            os.killpg(self.pid, number)
        except OSError:
            if self.running:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, number)

    def _lost(self, text: str) -> PeerLost:
        host = socket.gethostname()
        return PeerLost(text, ranks=[self.rank], pids=[self.pid], host=host)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class _SpawnedJob:
    """The ranks of one `spawn` while they run."""

    def __init__(self, n: int, work: tuple[Any, ...], method: Method) -> None:
        self._n, self._work, self._method = n, work, method
        self._ranks: list[_SpawnedRank] = []
        self._escalation: deque[tuple[float, signal.Signals]] = deque()

    def run(self) -> list[Any]:
        """Start the ranks, wait until all have ended, clean up."""
        try:
            self._start()
            self._run_until_ended()
        finally:
            self._clean_up()
        if failed := self._failed():
            raise min(failed, key=_start_ranks).start_error()
        return [rank.report.result for rank in self._ranks if rank.report]

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._method)
        for rank in range(self._n):
            with deferred_signals():
                self._start_rank(rank, context)

    def _start_rank(self, rank: int, context: Any) -> None:
        ours, theirs = context.Pipe(duplex=False)
        work = (theirs, rank, self._n, *self._work)
        process = context.Process(target=_rank, args=work, name=f"rank {rank}")
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as why:
            ours.close()
            raise BadArgument(
                f"spawn: the function and its arguments cannot be sent: {why}; "
                "define it at the top of a module, or use method='fork'"
            ) from why
        finally:
            theirs.close()
        spawned = _SpawnedRank(rank, process, ours, process.pid)
        self._ranks.append(spawned)
        with contextlib.suppress(AttributeError, OSError):
            spawned.handle = os.pidfd_open(spawned.pid)

    def _failed(self) -> list[_SpawnedRank]:
        return [m for m in self._ranks if m.report and m.report.failed]

    def _run_until_ended(self) -> None:
        """Run until all have exited; after a failure, until the grace period ends."""
        while running := [m for m in self._ranks if m.running]:
            pipes = {m.pipe: m for m in running if not m.closed}
            ends = {
                m.process.sentinel if m.handle is None else m.handle: m for m in running
            }
            ready = wait([*pipes, *ends], self._longest_sleep())
            for source in ready:
                if isinstance(source, Connection):
                    pipes[source].receive()
            for source in ready:
                if isinstance(source, int):
                    ends[source].check_exit()
            self._escalate()

    def _longest_sleep(self) -> float | None:
        if not self._escalation:
            return None
        return max(self._escalation[0][0] - time.monotonic(), 0.0)

    def _escalate(self) -> None:
        """Start the grace period after a failure; end the others after it."""
        if self._escalation and time.monotonic() >= self._escalation[0][0]:
            _, number = self._escalation.popleft()
            self._signal(number)
        elif not self._escalation and self._failed() and not self._any_ended_by_us():
            due = time.monotonic() + _GRACE_S
            self._escalation.append((due, signal.SIGTERM))
            self._escalation.append((due + _KILL_AFTER_S, signal.SIGKILL))

    def _any_ended_by_us(self) -> bool:
        return any(rank.ended_by_us for rank in self._ranks)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.running or group_is_alive(rank.pid):
                rank.ended_by_us = True
                rank.signal(number)

    def _clean_up(self) -> None:
        """End all ranks, after an interrupt too, and their children."""
        try:
            self._signal(signal.SIGTERM)
            self._wait(_KILL_AFTER_S)
        finally:  # also after a second interrupt
            self._signal(signal.SIGKILL)
            self._wait(_KILL_AFTER_S)
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
            if rank.handle is not None:
                os.close(rank.handle)

    def _wait(self, longest_s: float) -> None:
        until = time.monotonic() + longest_s
        for rank in self._ranks:
            rank.process.join(max(until - time.monotonic(), 0.0))
            rank.running = rank.process.is_alive()
            while group_is_alive(rank.pid) and time.monotonic() < until:
                time.sleep(0.01)


def _start_ranks(rank: _SpawnedRank) -> tuple[bool, float]:
    """A sort key: the first failure first; reports of a lost peer last."""
    return rank.report is not None and rank.report.lost_a_peer, rank.at


# --- in the ranks


def _rank(
    pipe: Connection,
    rank: int,
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    job: str,
    timeout_s: float | None,
) -> None:
    """Run one rank; the target of its process."""
    restore_signals()
    _end_with_parent()
    try:
        init = import_module("unisono").init
        comm = init(rank=rank, world_size=n, job=job, timeout_s=timeout_s)
        result = fn(comm, *args)
        comm.close()
        report = _pickled_result(rank, result)
    except BaseException as error:
        report = pickled_error(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(report)


def _end_with_parent() -> None:
    """Lead a process group of our own, and kill it when the parent exits."""
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="unisono parent watch").start()


def _pickled_result(rank: int, result: Any) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(RankReport(result)))
    except Exception as why:
        raise BadArgument(
            f"spawn: the result of rank {rank}, a {type(result).__name__}, cannot be "
            f"sent: {why}"
        ) from why
