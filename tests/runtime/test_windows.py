"""Windows are used again and again: what one call reads, the next must not overwrite.

Ranks are made to stumble inside the engine, so that the others run ahead of them.
"""

import random

import numpy as np
import pytest

from conformance import check, every_algorithm, perform
from processes import on_processes
from unisono import _native
from unisono.testing import world


def stumbles(seed, hits, among, longest_ms):
    """Failpoints at which ranks sleep a little at certain passes."""
    chance = random.Random(seed)
    names = ["action.begin", "action.done", "generation.done", "arrive.seen"]
    spec = [
        f"{chance.choice(names)}:{chance.randint(1, among)}:"
        f"sleep={chance.randint(1, longest_ms)}"
        for _ in range(hits)
    ]
    return ",".join(spec)


@pytest.fixture
def failpoints():
    yield _native.arm_failpoints
    _native.arm_failpoints("")


@pytest.mark.quick(seed=[0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_delays_on_threads_change_nothing(failpoints, seed):
    """Calls of many pieces by other algorithms each time, hence with other readers."""
    chance = random.Random(seed)
    n = chance.randint(3, 6)
    cases = every_algorithm(n, [1500, 4001])
    chance.shuffle(cases)
    with world(n, window=1024) as w:
        failpoints(stumbles(seed, 60, 1500, 4))
        check(cases[:60], w.run(perform, cases[:60]))


def slow_reader(comm):
    """Rank 2 is slow to read what rank 0 gave out in the first call."""
    if comm.rank == 2:
        _native.arm_failpoints("action.begin:2:sleep=300")
    x = np.full(150_000, float(comm.rank == 0), np.float32)
    y = np.full(150_000, 2.0 * (comm.rank == 0), np.float32)
    comm.broadcast(x, algorithm="naive")  # both others read from rank 0
    comm.broadcast(y, algorithm="chain:segments=1")  # only rank 1 does
    return bool((x == 1).all()), bool((y == 2).all())


def test_next_call_waits_for_readers_of_the_last():
    assert on_processes(slow_reader, 3) == [(True, True)] * 3


def stumbling(comm, cases):
    _native.arm_failpoints(stumbles(comm.rank, 40, 800, 5))
    return perform(comm, cases)


def test_random_delays_on_processes_change_nothing():
    cases = every_algorithm(4, [40_000, 300_001], A_FEW)
    random.Random(4).shuffle(cases)
    check(cases, on_processes(stumbling, 4, (cases,)))


A_FEW = [
    *(("all_reduce", name) for name in ("direct", "ring", "tree")),
    *(("broadcast", name) for name in ("naive", "chain", "tree")),
    *(("reduce", name) for name in ("naive", "tree")),
    *(("scatter", "direct"), ("gather", "tree"), ("all_to_all", "direct")),
]
