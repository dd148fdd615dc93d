"""Threads that move large messages between hosts: the same results, the same failures.

With `UNISONO_IO_LEAST` = 1 they move every message, so that small arrays suffice.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from test_across_hosts import collectives, in_flight
from test_cut_streams import cut

from forked import attempt, await_that, interrupt_in_call, until_broken
from unisono import _native
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    UsageError,
)
from unisono.testing import world
from unisono.transports import threads as threads_transport
from unisono.transports.lanes import Lanes

pytestmark = [pytest.mark.timeout(240)]

FRAME = 128 << 10
"""Bytes; a message of more is shared by the lanes."""
HOW = [(1, 1), (2, 1), (2, 2), (2, 3), (3, 3), (5, 7)]
"""Lanes and threads: one thread for all lanes, one for each, and some that send."""
needs_tls = pytest.mark.skipif(bool(_native.tls_missing()), reason="no OpenSSL 3")


def set_threads(monkeypatch, lanes, threads, least=1):
    monkeypatch.setenv("UNISONO_LANES", str(lanes))
    monkeypatch.setenv("UNISONO_IO_THREADS", str(threads))
    monkeypatch.setenv("UNISONO_IO_LEAST", str(least))


def everything(comm, counts):
    wrong = [f"{what} of {c}" for c in counts for what in collectives(comm, c)]
    return wrong + in_flight(comm)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 2)], ids=str)
@pytest.mark.parametrize(("lanes", "threads"), HOW)
def test_every_collective_is_right(monkeypatch, lanes, threads, hosts):
    set_threads(monkeypatch, lanes, threads)
    counts = [1, 7, FRAME // 4 + 1, 5 * FRAME // 2]  # about one frame, and many
    with world(len(hosts), hosts=hosts) as made:
        assert made.run(everything, counts) == [[]] * len(hosts)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "rabenseifner"])
def test_bits_are_those_of_the_calling_thread_alone(monkeypatch, algorithm):
    def summed(comm):
        x = np.random.default_rng(comm.rank).standard_normal(FRAME + 5, np.float32)
        return comm.all_reduce(x, algorithm=algorithm)

    found = []
    for lanes, threads in ((1, 0), (2, 3)):
        set_threads(monkeypatch, lanes, threads)
        with world(4, hosts=(0, 1, 2, 3)) as made:
            found += made.run(summed)
    assert all((each == found[0]).all() for each in found)


def io_threads():
    """How many there are in this process."""
    names = Path("/proc/self/task").glob("*/comm")
    return sum(name.read_text() == "unisono-io\n" for name in names)


@pytest.mark.parametrize("adders", [0, 1, 2, 3])
def test_calls_that_add_up_use_as_many_threads_as_they_may(monkeypatch, adders):
    """A thread starts with its first message; of three threads one sends."""

    def started(comm, name):
        before = io_threads()
        comm.barrier()
        x = np.ones(3 * FRAME, np.float32)
        found = getattr(comm, name)(x, algorithm="direct")
        comm.barrier()
        after = io_threads()
        comm.barrier()
        return (after - before) / comm.size, float(found.min())

    few = Lanes(lanes=2, io_threads=3, least_bytes=1, adders=adders)
    monkeypatch.setattr(threads_transport, "choose_lanes", lambda *_: few)
    with world(3, hosts=(0, 1, 2)) as made:
        made.run(lambda comm: comm.barrier())
        assert made.run(started, "reduce_scatter") == [(adders, 3.0)] * 3
        assert made.run(started, "all_gather") == [(3 - adders, 1.0)] * 3
    with world(3, hosts=(0, 1, 2)) as made:
        assert made.run(everything, [7, 5 * FRAME // 2]) == [[]] * 3


@pytest.mark.parametrize(("lanes", "threads"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("late", [1, 2])
def test_copy_is_received_although_another_rank_is_late(
    monkeypatch, late, lanes, threads
):
    """It comes when rank 0 has all of the other rank: whichever is first in order."""
    set_threads(monkeypatch, lanes, threads)
    outputs = {}

    def gather(comm, other):
        x = np.full(FRAME, comm.rank + 1, np.float32)
        out = np.zeros(comm.size * FRAME, np.float32)
        comm.all_gather(x, out=out, algorithm="direct")  # connections are open
        out[:] = 0
        comm.barrier()
        outputs[comm.rank] = out
        if comm.rank == late:
            part = slice(other * FRAME, (other + 1) * FRAME)
            await_that(lambda: 0 in outputs and (outputs[0][part] == other + 1).all())
        comm.all_gather(x, out=out, algorithm="direct")
        return out.reshape(comm.size, FRAME).max(axis=1).tolist()

    with world(3, hosts=(0, 1, 2), timeout_s=60) as made:
        assert made.run(gather, 3 - late) == [[1, 2, 3]] * 3


@pytest.mark.parametrize("tls", [None, pytest.param("mutual", marks=needs_tls)])
@pytest.mark.parametrize("how", ["short=1", "short=65", "cut=3"])
def test_cut_streams_change_nothing(monkeypatch, how, tls):
    set_threads(monkeypatch, 2, 3)
    count = 20 if how == "short=1" else FRAME // 4 * 2 + 3
    with cut(how), world(3, hosts=(0, 0, 1), tls=tls) as made:
        assert made.run(summed_and_gathered, count) == [True] * 3


def summed_and_gathered(comm, count):
    x = np.full(count, comm.rank, np.float32)
    total = comm.all_reduce(x.copy())
    rows = comm.all_gather(x).reshape(comm.world_size, -1)
    right = [(row == r).all() for r, row in enumerate(rows)]
    return bool((total == sum(range(comm.world_size))).all() and all(right))


# --- failures


@contextlib.contextmanager
def threaded(monkeypatch, n, lanes=2, threads=3):
    set_threads(monkeypatch, lanes, threads)
    with world(n, hosts=range(n), timeout_s=60.0) as made:
        yield made


def test_other_call_is_named_with_both_calls(monkeypatch):
    def calls(comm):
        if comm.rank == 1:
            comm.all_gather(np.ones(2 * FRAME))
        else:
            comm.all_reduce(np.ones(3 * FRAME))
        comm.barrier()

    def differ(comm):
        with pytest.raises(CollectiveMismatch) as caught:
            calls(comm)
        return "all_gather" in str(caught.value) and "all_reduce" in str(caught.value)

    with threaded(monkeypatch, 3) as made:
        assert made.run(differ) == [True] * 3


def test_late_rank_is_named_and_buffers_are_free(monkeypatch):
    """After the error no thread writes to the buffer of the call."""

    def late(comm):
        comm.all_reduce(np.ones(2 * FRAME))
        if comm.rank == 1:
            until_broken(comm)
            return True
        x = np.ones(2 * FRAME)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(x, timeout_s=0.3)
        x[:] = 7.0
        comm.close()
        return list(caught.value.ranks) == [1] and bool((x == 7.0).all())

    with threaded(monkeypatch, 2) as made:
        assert made.run(late) == [True] * 2


def test_closing_with_calls_in_flight_ends_them(monkeypatch):
    """With a result, or with an error; and no thread touches a buffer afterwards."""

    def leaves(comm):
        comm.barrier()
        works = []
        with contextlib.suppress(PeerLost, UsageError):
            works += [comm.all_reduce(np.ones(4 * FRAME), async_op=True)]
            works += [comm.all_reduce(np.ones(4 * FRAME), async_op=True)]
        if comm.rank == 1:
            comm.close()
        for work in works:
            with contextlib.suppress(PeerLost, UsageError):
                work.wait()
        return True

    with threaded(monkeypatch, 2) as made:
        assert made.run(leaves) == [True] * 2


@pytest.fixture
def forks(forks):
    env = {"UNISONO_IO_THREADS": "3", "UNISONO_LANES": "2", "UNISONO_IO_LEAST": "1"}
    return forks.having(**env)


def is_interrupted(rank):
    with rank.init(timeout_s=100) as comm:
        comm.all_reduce(np.ones(FRAME))
        rank.tell("passed")
        if rank.number == 1:
            until_broken(comm)
            return True
        rank.until("passed", 1)
        interrupt_in_call(comm)
        error = attempt(comm.all_reduce, np.ones(FRAME))
        return error["error"] == "KeyboardInterrupt"


def test_interrupt_ends_a_call_that_threads_work_on(forks):
    ends = forks.run(2, is_interrupted, hosts=(1, 1))
    assert [end.value for end in ends] == [True, True], ends


# --- the numbers


def lines_of_explain(comm):
    return comm.explain("all_reduce", np.ones(10)).splitlines()


def test_explain_shows_lanes_and_threads(monkeypatch):
    with threaded(monkeypatch, 2) as made:
        shown = made.run(lines_of_explain)[0]
    wanted = "2 connections to each rank that is sent to, 3 I/O threads: "
    assert any(line.startswith(f"  lanes      {wanted}") for line in shown), shown
