"""Buffers of `comm.empty` are read where they lie: by all, by some, in place or not."""

import random
import time

import numpy as np
import pytest

from conformance import ROOTED, STYLES, Case, check, every_algorithm, perform
from processes import on_processes
from unisono.runtime.plan.plans import ZERO_COPY_FROM

pytestmark = pytest.mark.one_in(3)

NAMES = {
    "all_reduce": ["direct", "ring", "recursive_doubling", "rabenseifner", "tree"],
    "reduce_scatter": ["direct", "ring", "halving_doubling"],
    "all_gather": ["direct", "ring", "circulant"],
    "broadcast": ["naive", "chain", "tree"],
    "reduce": ["naive", "tree", "direct+direct"],
    "all_to_all": ["direct", "bruck"],
    "scatter": ["direct", "tree"],
    "gather": ["direct", "tree"],
}


def exposed_cases(n):
    """Inputs and outputs exposed by no rank, by some, and by all."""
    nobody, everybody = frozenset(), frozenset(range(n))
    some = frozenset({0, n - 1})
    lenders = [
        *((everybody, everybody), (everybody, nobody), (nobody, everybody)),
        *((some, everybody), (everybody, some), (some, some)),
    ]
    count = 4 * 3 * 5 * ZERO_COPY_FROM // 4 // 16  # above the limit, even for one rank
    found = []
    for what, names in NAMES.items():
        for name in names:
            for who in lenders:
                style = STYLES[len(found) % 3]
                root = n - 1 if what in ROOTED else 0
                made = Case(what, name, n, count, root, style=style, lenders=who)
                found.append(made)
    return found


@pytest.mark.quick(n=[4])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_exposed_buffers_on_processes_are_correct(n):
    cases = [c for c in exposed_cases(n) if c.counts % n == 0]
    assert len(cases) > 100
    check(cases, on_processes(perform, n, (cases,)))


def test_exposed_buffers_on_threads_are_correct(worlds):
    """Threads expose everything anyway; shared buffers must change nothing."""
    cases = exposed_cases(4)
    check(cases, worlds(4, 2048).run(perform, cases))


def test_small_buffers_are_not_exposed():
    everybody = frozenset(range(3)), frozenset(range(3))
    cases = [
        Case(c.what, c.algorithm, 3, c.counts, c.root, style=c.style, lenders=everybody)
        for c in every_algorithm(3, [5, 1000], [("all_reduce", "direct")])
    ]
    check(cases, on_processes(perform, 3, (cases,)))


def overwritten(comm, rounds):
    """What a call has returned is the caller's again: others must be done with it."""
    chance = random.Random(comm.rank)
    n, count = comm.world_size, 12_000
    x, out = comm.empty(count), comm.empty(count)
    everything = comm.empty(n * count)
    total = sum(range(1, n + 1))
    for turn in range(rounds):
        x[:] = comm.rank + 1 + turn
        comm.all_reduce(x, out=out, algorithm=chance_of(turn))
        x[:] = np.nan
        time.sleep(chance.random() * 1e-3)
        assert (out == total + n * turn).all()
        x[:] = comm.rank + 1 + turn
        comm.all_gather(x, out=everything)
        x[:] = np.nan
        assert (everything[::count] == np.arange(1, n + 1) + turn).all()
        comm.reduce_scatter(everything, out=x)
        everything[:] = np.nan
        assert (x == n * (comm.rank + 1 + turn)).all()
        root = turn % n
        comm.broadcast(x, root=root)
        time.sleep(chance.random() * 1e-3)
        assert (x == n * (root + 1 + turn)).all()
        x[:] = np.nan


def chance_of(turn):
    return ("direct", "ring", "naive", "tree")[turn % 4]


def test_buffers_may_be_overwritten_as_soon_as_a_call_returns():
    on_processes(overwritten, 3, (60,))


def parts_and_ends(comm):
    """Slices of an exposed buffer are exposed; a released one is not."""
    whole = comm.empty((5, 20_000))
    whole[...] = comm.rank + 1
    total = sum(range(1, comm.world_size + 1))
    comm.all_reduce(whole[1:3])
    assert (whole[1:3] == total).all()
    assert (whole[0] == comm.rank + 1).all()
    assert (whole[3:] == comm.rank + 1).all()
    for _ in range(50):  # each is gone when the next is made
        x = comm.empty(10_000)
        x[:] = comm.rank + 1
        assert (comm.all_reduce(x) == total).all()
    one = comm.split(comm.rank % 2)
    x = comm.empty(10_000)
    x[:] = 1
    assert (one.all_reduce(x) == one.world_size).all()
    y = one.empty(10_000)
    y[:] = 1
    assert (comm.all_reduce(y) == comm.world_size).all()
    one.close()
    assert (comm.all_reduce(y) == comm.world_size**2).all()
    works = [comm.all_reduce(comm.empty(10_000), async_op=True) for _ in range(5)]
    for work in works:  # kept alive by the calls alone
        work.wait()


def test_parts_of_buffers_and_freed_buffers_work():
    on_processes(parts_and_ends, 4)


def test_parts_and_overwritten_buffers_on_threads_work(worlds):
    worlds(4).run(parts_and_ends)
    worlds(4).run(overwritten, 20)
