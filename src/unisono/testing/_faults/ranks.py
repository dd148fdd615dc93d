"""One rank of a trial: it meets the others, runs its program, and tells how it ended.

All this happens in a child of the server. The signs of life are in memory that the
children share with it: for each rank the time at which it began its latest call.
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

from unisono import _native
from unisono.errors import CollectiveTimeout, ConnectFailed, PeerLost
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.init import init
from unisono.testing._faults.programs import PROGRAMS, Desk
from unisono.testing._faults.records import Seen, Trial

_SIGN = struct.Struct("d")


class Life:
    """Signs of life, one number for each rank; 0 before its first round."""

    def __init__(self, n: int) -> None:
        """Memory that children will share."""
        self._memory = mmap.mmap(-1, n * _SIGN.size)
        self._n = n

    def sign(self, rank: int) -> None:
        """The rank lives, now."""
        _SIGN.pack_into(self._memory, rank * _SIGN.size, time.monotonic())

    def last(self, rank: int) -> float:
        """When it last gave a sign."""
        found: float = _SIGN.unpack_from(self._memory, rank * _SIGN.size)[0]
        return found

    def all_began(self) -> bool:
        """Whether every rank has begun."""
        return all(self.last(rank) for rank in range(self._n))


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a trial meet; on several hosts, with a secret."""

    job: str
    address: str
    secret: str


@dataclass(frozen=True)
class Post:
    """How a child reaches the server: it tells, and is let go by the end of a pipe."""

    tell: int
    released: int
    stderr: int


def run_rank(
    trial: Trial, rank: int, meeting: Meeting, life: Life, post: Post
) -> NoReturn:
    """Be one rank of a trial; never returns."""
    try:
        if trial.hosts:
            os.environ["UNISONO_HOST_ID"] = f"host{trial.places[rank]}"
            os.environ["UNISONO_ADDRESS"] = meeting.address
            os.environ["UNISONO_SECRET"] = meeting.secret
        os.dup2(post.stderr, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        faulthandler.enable(file=2)
        seen, comm = _observed(trial, rank, meeting.job, life)
        if comm is not None and trial.leave_at_once and seen.error:
            comm.close()
        os.write(post.tell, msgspec.json.encode(seen) + b"\n")
        os.read(post.released, 1)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _observed(
    trial: Trial, rank: int, job: str, life: Life
) -> tuple[Seen, Communicator | None]:
    seen = Seen(rank)
    desk = comm = None
    try:
        stops = trial.action == "stop"
        patience = trial.limit_s if stops else trial.timeout_s
        comm = init(rank, trial.n, job=job, timeout_s=patience)
        if stops:  # nobody else is to be late, nor to look for whom it has not met
            PROGRAMS[trial.program](Desk(comm, trial, lambda: None), 0)
            comm.barrier()
        _shorten(comm, trial)
        desk = Desk(comm, trial, lambda: life.sign(rank))
        _arm(trial, rank)
        until = time.monotonic() + trial.limit_s / 2
        while seen.calls < trial.rounds or (
            not trial.rounds and time.monotonic() < until
        ):
            PROGRAMS[trial.program](desk, seen.calls)
            seen.calls += 1
    except Exception as error:
        seen.at = time.monotonic()
        _describe(error, seen)
    seen.members = list(range(trial.n)) if desk is None else desk.members
    return seen, comm


def _arm(trial: Trial, rank: int) -> None:
    if trial.action == "dawdle":
        chance = random.Random(trial.seed * 101 + rank)
        moments = [
            f"{point}:{chance.randint(1, 100)}:sleep={chance.choice((1, 5, 20))}"
            for point in chance.choices(_native.failpoint_names(), k=24)
        ]
        _native.arm_failpoints(",".join(moments))
    elif trial.failpoint and rank == trial.victim:
        action = "stop" if trial.hold else trial.action
        _native.arm_failpoints(f"{trial.failpoint}:{trial.hit}:{action}")


def _shorten(comm: Communicator, trial: Trial) -> None:
    """Let the engine lose patience as early as the trial wants."""
    comm.timeout_s = trial.timeout_s
    comm.core.native.set_patience(
        *comm.core.transport.patience,
        int(trial.late_s * 1e9),
        int(trial.timeout_s * 1e9),
    )


def _describe(error: Exception, seen: Seen) -> None:
    seen.error, seen.message = type(error).__name__, str(error)
    if isinstance(error, PeerLost):
        seen.pids, seen.host = list(error.pids), error.host
    if isinstance(error, ConnectFailed):
        seen.ranks = list(error.missing)
    elif isinstance(error, PeerLost | CollectiveTimeout):
        seen.ranks = list(error.ranks)
        seen.collective, seen.seq = error.collective, error.seq
    else:
        seen.message = "".join(traceback.format_exception(error))
