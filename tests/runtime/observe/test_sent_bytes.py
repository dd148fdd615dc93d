"""Bytes sent, as the communicator counts them: exact, on whatever way a call takes."""

import numpy as np
import pytest

import unisono
from unisono.testing import world

NS = [1, 2, 3, 5]


def sent(comm, call):
    before = comm.sent_bytes
    call()
    return comm.sent_bytes - before


@pytest.mark.quick(n=[1, 3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("algorithm", ["ring", "direct", "naive", "tree", "swing"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_sent_bytes_are_those_of_the_schedule(n, algorithm, count):
    cost = unisono.schedule("all_reduce", algorithm, n).cost(count)

    def work(comm):
        x = np.ones(count, np.float32)
        return sent(comm, lambda: comm.all_reduce(x, algorithm=algorithm))

    with world(n) as w:
        assert w.run(work) == [int(s) * 4 for s in cost.sent]


@pytest.mark.parametrize("n", NS)
def test_uneven_shares(n):
    counts = [3 * r for r in range(n)]
    total = sum(counts)

    def work(comm):
        mine, whole = np.ones(counts[comm.rank], np.int16), np.ones(total, np.int16)
        return (
            sent(comm, lambda: comm.all_gather(mine, counts=counts)),
            sent(comm, lambda: comm.reduce_scatter(whole, counts=counts)),
            sent(comm, lambda: comm.broadcast(whole, root=n - 1, algorithm="naive")),
        )

    with world(n) as w:
        found = w.run(work)
    for r, (gathered, scattered, broadcast) in enumerate(found):
        assert gathered == 2 * (n - 1) * counts[r]
        assert scattered == 2 * (total - counts[r])
        assert broadcast == (2 * (n - 1) * total if r == n - 1 else 0)


def test_cached_calls_and_calls_in_flight_are_counted():
    def work(comm):
        x = np.ones(100)  # one that the native core keeps the plan of
        three = sent(comm, lambda: [comm.all_reduce(x) for _ in range(3)])
        begun = comm.all_reduce(x, async_op=True)
        begun.wait()
        assert three * 4 == 3 * comm.sent_bytes
        return three

    with world(2) as w:
        assert w.run(work) == [3 * 800, 3 * 800]


def test_messages_barriers_and_groups():
    def work(comm):
        x = np.ones(10, np.float32)
        other = 1 - comm.rank
        if comm.rank == 0:
            moved = sent(comm, lambda: comm.send(x, other))
        else:
            moved = sent(comm, lambda: comm.recv(x, other))
        assert sent(comm, comm.barrier) == 0
        group = comm.split(0)
        assert group.sent_bytes == 0
        before = comm.sent_bytes
        group.all_reduce(x)
        assert comm.sent_bytes == before  # each counts its own
        assert group.sent_bytes == 40
        return moved

    with world(2) as w:
        assert w.run(work) == [40, 0]


def test_failed_calls_are_not_counted():
    def work(comm):
        with pytest.raises(unisono.CollectiveMismatch):
            comm.all_reduce(np.ones(10 + comm.rank))
        return comm.sent_bytes

    with world(2) as w:
        assert w.run(work) == [0, 0]
