"""A rank that closes or drops its communicator has left it: what becomes of its process
later is not a death for the others, in whatever order they learn of both.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest

from forked import attempt, await_that
from unisono.errors import PeerLost
from unisono.testing import world

pytestmark = pytest.mark.timeout(240)


def has_left(comm, rank):
    return comm.core.native.states()[rank][4]


def lets_go(rank):
    """No rank closes or keeps the communicator until the process ends."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 0:
        return True
    return attempt(comm.barrier)


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)], ids=str)
def test_dropped_communicator_counts_as_left_not_dead(hosts, forks):
    ends = forks.run(sum(hosts), lets_go, hosts=hosts)
    assert ends[0].value is True
    for end in ends[1:]:
        assert end.value["error"] == "PeerLost", end
        assert end.value["attributes"]["ranks"] == [0]
        assert "died" not in end.value["message"], end


def ends_while_a_thread_closes(rank):
    """Whether rank 0 is dead for the other, when their connection has ended."""
    comm = rank.init(timeout_s=100)
    session = comm.core.session
    comm.barrier()
    if rank.number == 1:
        attempt(comm.barrier)
        await_that(lambda: session.engine.silence()[0] == -1, "the end")
        return session.engine.dead(0)
    closing, leave_all = threading.Event(), session.streams.leave_all

    def hold():
        closing.set()
        time.sleep(0.5)  # the process would end meanwhile, if it did not wait
        leave_all()

    session.streams.leave_all = hold
    del comm
    return closing.wait(100)


@pytest.mark.sweep
def test_process_that_ends_waits_for_the_thread_that_closes(forks):
    ends = forks.run(2, ends_while_a_thread_closes, hosts=(1, 1))
    assert [end.value for end in ends] == [True, False]


@pytest.mark.parametrize("call", ["barrier", "recv"])
def test_rank_that_died_after_it_had_closed_has_left(call):
    with world(2, hosts=(0, 1)) as made:
        one, other = made.comms
        one.core.native.close()  # the connection over which it says so stays open
        await_that(lambda: has_left(other, 0))
        other.core.session.engine.mark_dead(0)
        calls = {"barrier": other.barrier, "recv": lambda: other.recv(np.ones(1), 0)}
        with pytest.raises(PeerLost, match=r"rank 0 .* closed its communicator"):
            calls[call]()


def test_rank_that_died_after_it_had_closed_keeps_no_others_apart():
    with world(3, hosts=(0, 1, 2)) as made:
        gone, sender, receiver = made.comms
        gone.core.native.close()
        await_that(lambda: has_left(sender, 0) and has_left(receiver, 0))
        sender.core.session.engine.mark_dead(0)
        streams, reasons = sender.core.session.streams, []
        open_stream = streams._open

        def ask_and_open(to, label, timeout_s, lost):
            reasons.append(lost())
            return open_stream(to, label, timeout_s, lost)

        streams._open = ask_and_open
        sender.send(np.ones(1), 2)
        assert receiver.recv(np.zeros(1), 1).tolist() == [1.0]
        assert reasons == [""]


def dies_after_it_has_closed(rank):
    """The other rank's error, when it first connects after that."""
    comm = rank.init(timeout_s=100)
    part = comm.split(0)
    if rank.number == 0:
        part.close()
        rank.until("known", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    await_that(lambda: has_left(part, 0), "the notice")
    rank.tell("known")
    await_that(lambda: comm.core.session.engine.dead(0), "the death")
    return attempt(part.send, np.ones(1), 0)


def test_connecting_to_a_rank_that_died_after_it_had_closed(forks):
    end = forks.run(2, dies_after_it_has_closed, hosts=(1, 1))[1]
    assert end.value["error"] == "PeerLost", end
    assert "closed its communicator" in end.value["message"], end
