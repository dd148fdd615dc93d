"""`unisono.spawn`: a function as n processes, its results by rank.

    def work(comm, x):
        return comm.all_reduce(np.full(3, x + comm.rank))

    if __name__ == "__main__":
        print(unisono.spawn(work, 4, args=(10,)))

The function is run by every rank of a new world, each a child of this process. When
one fails, the others have a moment to report by themselves and are then ended. The
first failure is raised here, as the exception that it was if that can be sent, and
with the traceback of its rank as a note. First is what the launcher calls so: a rank
that was killed or raised an error of its own comes before those which report PeerLost.

Function, arguments and results travel by pickle, over pipes that only this process and
its own children hold: one family, one user, nothing from any network.

Every rank leads a process group, so that its own children end with it, and watches for
the end of this process: should that be killed, the ranks end themselves.
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
from unisono.launch.exceptions import Report, pickled_error
from unisono.launch.processes import group_is_alive, signal_name

_GRACE_S = 5.0  # for the others to report
_PATIENCE_S = 1.5  # from SIGTERM to SIGKILL
_METHODS = ("spawn", "fork", "forkserver")

Method = Literal["spawn", "fork", "forkserver"]


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
    family = _Family(n, (fn, tuple(args), secrets.token_hex(16), timeout_s), method)
    return family.run()


@dataclass
class _Member:
    """One rank, seen from its parent."""

    rank: int
    process: BaseProcess
    pipe: Connection
    pid: int
    handle: int | None = None  # by which the kernel tells of its end
    heard: bool = False
    report: Report | None = None
    at: float = 0.0  # when it reported, or else ended
    running: bool = True
    pressed: bool = False  # whether we asked it to end

    def hear(self) -> None:
        """Take its report, or note that none will come."""
        self.heard = True
        try:
            data = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return
        self.at = time.monotonic()
        try:
            self.report = pickle.loads(data)
        except Exception as why:
            said = f"spawn: what {self} returned cannot be read here: {why}"
            self.report = Report(failed=True, error=BadArgument(said))

    def see_end(self) -> None:
        """Take note that the process is gone; without a report, that is a failure."""
        if not self.heard and self.pipe.poll():
            self.hear()
        self.process.join(_PATIENCE_S)  # a fork server tells of it a little later
        self.running = False
        if self.report is not None or self.pressed:
            return
        self.at = time.monotonic()
        code = self.process.exitcode or 0
        how = (
            f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        )
        said = f"spawn: {self} {how} before it returned"
        if code > 0:
            said += "; what it printed may tell why (is the call to spawn guarded by "
            said += "if __name__ == '__main__'?)"
        self.report = Report(failed=True, error=self._lost(said))

    def failure(self) -> BaseException:
        """The error to raise for it."""
        report = self.report or Report()
        error = report.error
        if error is None:
            error = UnisonoError(f"spawn: {self} raised {report.told}")
        elif not isinstance(error, Exception):  # its exit is not ours
            error = self._lost(f"spawn: {self} left by {report.told}, without a result")
        if report.traceback:
            error.add_note(f"On {self} of spawn:\n\n{report.traceback}")
        return error

    def signal(self, number: int) -> None:
        """To its group, or to itself if it has not come to lead one."""
        try:
            os.killpg(self.pid, number)
        except OSError:
            if self.running:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, number)

    def _lost(self, said: str) -> PeerLost:
        host = socket.gethostname()
        return PeerLost(said, ranks=[self.rank], pids=[self.pid], host=host)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class _Family:
    """The ranks and their parent."""

    def __init__(self, n: int, work: tuple[Any, ...], method: Method) -> None:
        self._n, self._work, self._method = n, work, method
        self._members: list[_Member] = []
        self._pressure: deque[tuple[float, signal.Signals]] = deque()

    def run(self) -> list[Any]:
        """Start, listen, end."""
        try:
            self._start()
            self._listen()
        finally:
            self._end()
        if failed := self._failed():
            raise min(failed, key=_order).failure()
        return [member.report.result for member in self._members if member.report]

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._method)
        for rank in range(self._n):
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
            member = _Member(rank, process, ours, process.pid)
            self._members.append(member)
            with contextlib.suppress(AttributeError, OSError):
                member.handle = os.pidfd_open(member.pid)

    def _failed(self) -> list[_Member]:
        return [m for m in self._members if m.report and m.report.failed]

    def _listen(self) -> None:
        """Until all have ended; after a failure, no longer than the grace allows."""
        while running := [m for m in self._members if m.running]:
            pipes = {m.pipe: m for m in running if not m.heard}
            ends = {
                m.process.sentinel if m.handle is None else m.handle: m for m in running
            }
            ready = wait([*pipes, *ends], self._longest_sleep())
            for source in ready:
                if isinstance(source, Connection):
                    pipes[source].hear()
            for source in ready:
                if isinstance(source, int):
                    ends[source].see_end()
            self._press()

    def _longest_sleep(self) -> float | None:
        if not self._pressure:
            return None
        return max(self._pressure[0][0] - time.monotonic(), 0.0)

    def _press(self) -> None:
        """Give the others their grace after a failure; end them after it."""
        if self._pressure and time.monotonic() >= self._pressure[0][0]:
            _, number = self._pressure.popleft()
            self._signal(number)
        elif not self._pressure and self._failed() and not self._any_pressed():
            due = time.monotonic() + _GRACE_S
            self._pressure.append((due, signal.SIGTERM))
            self._pressure.append((due + _PATIENCE_S, signal.SIGKILL))

    def _any_pressed(self) -> bool:
        return any(member.pressed for member in self._members)

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            if member.running or group_is_alive(member.pid):
                member.pressed = True
                member.signal(number)

    def _end(self) -> None:
        """Leave nothing: neither ranks, after an interrupt, nor children of theirs."""
        try:
            self._signal(signal.SIGTERM)
            self._wait(_PATIENCE_S)
        finally:  # a second interrupt ends the patience
            self._signal(signal.SIGKILL)
            self._wait(_PATIENCE_S)
        for member in self._members:
            member.process.join()
            member.process.close()
            member.pipe.close()
            if member.handle is not None:
                os.close(member.handle)

    def _wait(self, longest_s: float) -> None:
        until = time.monotonic() + longest_s
        for member in self._members:
            member.process.join(max(until - time.monotonic(), 0.0))
            member.running = member.process.is_alive()
            while group_is_alive(member.pid) and time.monotonic() < until:
                time.sleep(0.01)


def _order(member: _Member) -> tuple[bool, float]:
    """Which failure is first: reports of another's end come last."""
    return member.report is not None and member.report.lost_a_peer, member.at


# The ranks


def _rank(
    pipe: Connection,
    rank: int,
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    job: str,
    timeout_s: float | None,
) -> None:
    """The life of a rank."""
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
    """Lead a group of our own, and end it when the parent is gone."""
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch over the parent").start()


def _pickled_result(rank: int, result: Any) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(Report(result)))
    except Exception as why:
        raise BadArgument(
            f"spawn: what rank {rank} returned, a {type(result).__name__}, cannot be "
            f"sent: {why}"
        ) from why
