"""Times that all ranks measure together.

A time is that of the slowest rank, as the mean of a batch of calls after a barrier; how
many calls make a batch is measured once and agreed. Candidates alternate in rounds,
each round beginning with another, so that a load on the machine slows all of them.
Ranks exchange settings over the communicator, so any launcher works.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import UsageError
from unisono.runtime.communicator import Communicator
from unisono.schedule.collective import COLLECTIVES

Call = Callable[[], object]
WHOLE = ("all_reduce", "broadcast", "reduce")
"""Collectives in which every rank's array is the whole."""


@dataclass(frozen=True)
class Stopwatch:
    """Measures on a communicator; every rank makes the same calls."""

    comm: Communicator
    batch_s: float = 0.02
    rounds: int = 5
    most: int = 1000

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        return float(self.comm.all_reduce(np.array([seconds]), op="max")[0])

    def race(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """The seconds of each call in each round; those that are refused are left out.

        A call is refused by all ranks or by none, for it is the schedule that is.
        """
        counts: dict[str, int] = {}
        for name, call in calls.items():
            try:
                call()
                refused = 0.0
            except UsageError:
                refused = 1.0
            if not self.slowest(refused):
                counts[name] = self._count(call)
        times: dict[str, list[float]] = {name: [] for name in counts}
        names = list(counts)
        for turn in range(self.rounds if names else 0):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(self._batch(calls[name], counts[name]))
        return times

    def _count(self, call: Call) -> int:
        """How many calls fill a batch."""
        seconds = self._batch(call, 1)
        if seconds < self.batch_s / 10:
            seconds = self._batch(call, 5)
        wanted = self.batch_s / max(seconds, 1e-9)
        return int(min(self.most, max(1, math.ceil(wanted))))

    def _batch(self, call: Call, count: int) -> float:
        self.comm.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        return self.slowest((time.perf_counter() - began) / count)

    def between(self, one: int, other: int, nbytes: int) -> list[float]:
        """The seconds of a message from one rank to another, by sending it back."""
        x = np.zeros(nbytes, np.uint8)
        comm, y = self.comm, np.empty(nbytes, np.uint8)

        def there_and_back() -> None:
            if comm.rank == one:
                comm.send(x, other)
                comm.recv(y, other)
            elif comm.rank == other:
                comm.recv(y, one)
                comm.send(x, one)

        return [t / 2 for t in self.race({"both": there_and_back})["both"]]


def elements(collective: str, nbytes: int, n: int, itemsize: int) -> int:
    """How many elements a rank holds so that the whole call has about `nbytes`."""
    if collective == "barrier":
        return 0
    parts = 1 if collective in WHOLE else n
    return max(1, nbytes // (parts * itemsize))


def whole_bytes(collective: str, count: int, n: int, itemsize: int) -> int:
    """The bytes of the whole buffer, as the selector counts them."""
    return count * itemsize * (1 if collective in WHOLE else n)


def calls_of(
    comm: Communicator,
    collective: str,
    count: int,
    dtype: str,
    algorithms: Iterable[str],
) -> dict[str, Call]:
    """The calls to be timed, on the same arrays; `count` elements for each rank."""
    kind, n, at_root = numpy_dtype(dtype), comm.world_size, comm.rank == 0
    method = getattr(comm, collective)
    if collective == "barrier":
        return {name: partial(method, algorithm=name) for name in algorithms}
    part, whole = np.zeros(count, kind), np.zeros(count * n, kind)
    arrays: dict[str, tuple[Any, Any]] = {
        "all_gather": (part, whole),
        "reduce_scatter": (whole, part),
        "all_to_all": (whole, np.zeros_like(whole)),
        "gather": (part, whole if at_root else None),
        "scatter": (whole if at_root else None, part),
    }
    x, out = arrays.get(collective, (part, None))
    return {name: partial(method, x, out=out, algorithm=name) for name in algorithms}


def itemsize_of(collective: str, dtype: str) -> int:
    """The element size in a table's key: 0 where nothing is added up."""
    return DTYPES[dtype].itemsize if COLLECTIVES[collective].reduces else 0
