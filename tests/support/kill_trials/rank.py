"""One rank of a trial: it joins the world, runs its program, reports its outcome.

This runs in a child process of the server. Heartbeats are in memory that the children
share with it: for each rank, the time at which it began its latest call.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import signal
import struct
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from kill_trials.programs import PROGRAMS, RankContext
from kill_trials.records import RankOutcome, Trial
from unisono import _native
from unisono.errors import CollectiveTimeout, ConnectFailed, PeerLost
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.init import init

_TIME = struct.Struct("d")


class Heartbeats:
    """The time of each rank's latest call, in shared memory; 0 before the first."""

    def __init__(self, n: int) -> None:
        """Allocate memory that child processes share."""
        self._memory = mmap.mmap(-1, n * _TIME.size)
        self._n = n

    def beat(self, rank: int) -> None:
        """Record that the rank is alive now."""
        _TIME.pack_into(self._memory, rank * _TIME.size, time.monotonic())

    def last(self, rank: int) -> float:
        """The time of the rank's last heartbeat."""
        found: float = _TIME.unpack_from(self._memory, rank * _TIME.size)[0]
        return found

    def all_began(self) -> bool:
        """Whether every rank has made its first call."""
        return all(self.last(rank) for rank in range(self._n))


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a trial's ranks; the secret is for several hosts."""

    job: str
    address: str
    secret: str


@dataclass(frozen=True)
class ServerPipes:
    """A child's pipes: it writes its outcome, and exits when `release` closes."""

    outcome: int
    release: int
    stderr: int


def run_rank(
    trial: Trial,
    rank: int,
    rendezvous: Rendezvous,
    heartbeats: Heartbeats,
    pipes: ServerPipes,
) -> NoReturn:
    """Run one rank of a trial; never returns."""
    try:
        if trial.hosts:
            os.environ["UNISONO_HOST_ID"] = f"host{trial.host_of_rank[rank]}"
            os.environ["UNISONO_ADDRESS"] = rendezvous.address
            os.environ["UNISONO_SECRET"] = rendezvous.secret
        if trial.io_threads:
            os.environ["UNISONO_IO_THREADS"] = str(trial.io_threads)
            os.environ |= {"UNISONO_LANES": "2", "UNISONO_IO_LEAST": "1"}
        os.dup2(pipes.stderr, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        faulthandler.enable(file=2)
        outcome, comm = _run_program(trial, rank, rendezvous.job, heartbeats)
        if comm is not None and trial.close_on_error and outcome.error:
            comm.close()
        os.write(pipes.outcome, msgspec.json.encode(outcome) + b"\n")
        os.read(pipes.release, 1)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _run_program(
    trial: Trial, rank: int, job: str, heartbeats: Heartbeats
) -> tuple[RankOutcome, Communicator | None]:
    outcome = RankOutcome(rank)
    ctx = comm = None
    try:
        stops = trial.action == "stop"
        timeout_s = trial.limit_s if stops else trial.timeout_s
        comm = init(rank, trial.n, job=job, timeout_s=timeout_s)
        if stops:  # all others are connected and on time when the victim stops
            PROGRAMS[trial.program](RankContext(comm, trial, lambda: None), 0)
            comm.barrier()
        _set_timeouts(comm, trial)
        ctx = RankContext(comm, trial, lambda: heartbeats.beat(rank))
        _arm(trial, rank)
        until = time.monotonic() + trial.limit_s / 2
        while outcome.rounds < trial.rounds or (
            not trial.rounds and time.monotonic() < until
        ):
            PROGRAMS[trial.program](ctx, outcome.rounds)
            outcome.rounds += 1
    except Exception as error:
        outcome.raised_at = time.monotonic()
        _record_error(error, outcome)
    outcome.members = list(range(trial.n)) if ctx is None else ctx.members
    return outcome, comm


def _arm(trial: Trial, rank: int) -> None:
    if trial.action == "delay":
        rng = random.Random(trial.seed * 101 + rank)
        moments = [
            f"{point}:{rng.randint(1, 100)}:sleep={rng.choice((1, 5, 20))}"
            for point in rng.choices(_native.failpoint_names(), k=24)
        ]
        _native.arm_failpoints(",".join(moments))
    elif trial.failpoint and rank == trial.victim:
        action = "stop" if trial.hold else trial.action
        _native.arm_failpoints(f"{trial.failpoint}:{trial.hit}:{action}")


def _set_timeouts(comm: Communicator, trial: Trial) -> None:
    """Give the engine the trial's timeouts."""
    comm.timeout_s = trial.timeout_s
    comm.core.native.set_wait_policy(
        *comm.core.session.wait_policy,
        int(trial.late_s * 1e9),
        int(trial.timeout_s * 1e9),
    )


def _record_error(error: Exception, outcome: RankOutcome) -> None:
    outcome.error, outcome.message = type(error).__name__, str(error)
    if isinstance(error, PeerLost):
        outcome.pids, outcome.host = list(error.pids), error.host
    if isinstance(error, ConnectFailed):
        outcome.ranks = list(error.missing)
    elif isinstance(error, PeerLost | CollectiveTimeout):
        outcome.ranks = list(error.ranks)
        outcome.collective, outcome.seq = error.collective, error.seq
    else:
        outcome.message = "".join(traceback.format_exception(error))
