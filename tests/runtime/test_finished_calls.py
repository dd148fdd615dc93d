"""Calls that have all they need when another rank fails: they return their results.

A rank is stopped in such a call until the others have failed; then it continues.
"""

import os
import signal

import numpy as np
import pytest

from forked import attempt, await_that
from unisono import _native

pytestmark = [pytest.mark.timeout(120)]

LARGE = 100_000


def is_dead(comm, rank):
    return comm.core.native.states()[rank][5]


def stopped_at_the_end(rank, ending):
    """Rank 1 stops when it has done its part of the call; the others go on and fail."""
    comm = rank.init(timeout_s=100)
    x = comm.empty(LARGE)
    comm.all_reduce(x)
    x[:] = rank.number + 1
    if rank.number == 1:
        _native.arm_failpoints("call.end:1:stop")
    comm.all_reduce(x)
    right = bool((x == rank.n * (rank.n + 1) / 2).all())
    if rank.number == 2 and ending == "PeerLost":
        os.kill(os.getpid(), signal.SIGKILL)
    limit = 0.2 if rank.number == 0 and ending == "CollectiveTimeout" else 100
    error = attempt(comm.all_reduce, x, timeout_s=limit)
    if rank.number == 0:
        os.kill(comm.peers[1].pid, signal.SIGCONT)
    return right, error["error"]


@pytest.mark.parametrize("ending", ["CollectiveTimeout", "PeerLost"])
def test_failure_of_a_later_call_is_not_that_of_this_one(ending, forks):
    first, second, third = forks.run(3, stopped_at_the_end, ending)
    assert first.value == second.value == [True, ending], (first, second)
    assert ending == "PeerLost" or third.value == [True, ending], third


def sends_and_dies(rank):
    """Rank 1 ends when the call is done; rank 0 sleeps until it knows of that."""
    comm = rank.init(timeout_s=100)
    x = np.ones(10, np.float32)
    comm.all_reduce(x)
    x[:] = rank.number + 1
    if rank.number == 0:
        rank.tell("is about to call")
        _native.arm_failpoints("wait.yield:1:sleep=1000")
    else:
        rank.until("is about to call", 0)
        _native.arm_failpoints("call.begin:1:sleep=200")
    comm.all_reduce(x)
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_that(lambda: is_dead(comm, 1), "the news of its death")
    return bool((x == 3).all())


def test_data_of_a_rank_that_has_died_is_used(forks):
    end = forks.run(2, sends_and_dies, hosts=(1, 1))[0]
    assert end.value is True, end
