"""A rank that closes with calls in its queue: those before them are not touched.

The calls are reductions to rank 0, in which rank 1 is done when rank 0 still waits for
rank 2.
"""

import os
import signal
import time

import numpy as np
import pytest

from forked import attempt, await_that, until_broken
from unisono import _native

pytestmark = pytest.mark.timeout(120)

CLOSER, AWAITED = 1, 2


def reduce_to_0(comm, x, **how):
    return comm.reduce(x, root=0, algorithm="tree", **how)


def close_with_a_call_queued(comm, x):
    """Make the call that the others make, and one that none of them makes."""
    done = reduce_to_0(comm, x, async_op=True)
    left = comm.all_reduce(x, async_op=True)
    done.wait()
    comm.close()
    return attempt(left.wait)["error"]


def let_waiters_look():
    """Those who wait look every few milliseconds whether they must fail."""
    time.sleep(0.3)


def one_closes_while_another_is_stopped(rank, ending):
    comm = rank.init(timeout_s=100)
    x = np.full(1000, rank.number + 1.0)
    reduce_to_0(comm, np.ones(1000))
    pid = comm.peers[AWAITED].pid
    if rank.number == CLOSER:
        error = close_with_a_call_queued(comm, x)
        let_waiters_look()
        os.kill(pid, ending)
        return error
    if rank.number == AWAITED:
        _native.arm_failpoints("arrive.seen:1:stop")
    error = attempt(reduce_to_0, comm, x)
    right = rank.number != 0 or bool((x == 1 + 2 + 3 + 4).all())
    return error or [right, attempt(comm.all_reduce, x)]


def assert_closed(value):
    assert isinstance(value, list), value
    right, error = value
    assert right
    assert error["error"] == "PeerLost", error
    assert error["attributes"]["ranks"] == [CLOSER]
    assert "closed its communicator" in error["message"]


def test_call_that_the_closing_rank_has_completed_returns(forks):
    ends = forks.run(4, one_closes_while_another_is_stopped, signal.SIGCONT)
    assert ends[CLOSER].value == "PeerLost", ends
    for end in (ends[0], ends[2], ends[3]):
        assert_closed(end.value)


def test_death_in_that_call_is_named(forks):
    ends = forks.run(4, one_closes_while_another_is_stopped, signal.SIGKILL)
    error = ends[0].value
    assert error["error"] == "PeerLost", ends
    assert error["attributes"]["ranks"] == [AWAITED]


def one_closes_before_another_calls(rank):
    comm = rank.init(timeout_s=100)
    x = np.full(1000, rank.number + 1.0)
    reduce_to_0(comm, np.ones(1000))
    if rank.number == CLOSER:
        return close_with_a_call_queued(comm, x)
    if rank.number == AWAITED:
        until_broken(comm)
        let_waiters_look()
    error = attempt(reduce_to_0, comm, x)
    right = rank.number != 0 or bool((x == 1 + 2 + 3 + 4).all())
    await_that(lambda: comm.core.native.states()[CLOSER][4], "the notice")
    return error or [right, attempt(comm.all_reduce, x)]


def test_call_between_hosts_that_begins_after_the_notice_returns(forks):
    ends = forks.run(4, one_closes_before_another_calls, hosts=(1, 1, 1, 1))
    assert ends[CLOSER].value == "PeerLost", ends
    for end in (ends[0], ends[2], ends[3]):
        assert_closed(end.value)
