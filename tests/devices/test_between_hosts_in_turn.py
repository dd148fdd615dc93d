"""Pieces between hosts are on the wire of two communicators in turn; how these fail."""

import threading
import time

import numpy as np
import pytest

from device_cases import to_device
from device_rank import DeviceRank
from unisono.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from unisono.runtime.call.arguments import all_reduce
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device import pipeline
from unisono.testing import world

LONG = 64 << 10
"""Bytes that are many pieces."""
BOUND_S = 20.0
"""Well above a second of timeout and two of grace."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(pipeline, "SLOT", 4096)


def wires(comm):
    """The communicators of the pieces that a rank sends; none if it is no rail."""
    levels = comm.core.device.made.levels
    return levels._rails if levels._inside else levels._all


def calls(comm):
    """The calls that each of them has made."""
    return [core.native.seq() for core in wires(comm)]


def made(comm, nbytes):
    """By how many calls of each communicator such a call was sent, and its result."""
    me, before = DeviceRank(comm), calls(comm)
    x = to_device(np.full(nbytes // 4, comm.rank, np.float32))
    comm.all_reduce(x, stream=me.stream)
    comm.synchronize(60)
    counts = [b - a for a, b in zip(before, calls(comm), strict=True)]
    return counts, x.numpy()


def each_size(comm):
    DeviceRank(comm).first_call()
    assert calls(comm)
    comm.barrier()
    return made(comm, LONG), made(comm, 400)


@pytest.mark.quick(hosts=[(0, 1), (0, 0, 1, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 0, 1, 1)], ids=str)
def test_both_carry_pieces(hosts):
    """As many each; a call of one piece is always the first one's."""
    n = len(hosts)
    with world(n, hosts=hosts) as w:
        for long, short in w.run(each_size):
            (first, second), x = long
            assert first == second >= 2
            assert (x == sum(range(n))).all()
            (first, second), x = short
            assert (first, second) == (1, 0)
            assert (x == sum(range(n))).all()


def stuck(comm, number):
    """Rank 1 does not send the piece of this number until the others have failed."""
    me = DeviceRank(comm)
    me.first_call()
    comm.timeout_s = 1
    if comm.rank == 1:
        own = comm.core.device.made._pipeline
        submit = own._submit

        def late(which, piece, wire, look):
            until = time.monotonic() + BOUND_S
            while which == number and time.monotonic() < until:
                look()  # raises when it is known that the others have
                time.sleep(0.005)
            return submit(which, piece, wire, look)

        own._submit = late
    begun = time.monotonic()
    x = to_device(np.ones(LONG // 4, np.float32))
    error, _ = me.outcome(lambda: comm.all_reduce(x, stream=me.stream))
    return error, time.monotonic() - begun, x.numpy()


@pytest.mark.quick(hosts=[(0, 1, 2), (0, 0, 1, 1)], number=[1])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 0, 1, 1)], ids=str)
def test_rank_that_is_stuck_in_a_piece_is_named(hosts, number):
    """In one of the first communicator (0, 2), or of the second (1, 3)."""
    with world(len(hosts), hosts=hosts) as w:
        ranks = w.run(stuck, number)
    for error, took, x in ranks:
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1,), error
        assert took < BOUND_S
        assert np.isnan(x).all()


def different(comm, met):
    me = DeviceRank(comm)
    for op in ("sum", "max"):
        me.first_call(op=op)
    met.wait(60)
    x = to_device(np.ones(LONG // 4, np.float32))
    op = "max" if comm.rank == comm.world_size - 1 else "sum"
    return me.outcome(lambda: comm.all_reduce(x, op=op, stream=me.stream))[0]


@pytest.mark.quick(hosts=[(0, 1, 2)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, 1)], ids=str)
def test_different_calls_in_many_pieces_are_named(hosts):
    """Whichever communicator finds it out first, and whoever aborts the other then."""
    n = len(hosts)
    with world(n, hosts=hosts, timeout_s=20) as w:
        errors = w.run(different, threading.Barrier(n))
    for error in errors:
        assert isinstance(error, CollectiveMismatch), error
        assert "max" in error.calls[n - 1]


def apart(comm):
    """Only the second communicator knows that calls differ; the first was aborted."""
    DeviceRank(comm).first_call()
    levels = comm.core.device.made.levels
    first, second = levels._all
    x = np.ones(5 + comm.rank)
    with pytest.raises(CollectiveMismatch):
        call_of(second, x)
    first.native.abort_unreachable(0, False)
    with pytest.raises(PeerLost) as caught:
        call_of(first, x)
    return type(levels.explained(comm.core, caught.value)), type(levels.error())


def call_of(core, x):
    how = CallOptions(label="a piece")
    core.run(all_reduce(core.position, x, None), Reduction("sum"), how)


def test_what_one_has_found_out_comes_before_the_abort_of_the_other():
    with world(2, hosts=(0, 1)) as w:
        for kinds in w.run(apart):
            assert kinds == (CollectiveMismatch, CollectiveMismatch)
