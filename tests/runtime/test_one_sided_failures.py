"""A rank that cannot go on with a message or a call: the others learn it at once.

None of these may wait for its timeout, which is why that is long.
"""

import threading

import numpy as np
import pytest

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
