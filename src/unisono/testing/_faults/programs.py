"""What ranks do over and over until one of them is lost.

A program is a function of a desk, which has a communicator and arrays, and of the
number of the round. It makes its calls, and compares everything that a call returned
with what it should be: a failure may keep a result from a rank, but never spoil one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import library, schedule
from unisono.errors import UnisonoError
from unisono.runtime.communicator import Communicator
from unisono.testing._faults.records import Trial

Array = NDArray[np.float32]
Program = Callable[["Desk", int], None]
PROGRAMS: dict[str, Program] = {}


class WrongResult(AssertionError):
    """A call returned something else than it should have."""


class Desk:
    """What one rank works with: `members` tells which communicator it is using."""

    def __init__(
        self, comm: Communicator, trial: Trial, sign: Callable[[], None]
    ) -> None:
        """Make arrays of `trial.count` elements, and for all ranks.

        `sign` gives a sign of life; programs do so right before their calls.
        """
        self.comm = comm
        self.sign = sign
        self.trial = trial
        self.rank, self.n = comm.rank, comm.world_size
        self.members = list(range(self.n))
        self._x, self._y = self.array(trial.count), self.array(trial.count)
        self._all = self.array(self.n * trial.count)
        self.use(trial.count, trial.algorithm)

    def use(self, count: int, algorithm: str | None) -> None:
        """Set the size and the algorithm: `x` is one share, `all` one for each rank."""
        self.count = count
        self.base: Array = np.arange(count, dtype=np.float32) % 16
        self.x, self.y = self._x[:count], self._y[:count]
        self.all = self._all[: self.n * count]
        self.how: dict[str, Any] = {"algorithm": algorithm}

    def array(self, count: int) -> Array:
        """An array of the kind that the trial asks for."""
        if self.trial.shared:
            made: Array = self.comm.empty(count, "float32")
            return made
        return np.empty(count, np.float32)

    def share(self, rank: int, turn: int) -> Array:
        """What a rank contributes in a round: whole numbers, so that sums are exact."""
        return self.base + np.float32(rank + turn % 8)

    def total(self, ranks: Sequence[int], turn: int) -> Array:
        """The sum of what these ranks contribute."""
        return len(ranks) * self.base + np.float32(sum(ranks) + len(ranks) * (turn % 8))

    def parts(self, shares: Sequence[int], turn: int) -> Array:
        """Contributions one after the other."""
        return np.concatenate([self.share(s, turn) for s in shares])

    def check(self, got: Array, wanted: Array) -> None:
        """Compare, bit for bit."""
        if not np.array_equal(got, wanted):
            at = int(np.flatnonzero(got != wanted)[0])
            raise WrongResult(
                f"rank {self.rank}: element {at} is {got[at]}, expected {wanted[at]}"
            )


def _program(run: Program) -> Program:
    PROGRAMS[run.__name__.lstrip("_")] = run
    return run


@_program
def _all_reduce(desk: Desk, turn: int) -> None:
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    desk.comm.all_reduce(desk.x, **desk.how)
    desk.check(desk.x, desk.total(desk.members, turn))


@_program
def _broadcast(desk: Desk, turn: int) -> None:
    root = turn % desk.n
    desk.x[:] = desk.share(root, turn) if desk.rank == root else -1
    desk.sign()
    desk.comm.broadcast(desk.x, root=root, **desk.how)
    desk.check(desk.x, desk.share(root, turn))


@_program
def _reduce(desk: Desk, turn: int) -> None:
    root = turn % desk.n
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    result = desk.comm.reduce(desk.x, root=root, **desk.how)
    if result is not None:
        desk.check(result, desk.total(desk.members, turn))


@_program
def _all_gather(desk: Desk, turn: int) -> None:
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    desk.comm.all_gather(desk.x, out=desk.all, **desk.how)
    desk.check(desk.all, desk.parts(desk.members, turn))


@_program
def _reduce_scatter(desk: Desk, turn: int) -> None:
    places = [desk.rank + place for place in range(desk.n)]
    desk.all[:] = desk.parts(places, turn)
    desk.sign()
    desk.comm.reduce_scatter(desk.all, out=desk.x, **desk.how)
    desk.check(desk.x, desk.total([r + desk.rank for r in desk.members], turn))


@_program
def _gather(desk: Desk, turn: int) -> None:
    root = turn % desk.n
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    result = desk.comm.gather(desk.x, root=root, **desk.how)
    if result is not None:
        desk.check(result, desk.parts(desk.members, turn))


@_program
def _scatter(desk: Desk, turn: int) -> None:
    root = turn % desk.n
    given = None
    if desk.rank == root:
        given = desk.all
        given[:] = desk.parts(desk.members, turn)
    desk.sign()
    desk.comm.scatter(given, root=root, out=desk.x, **desk.how)
    desk.check(desk.x, desk.share(desk.rank, turn))


@_program
def _all_to_all(desk: Desk, turn: int) -> None:
    desk.all[:] = desk.parts([10 * desk.rank + q for q in desk.members], turn)
    desk.sign()
    result = desk.comm.all_to_all(desk.all, **desk.how)
    desk.check(result, desk.parts([10 * q + desk.rank for q in desk.members], turn))


@_program
def _barrier(desk: Desk, turn: int) -> None:
    desk.sign()
    desk.comm.barrier(**desk.how)


@_program
def _send_recv(desk: Desk, turn: int) -> None:
    """Everybody sends to everybody, all in flight at once."""
    comm, others = desk.comm, [q for q in desk.members if q != desk.rank]
    rows = desk.all.reshape(desk.n, -1)
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    sent = [comm.send(desk.x, q, tag=turn, async_op=True) for q in others]
    received = [comm.recv(rows[q], q, tag=turn, async_op=True) for q in others]
    for q, work in zip(others, received, strict=True):
        desk.sign()
        work.wait()
        desk.check(rows[q], desk.share(q, turn))
    for work in sent:
        desk.sign()
        work.wait()
    desk.sign()
    comm.barrier()  # nobody goes on without the victim


@_program
def _star(desk: Desk, turn: int) -> None:
    """Everybody talks with the victim, one call at a time."""
    comm, center = desk.comm, desk.trial.victim
    if desk.rank != center:
        desk.x[:] = desk.share(desk.rank, turn)
        desk.sign()
        comm.send(desk.x, center)
        desk.sign()
        comm.recv(desk.y, center)
        desk.check(desk.y, desk.share(center, turn))
        return
    desk.x[:] = desk.share(center, turn)
    for q in desk.members:
        if q != center:
            desk.sign()
            comm.recv(desk.y, q)
            desk.check(desk.y, desk.share(q, turn))
            desk.sign()
            comm.send(desk.x, q)


@_program
def _split(desk: Desk, turn: int) -> None:
    """Two groups; whoever is in the other one learns of it in the next round."""
    color = (desk.rank + turn) % 2
    desk.sign()
    part = desk.comm.split(color)
    assert part is not None
    desk.members = [q for q in range(desk.n) if (q + turn) % 2 == color]
    desk.x[:] = desk.share(desk.rank, turn)
    desk.sign()
    part.all_reduce(desk.x, **desk.how)
    desk.check(desk.x, desk.total(desk.members, turn))
    part.close()
    desk.members = list(range(desk.n))


@_program
def _in_flight(desk: Desk, turn: int) -> None:
    """Several calls in flight, and a plain one behind them."""
    arrays = [desk.array(desk.count) for _ in range(3)]
    for late, x in enumerate(arrays):
        x[:] = desk.share(desk.rank, turn + late)
    desk.sign()
    works = [desk.comm.all_reduce(x, async_op=True, **desk.how) for x in arrays]
    _all_reduce(desk, turn)
    for late, (x, work) in enumerate(zip(arrays, works, strict=True)):
        desk.sign()
        work.wait()
        desk.check(x, desk.total(desk.members, turn + late))


@_program
def _objects(desk: Desk, turn: int) -> None:
    root = turn % desk.n
    thing = {"turn": turn, "text": "x" * (desk.count % 1000)}
    desk.sign()
    got = desk.comm.broadcast_object(thing if desk.rank == root else None, root)
    desk.sign()
    everybody = desk.comm.all_gather_objects([desk.rank, turn])
    if got != thing or everybody != [[q, turn] for q in desk.members]:
        raise WrongResult(f"rank {desk.rank}: got {got} and {everybody}")


@_program
def _medley(desk: Desk, turn: int) -> None:
    """In each round another program, size and algorithm, the same on all ranks."""
    chance = random.Random(desk.trial.seed * 10_007 + turn)
    name = chance.choice((*COLLECTIVE_PROGRAMS, "send_recv", "in_flight"))
    count = chance.choice([c for c in SIZES if c <= desk.trial.count])
    desk.use(count, chance.choice(offered(name, desk.n)))
    PROGRAMS[name](desk, turn)


@cache
def offered(program: str, n: int) -> tuple[str | None, ...]:
    """The algorithms that a program's calls can be given, and none."""
    found: list[str | None] = [None]
    for collective, name in library():
        if collective == program:
            with contextlib.suppress(UnisonoError):
                schedule(collective, name, n)
                found.append(name)
    return tuple(found)


COLLECTIVE_PROGRAMS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
"""Programs that make one call a round, named like it."""

SIZES = (1, 10, 500, 5_000, 50_000, 400_000)
"""Numbers of elements: in a header, in a window, in several pieces."""
