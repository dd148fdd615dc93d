"""What ranks do in a loop until one of them is lost.

A program is a function of a `RankContext`, which has a communicator and arrays, and of
the round's number. It makes its calls and compares every result with the expected one:
a failure may prevent a result, but must never corrupt one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kill_trials.records import Trial
from unisono.algorithms import library, schedule
from unisono.errors import UnisonoError
from unisono.runtime.communicator import Communicator

Array = NDArray[np.float32]
Program = Callable[["RankContext", int], None]
PROGRAMS: dict[str, Program] = {}


class WrongResult(AssertionError):
    """A call returned a wrong result."""


class RankContext:
    """One rank's communicator and arrays; `members` are the ranks that it now uses."""

    def __init__(
        self, comm: Communicator, trial: Trial, beat: Callable[[], None]
    ) -> None:
        """Allocate arrays of `trial.count` elements for one rank and for all ranks.

        Programs call `beat` right before each call.
        """
        self.comm = comm
        self.beat = beat
        self.trial = trial
        self.rank, self.n = comm.rank, comm.world_size
        self.members = list(range(self.n))
        self._x, self._y = self.array(trial.count), self.array(trial.count)
        self._all = self.array(self.n * trial.count)
        self.use(trial.count, trial.algorithm)

    def use(self, count: int, algorithm: str | None) -> None:
        """Set size and algorithm: `x` holds one input, `all` one for each rank."""
        self.count = count
        self.base: Array = np.arange(count, dtype=np.float32) % 16
        self.x, self.y = self._x[:count], self._y[:count]
        self.all = self._all[: self.n * count]
        self.how: dict[str, Any] = {"algorithm": algorithm}

    def array(self, count: int) -> Array:
        """An array in shared or private memory, as the trial asks."""
        if self.trial.shared:
            made: Array = self.comm.empty(count, "float32")
            return made
        return np.empty(count, np.float32)

    def input(self, rank: int, turn: int) -> Array:
        """A rank's input in a round: whole numbers, so that sums are exact."""
        return self.base + np.float32(rank + turn % 8)

    def total(self, ranks: Sequence[int], turn: int) -> Array:
        """The sum of these ranks' inputs."""
        return len(ranks) * self.base + np.float32(sum(ranks) + len(ranks) * (turn % 8))

    def concatenated(self, ranks: Sequence[int], turn: int) -> Array:
        """These ranks' inputs, concatenated."""
        return np.concatenate([self.input(r, turn) for r in ranks])

    def check(self, got: Array, wanted: Array) -> None:
        """Compare bit for bit."""
        if not np.array_equal(got, wanted):
            at = int(np.flatnonzero(got != wanted)[0])
            raise WrongResult(
                f"rank {self.rank}: element {at} is {got[at]}, expected {wanted[at]}"
            )


def _program(run: Program) -> Program:
    PROGRAMS[run.__name__.lstrip("_")] = run
    return run


@_program
def _all_reduce(ctx: RankContext, turn: int) -> None:
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    ctx.comm.all_reduce(ctx.x, **ctx.how)
    ctx.check(ctx.x, ctx.total(ctx.members, turn))


@_program
def _broadcast(ctx: RankContext, turn: int) -> None:
    root = turn % ctx.n
    ctx.x[:] = ctx.input(root, turn) if ctx.rank == root else -1
    ctx.beat()
    ctx.comm.broadcast(ctx.x, root=root, **ctx.how)
    ctx.check(ctx.x, ctx.input(root, turn))


@_program
def _reduce(ctx: RankContext, turn: int) -> None:
    root = turn % ctx.n
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    result = ctx.comm.reduce(ctx.x, root=root, **ctx.how)
    if result is not None:
        ctx.check(result, ctx.total(ctx.members, turn))


@_program
def _all_gather(ctx: RankContext, turn: int) -> None:
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    ctx.comm.all_gather(ctx.x, out=ctx.all, **ctx.how)
    ctx.check(ctx.all, ctx.concatenated(ctx.members, turn))


@_program
def _reduce_scatter(ctx: RankContext, turn: int) -> None:
    ctx.all[:] = ctx.concatenated([ctx.rank + q for q in range(ctx.n)], turn)
    ctx.beat()
    ctx.comm.reduce_scatter(ctx.all, out=ctx.x, **ctx.how)
    ctx.check(ctx.x, ctx.total([r + ctx.rank for r in ctx.members], turn))


@_program
def _gather(ctx: RankContext, turn: int) -> None:
    root = turn % ctx.n
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    result = ctx.comm.gather(ctx.x, root=root, **ctx.how)
    if result is not None:
        ctx.check(result, ctx.concatenated(ctx.members, turn))


@_program
def _scatter(ctx: RankContext, turn: int) -> None:
    root = turn % ctx.n
    given = None
    if ctx.rank == root:
        given = ctx.all
        given[:] = ctx.concatenated(ctx.members, turn)
    ctx.beat()
    ctx.comm.scatter(given, root=root, out=ctx.x, **ctx.how)
    ctx.check(ctx.x, ctx.input(ctx.rank, turn))


@_program
def _all_to_all(ctx: RankContext, turn: int) -> None:
    ctx.all[:] = ctx.concatenated([10 * ctx.rank + q for q in ctx.members], turn)
    ctx.beat()
    result = ctx.comm.all_to_all(ctx.all, **ctx.how)
    ctx.check(result, ctx.concatenated([10 * q + ctx.rank for q in ctx.members], turn))


@_program
def _barrier(ctx: RankContext, turn: int) -> None:
    ctx.beat()
    ctx.comm.barrier(**ctx.how)


@_program
def _send_recv(ctx: RankContext, turn: int) -> None:
    """Every rank sends to every other, all in flight at once."""
    comm, others = ctx.comm, [q for q in ctx.members if q != ctx.rank]
    rows = ctx.all.reshape(ctx.n, -1)
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    sent = [comm.send(ctx.x, q, tag=turn, async_op=True) for q in others]
    received = [comm.recv(rows[q], q, tag=turn, async_op=True) for q in others]
    for q, work in zip(others, received, strict=True):
        ctx.beat()
        work.wait()
        ctx.check(rows[q], ctx.input(q, turn))
    for work in sent:
        ctx.beat()
        work.wait()
    ctx.beat()
    comm.barrier()  # no rank continues without the victim


@_program
def _star(ctx: RankContext, turn: int) -> None:
    """Every rank exchanges messages with the victim, one call at a time."""
    comm, center = ctx.comm, ctx.trial.victim
    if ctx.rank != center:
        ctx.x[:] = ctx.input(ctx.rank, turn)
        ctx.beat()
        comm.send(ctx.x, center)
        ctx.beat()
        comm.recv(ctx.y, center)
        ctx.check(ctx.y, ctx.input(center, turn))
        return
    ctx.x[:] = ctx.input(center, turn)
    for q in ctx.members:
        if q != center:
            ctx.beat()
            comm.recv(ctx.y, q)
            ctx.check(ctx.y, ctx.input(q, turn))
            ctx.beat()
            comm.send(ctx.x, q)


@_program
def _split(ctx: RankContext, turn: int) -> None:
    """Two groups; ranks of the group without the victim notice in the next round."""
    color = (ctx.rank + turn) % 2
    ctx.beat()
    part = ctx.comm.split(color)
    assert part is not None
    ctx.members = [q for q in range(ctx.n) if (q + turn) % 2 == color]
    ctx.x[:] = ctx.input(ctx.rank, turn)
    ctx.beat()
    part.all_reduce(ctx.x, **ctx.how)
    ctx.check(ctx.x, ctx.total(ctx.members, turn))
    part.close()
    ctx.members = list(range(ctx.n))


@_program
def _in_flight(ctx: RankContext, turn: int) -> None:
    """Several calls in flight, and a blocking one after them."""
    arrays = [ctx.array(ctx.count) for _ in range(3)]
    for late, x in enumerate(arrays):
        x[:] = ctx.input(ctx.rank, turn + late)
    ctx.beat()
    works = [ctx.comm.all_reduce(x, async_op=True, **ctx.how) for x in arrays]
    _all_reduce(ctx, turn)
    for late, (x, work) in enumerate(zip(arrays, works, strict=True)):
        ctx.beat()
        work.wait()
        ctx.check(x, ctx.total(ctx.members, turn + late))


@_program
def _objects(ctx: RankContext, turn: int) -> None:
    root = turn % ctx.n
    thing = {"turn": turn, "text": "x" * (ctx.count % 1000)}
    ctx.beat()
    got = ctx.comm.broadcast_object(thing if ctx.rank == root else None, root)
    ctx.beat()
    everybody = ctx.comm.all_gather_object([ctx.rank, turn])
    if got != thing or everybody != [[q, turn] for q in ctx.members]:
        raise WrongResult(f"rank {ctx.rank}: got {got} and {everybody}")


@_program
def _mixed(ctx: RankContext, turn: int) -> None:
    """Each round uses another program, size and algorithm, the same on all ranks."""
    rng = random.Random(ctx.trial.seed * 10_007 + turn)
    name = rng.choice((*COLLECTIVE_PROGRAMS, "send_recv", "in_flight"))
    count = rng.choice([c for c in SIZES if c <= ctx.trial.count])
    ctx.use(count, rng.choice(offered(name, ctx.n)))
    PROGRAMS[name](ctx, turn)


@cache
def offered(program: str, n: int) -> tuple[str | None, ...]:
    """The algorithms that a program's calls accept, and None."""
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
"""Programs that make one call per round, and have its name."""

SIZES = (1, 10, 500, 5_000, 50_000, 400_000)
"""Numbers of elements: within a header, within a window, in several pieces."""
