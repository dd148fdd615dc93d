"""A rank that cannot go on with a message or a call: the others learn it at once.

None of these may wait for its timeout, which is why that is long.
"""

import os
import signal
import threading

import numpy as np
import pytest

from process_state import state_of
from unisono import _native
from unisono.errors import (
    BadArgument,
    CollectiveTimeout,
    PeerLost,
    TransportError,
    UnisonoError,
)
from unisono.testing import world

pytestmark = pytest.mark.timeout(120)
LARGE = 8 << 20  # elements: more than rings and sockets hold


@pytest.mark.parametrize("call", ["recv", "any", "broadcast"])
def test_rank_that_closes_in_the_middle_of_sending_is_noticed(call):
    """What it was sending fills the stream, so there is no room for a last word."""
    closed = threading.Event()

    def closing(comm):
        if comm.rank == 0:
            x = np.ones(LARGE)
            if call == "broadcast":
                work = comm.broadcast(x, root=0, async_op=True)
            else:
                work = comm.send(x, 1, async_op=True)
            with pytest.raises(CollectiveTimeout):
                work.wait(timeout_s=0.5)
            comm.close()
            closed.set()
            return
        assert closed.wait(60.0)
        calls = {
            "recv": lambda: comm.recv(np.empty(LARGE), 0),
            "any": lambda: comm.recv(np.empty(LARGE)),
            "broadcast": lambda: comm.broadcast(np.ones(LARGE), root=0),
        }
        with pytest.raises(UnisonoError) as caught:
            calls[call]()
        assert not isinstance(caught.value, CollectiveTimeout), caught.value
        assert "rank 0" in str(caught.value)

    with world(2, hosts=(0, 1), timeout_s=100.0) as made:
        made.run(closing)


def test_rank_that_closes_is_noticed_by_one_that_only_sends():
    """The root of a broadcast reads nothing in which the other could say it."""
    closed = threading.Event()

    def sending(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            closed.set()
            return
        assert closed.wait(60.0)
        with pytest.raises(PeerLost, match="rank 1"):
            comm.broadcast(np.ones(LARGE), root=0)

    with world(2, hosts=(0, 1), timeout_s=100.0) as made:
        made.run(sending)


@pytest.mark.parametrize("hosts", [(0, 1, 0), (0, 0, 0)])
def test_truncated_message_ends_a_receive_from_any_rank(hosts):
    """It has begun to receive that message, and can take no other."""
    gave_up, ended = threading.Event(), threading.Event()

    def receiving(comm):
        if comm.rank == 1:
            with pytest.raises(CollectiveTimeout):
                comm.send(np.ones(LARGE), 0, timeout_s=0.2)
            gave_up.set()
        elif comm.rank == 0:
            assert gave_up.wait(60.0)
            with pytest.raises(TransportError, match=r"rank 1 .* sending part"):
                comm.recv(np.empty(LARGE))
            ended.set()
        assert ended.wait(100.0)

    with world(3, hosts=hosts, timeout_s=100.0) as made:
        made.run(receiving)


def test_wrong_size_is_named_although_the_sender_has_closed():
    closed = threading.Event()

    def sending(comm):
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            comm.close()
            closed.set()
            return
        assert closed.wait(60.0)
        with pytest.raises(BadArgument, match="rank 0"):
            comm.recv(np.empty(4), 0)

    with world(2, hosts=(0, 1), timeout_s=100.0) as made:
        made.run(sending)


def stopped_while_it_sends(rank):
    """Rank 0 stops in the middle of a message until rank 1 has given it up."""
    comm = rank.init(timeout_s=100)
    if rank.number == 0:
        _native.arm_failpoints("send.part:2:stop")  # what is left has no room anywhere
        comm.send(np.ones(LARGE), 1)
        comm.send(np.arange(3.0), 1)
        rank.tell("has sent both")
        rank.until("has received", 1)
        return None
    pid, gave_up = comm.peers[0].pid, 0
    while state_of(pid) != "T":  # before it is, this rank may find nothing to receive
        with pytest.raises(CollectiveTimeout):
            comm.recv(np.empty(LARGE), 0, timeout_s=0.2)
        gave_up += 1
    os.kill(pid, signal.SIGCONT)
    rank.until("has sent both", 0)
    received = comm.recv(np.empty(3), 0).tolist()
    rank.tell("has received")
    return received


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=["one host", "two hosts"])
def test_rest_of_a_message_is_read_when_its_receive_has_ended(hosts, forks):
    """Its sender need not wait until this rank receives something else."""
    first, second = forks.run(2, stopped_while_it_sends, hosts=hosts)
    assert first.status == 0, first
    assert second.value == [0, 1, 2], second
