"""Ranks as processes on several hosts, emulated ones or network namespaces.

    results = world_across([2, 3, 1]).run(work, 10)      # work(comm, 10) on six ranks

The first two ranks are on one host, the next three on another. By default the hosts are
emulated (UNISONO_HOST_ID): all ranks are processes of this machine and use loopback.
With `on=hosts`, made by `testing.Hosts`, they run in network namespaces and communicate
over the links of those. The environment is that of a launcher: rank and local rank,
world size, the job's name and secret, and rank 0's address.

A function must be one that a new process can import; it is called with a communicator,
and its result comes back by pickle, through a file that only parent and child hold. Any
other program is run by `run_command`. To kill ranks while they run, `start` them:

    with world_across([1, 1]).start(work) as running:
        running.signal(1, signal.SIGKILL)
        ends = running.wait()
        assert isinstance(ends[0].error, PeerLost)

No test waits for ever. After `timeout_s`, or `grace_s` after the first failure, ranks
that still run write the stacks of all their threads to stderr (on SIGABRT, by
faulthandler, which needs no interpreter lock) and are killed. However this process
ends, its ranks end.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from unisono.deprecation import warn_renamed
from unisono.errors import (
    BadArgument,
    CollectiveTimeout,
    PeerLost,
    UnisonoError,
    whole_number,
)
from unisono.launch.outcome import Outcome
from unisono.launch.processes import Reaper
from unisono.runtime.world.address import free_port
from unisono.testing._member import EndedRank, RankProcess, contents
from unisono.testing.hosts import Hosts

__all__ = ["EndedRank", "RunningWorld", "WorldAcross", "world_across"]

_POLL_S = 0.005
_STACKS_S = 10.0  # to write stacks, from SIGABRT to SIGKILL


class WorldAcross:
    """Ranks on hosts, which can be run many times; each run is a new job."""

    def __init__(
        self,
        hosts: Sequence[int],
        *,
        on: Hosts | None = None,
        timeout_s: float = 60.0,
        grace_s: float = 5.0,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] | None = None,
        init: bool = True,
        meets: bool | None = None,
    ) -> None:
        """`hosts` are the numbers of ranks on each.

        `env` is added to the environment of all ranks, env_of(rank) to that of one.
        With init=False a function gets no communicator, and may call `unisono.init`
        itself; `meets` is the old name of `init`.
        """
        if meets is not None:
            warn_renamed("world_across(meets=)", "world_across(init=)", level=4)
            init = meets
        self.hosts = [whole_number("world_across: ranks on a host", n) for n in hosts]
        if not self.hosts or min(self.hosts) < 1:
            raise BadArgument(
                f"world_across: hosts = {list(hosts)}: expected the number of ranks on "
                "each host, at least one"
            )
        if on is not None and len(on) < len(self.hosts):
            raise BadArgument(
                f"world_across: {len(self.hosts)} hosts are asked for, but on= has "
                f"{len(on)}; is its context open?"
            )
        if not (timeout_s > 0 and grace_s >= 0):
            raise BadArgument(
                f"world_across: timeout_s = {timeout_s}, grace_s = {grace_s}: expected "
                "seconds, above 0"
            )
        self.on, self.timeout_s, self.grace_s = on, timeout_s, grace_s
        self.env, self.env_of, self.init = env or {}, env_of, init

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(comm, *args) on every rank; their results by rank.

        The first failure is raised, as the exception that it was if that can be sent.
        """
        with self.start(function, *args) as running:
            running.wait()
            running.raise_failure()
            return [end.result for end in running.ends]

    def run_command(self, command: Sequence[str]) -> list[EndedRank]:
        """Run a program on every rank until all have ended; raises if one fails."""
        with self.start_command(command) as running:
            running.wait()
            running.raise_failure()
            return running.ends

    def start(self, function: Callable[..., Any], *args: Any) -> RunningWorld:
        """Start function(comm, *args) on every rank."""
        if getattr(function, "__module__", "") == "__main__":
            raise BadArgument(
                f"world_across: {function.__qualname__} is defined in __main__, where "
                "a new process does not find it; define it in a module"
            )
        try:
            order = pickle.dumps((function, args, self.init))
        except (pickle.PicklingError, AttributeError, TypeError) as why:
            raise BadArgument(
                f"world_across: the function and its arguments cannot be sent: {why}; "
                "define it at the top of a module"
            ) from why
        return RunningWorld(self, None, order)

    def start_command(self, command: Sequence[str]) -> RunningWorld:
        """Start a program on every rank."""
        if isinstance(command, str) or not command:
            raise BadArgument(
                f"world_across: command = {command!r}: expected a list, as in "
                "[sys.executable, 'train.py']"
            )
        return RunningWorld(self, list(command), b"")

    def environments(self) -> list[dict[str, str]]:
        """The environment of each rank of a new job."""
        job = secrets.token_hex(16)
        common = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "UNISONO_JOB": job,
            "UNISONO_SECRET": secrets.token_hex(32),
            "UNISONO_WORLD_SIZE": str(sum(self.hosts)),
            "UNISONO_ADDRESS": self._address(),
            **self.env,
        }
        environments: list[dict[str, str]] = []
        for host, n in enumerate(self.hosts):
            for local_rank in range(n):
                place = {
                    "UNISONO_RANK": str(len(environments)),
                    "UNISONO_LOCAL_RANK": str(local_rank),
                    "UNISONO_LOCAL_WORLD_SIZE": str(n),
                    "UNISONO_HOST_ID": self._identity(host, job),
                }
                own = self.env_of(len(environments)) if self.env_of else {}
                environments.append({**common, **place, **own})
        return environments

    def _identity(self, host: int, job: str) -> str:
        return f"host{host}-{job}" if self.on is None else self.on[host].identity

    def _address(self) -> str:
        if self.on is None:
            return f"127.0.0.1:{free_port()}"
        first = self.on[0]
        return f"{first.address}:{first.call(free_port)}"


class RunningWorld:
    """The ranks of one run; leaving the context kills those that still run."""

    def __init__(
        self, plan: WorldAcross, command: list[str] | None, order: bytes
    ) -> None:
        """Start them."""
        self.ends: list[EndedRank] = []
        self._plan = plan
        self._began = time.monotonic()
        self._ranks: list[RankProcess] = []
        with contextlib.ExitStack() as undo:
            self._reaper = undo.enter_context(Reaper())
            undo.callback(self._close_ranks)
            hosts = [h for h, n in enumerate(plan.hosts) for _ in range(n)]
            environments = plan.environments()
            for number, (host, env) in enumerate(zip(hosts, environments, strict=True)):
                self._start(RankProcess(number, host), command, order, env)
            self._open = undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """The process ids of all ranks."""
        return [rank.pid for rank in self._ranks]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank; to one that has ended it does nothing."""
        os.kill(self._ranks[rank].pid, number)

    def stdout(self, rank: int) -> str:
        """A rank's standard output so far."""
        return contents(self._ranks[rank].out).decode(errors="replace")

    def wait(self, timeout_s: float | None = None) -> list[EndedRank]:
        """Wait until all have ended, or have been ended as stuck; raises nothing.

        `timeout_s` counts from now and takes the place of the world's, which counts
        from the start.
        """
        until = self._began + self._plan.timeout_s
        if timeout_s is not None:
            until = time.monotonic() + timeout_s
        while running := self._look():
            failed = [r.ended_s for r in self._ranks if r.status and r.ended_s]
            grace = min(failed, default=math.inf) + self._plan.grace_s
            if time.monotonic() > min(until, self._began + grace):
                self._end_stuck(running)
            time.sleep(_POLL_S)
        self.ends = [rank.end() for rank in self._ranks]
        return self.ends

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        outcome = Outcome(self.ends, time.monotonic() - self._began)
        first = outcome.first_failure
        stuck = [end for end in self.ends if end.ended_by_launcher]
        if first is not None:
            error = _failure(self.ends[first.rank])
            error.add_note(outcome.report())
        elif stuck:
            ranks = [end.rank for end in stuck]
            error = CollectiveTimeout(
                f"world_across: rank{'s' if len(ranks) > 1 else ''} "
                f"{', '.join(map(str, ranks))} still ran after "
                f"{min(end.seconds for end in stuck):.1f} s; their stacks are in the "
                "notes",
                ranks=ranks,
            )
        else:
            return
        for end in stuck:
            error.add_note(f"rank {end.rank} was stuck here:\n{end.stderr[-8000:]}")
        raise error

    def close(self) -> None:
        """Kill all ranks that still run."""
        self._open.close()

    def __enter__(self) -> RunningWorld:
        """For `with ... as running:`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _start(
        self,
        rank: RankProcess,
        command: list[str] | None,
        order: bytes,
        env: Mapping[str, str],
    ) -> None:
        self._ranks.append(rank)
        files = rank.order.fileno(), rank.report.fileno()
        if command is None:
            os.pwrite(files[0], order, 0)
            command = [sys.executable, "-c", _bootstrap(*files)]
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": rank.out,
            "stderr": rank.err,
            "pass_fds": files,
        }
        on = self._plan.on
        try:
            if on is not None:
                rank.process = on[rank.host].run(command, env=env, **options)
            else:
                rank.process = self._here(command, env, options)
        except OSError as why:
            raise BadArgument(
                f"world_across: rank {rank.number} cannot be started: {why.strerror} "
                f"({command[0]})"
            ) from why

    def _here(
        self, command: list[str], env: Mapping[str, str], options: dict[str, Any]
    ) -> subprocess.Popen[Any]:
        with warnings.catch_warnings():
            # It warns of code between fork and exec with threads: ours takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                command,
                env={**os.environ, **env},
                process_group=0,
                preexec_fn=self._reaper.register,
                **options,
            )

    def _look(self) -> list[RankProcess]:
        now = time.monotonic() - self._began
        for rank in self._ranks:
            rank.look(now)
        return [rank for rank in self._ranks if rank.ended_s is None]

    def _end_stuck(self, running: Sequence[RankProcess]) -> None:
        for rank in running:
            rank.show_stacks()
        until = time.monotonic() + _STACKS_S
        while (left := self._look()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        for rank in left:
            os.kill(rank.pid, signal.SIGKILL)

    def _close_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()


def world_across(hosts: Sequence[int], **options: Any) -> WorldAcross:
    """A world with these numbers of ranks per host; options as of WorldAcross."""
    return WorldAcross(hosts, **options)


def _failure(end: EndedRank) -> BaseException:
    if end.error is not None and isinstance(end.error, Exception):
        return end.error
    text = f"world_across: rank {end.rank} (pid {end.pid}) ended by {end.how}"
    if end.status < 0:
        return PeerLost(text, ranks=[end.rank], pids=[end.pid], host=f"host{end.host}")
    return UnisonoError(text)


def _bootstrap(order: int, report: int) -> str:
    """Code that starts a rank with this interpreter's module path."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from unisono.testing._rank import main; main({order}, {report})"
    )
