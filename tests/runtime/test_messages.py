"""send and recv: tags, sources, sizes, and what does not fit."""

import threading
import time

import numpy as np
import pytest

from processes import on_processes
from unisono.errors import BadArgument, CollectiveTimeout, PeerLost, UnisonoError
from unisono.testing import world

LARGE = 300_000  # elements: more than any ring of a channel has room for


def exchange(comm):
    """All kinds of messages between neighbours; on threads and on processes."""
    n, rank = comm.world_size, comm.rank
    to, source = (rank + 1) % n, (rank - 1) % n
    for count in (0, 1, 7, 5000):
        comm.send(np.full(count, rank, np.int64), to)
        found = comm.recv(np.empty(count, np.int64), source)
        assert (found == source).all()
    large = comm.send(np.full(LARGE, rank, np.float64), to, async_op=True)
    found = comm.recv(np.empty(LARGE), source)
    assert (found == source).all()
    assert large.wait() is None
    out_of_order(comm, to, source)
    interleaved(comm, to, source)


def out_of_order(comm, to, source):
    """A message waits for its tag; those of one tag stay in order."""
    for tag in (3, 1, 2, 1):
        comm.send(np.array([tag * 10 + comm.rank]), to, tag=tag)
    large = comm.send(np.full(LARGE, 5, np.int32), to, tag=9, async_op=True)
    small = comm.send(np.zeros(2), to, tag=-4, async_op=True)  # after the large one
    assert (comm.recv(np.ones(2), source, tag=-4) == 0).all()
    taken = [comm.recv(np.empty(1, int), source, tag=t)[0] for t in (1, 2, 3)]
    assert taken == [t * 10 + source for t in (1, 2, 3)]
    assert (comm.recv(np.empty(LARGE, np.int32), source, tag=9) == 5).all()
    assert comm.recv(np.empty(1, int), source, tag=1)[0] == 10 + source
    large.wait()
    small.wait()


def interleaved(comm, to, source):
    """Many in flight, received in another order than sent, between collectives."""
    sent = [
        comm.send(np.full(1000 * t, t, np.int16), to, tag=t, async_op=True)
        for t in range(30)
    ]
    assert comm.all_reduce(np.ones(1))[0] == comm.world_size
    order = list(reversed(range(30)))
    taken = [
        comm.recv(np.empty(1000 * t, np.int16), source, tag=t, async_op=True)
        for t in order
    ]
    for tag, work in zip(order, taken, strict=True):
        assert (work.wait(100) == tag).all()
        assert work.source == source
    for work in sent:
        work.wait(100)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_messages_between_threads(worlds, n):
    if n > 1:
        worlds(n).run(exchange)
    worlds(n).run(to_self)


def test_messages_between_processes():
    on_processes(both, 3)


def both(comm):
    exchange(comm)
    to_self(comm)


def to_self(comm):
    me = comm.rank
    comm.send(np.arange(3), me, tag=1)
    comm.send(np.arange(4), me, tag=2)
    assert comm.recv(np.empty(4, int), me, tag=2).tolist() == [0, 1, 2, 3]
    assert comm.recv(np.empty(3, int), me, tag=1).tolist() == [0, 1, 2]
    work = comm.recv(np.empty(LARGE), me, async_op=True)
    comm.send(np.ones(LARGE), me)
    assert work.wait(100).sum() == LARGE


def test_send_and_recv_in_any_order(worlds):
    def asked(comm):
        if comm.rank:
            comm.send(np.array([comm.rank]), 0, tag=7)
            return None
        sources = []
        for _ in range(comm.world_size - 1):
            work = comm.recv(np.empty(1, int), tag=7, async_op=True)
            assert work.wait(100)[0] == work.source
            sources.append(work.source)
        return sorted(sources)

    assert worlds(4).run(asked)[0] == [1, 2, 3]


def test_strided_arrays_are_sent_and_received(worlds):
    def passed(comm):
        if comm.rank == 0:
            comm.send(np.arange(20).reshape(4, 5)[:, ::2], 1)
            return None
        out = np.zeros((4, 6), int)
        comm.recv(out[:, ::2], 0)
        return out

    out = worlds(2).run(passed)[1]
    assert (out[:, ::2] == np.arange(20).reshape(4, 5)[:, ::2]).all()
    assert (out[:, 1::2] == 0).all()


@pytest.mark.parametrize(
    "wrong",
    [np.empty(3), np.empty(5), np.empty(4, np.int64), np.empty(8, np.float32)],
    ids=["too short", "too long", "another type", "the same bytes"],
)
@pytest.mark.parametrize("early", [True, False])
def test_message_that_does_not_fit_can_be_received_later(worlds, wrong, early):
    def passed(comm):
        if comm.rank == 0:
            if early:
                time.sleep(0.02)
            comm.send(np.arange(4.0), 1)
            comm.barrier()
            return None
        if not early:
            time.sleep(0.02)
        with pytest.raises(BadArgument, match="32 bytes or another element type"):
            comm.recv(wrong, 0)
        found = comm.recv(np.empty(4), 0)
        comm.barrier()
        return found.tolist()

    assert worlds(2).run(passed)[1] == [0, 1, 2, 3]


def test_recv_timeout_breaks_nothing(worlds):
    def waited(comm):
        if comm.rank == 1:
            with pytest.raises(CollectiveTimeout, match=r"within 0\.05 s") as caught:
                comm.recv(np.empty(1), 0, timeout_s=0.05)
            assert caught.value.ranks == (0,)
            assert caught.value.collective == "recv"
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.array([5.0]), 1)
            return 5.0
        return comm.recv(np.empty(1), 0)[0]

    assert worlds(2).run(waited) == [5.0, 5.0]


def test_aborted_large_message_breaks_nothing():
    """It was half sent: the rest must not be made of the next message."""

    def given_up(comm):
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                comm.send(np.full(LARGE, 1.0), 1, timeout_s=0.1)
        comm.barrier()
        out = np.full(LARGE, 2.0)
        try:
            if comm.rank == 0:
                comm.send(out, 1, timeout_s=1.0)
            else:
                comm.recv(out, 0, timeout_s=1.0)
        except UnisonoError:
            return True  # right or raised
        return bool((out == out[0]).all())

    with world(2, timeout_s=30) as w:
        assert w.run(given_up) == [True, True]


def test_threads_of_one_rank_send_and_receive_at_once(worlds):
    def passed(comm):
        found = {}

        def talk(tag):
            for turn in range(20):
                comm.send(np.array([turn, comm.rank]), 1 - comm.rank, tag=tag)
                got = comm.recv(np.empty(2, int), 1 - comm.rank, tag=tag)
                assert got.tolist() == [turn, 1 - comm.rank]
            found[tag] = True

        threads = [threading.Thread(target=talk, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(found)

    assert worlds(2).run(passed) == [4, 4]


def lost(comm):
    if comm.rank == 0:
        comm.send(np.array([1.0]), 1)
        comm.close()
        return None
    time.sleep(0.1)
    # What was sent before arrives, though its sender is gone.
    assert comm.recv(np.empty(1), 0, timeout_s=30)[0] == 1.0
    with pytest.raises(PeerLost, match="rank 0") as caught:
        comm.recv(np.empty(1), 0, timeout_s=30)
    return caught.value.ranks


def test_lost_peer_is_named_after_its_messages_are_received():
    with world(2) as w:
        assert w.run(lost)[1] == (0,)
    assert on_processes(lost, 2)[1] == (0,)


def segments():
    """How many pieces of shared memory this process has mapped."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:unisono" in line for line in lines)


def comes_and_goes(comm):
    for turn in range(31):
        if turn == 1:
            before = segments()
        part = comm.duplicate()
        part.send(np.ones(3), (comm.rank + 1) % comm.world_size)
        part.recv(np.ones(3), (comm.rank - 1) % comm.world_size)
        part.barrier()
        part.close()
    comm.barrier()
    return segments() - before


def test_communicators_that_have_sent_leave_nothing_behind():
    assert max(on_processes(comes_and_goes, 2)) < 10
