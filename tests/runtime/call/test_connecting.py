"""A rank that cannot connect to a stopped one is not taken for the one that is late."""

import os
import signal

import numpy as np
import pytest

from forked import attempt, await_that
from process_state import state_of
from unisono.runtime import core as base

pytestmark = pytest.mark.timeout(240)

STOPPED, CONNECTS = 1, 2


def connects(rank):
    """Rank 2 has no stream to rank 1, which is stopped; the others wait for rank 2."""
    base.LATE_S = 0.4  # so that it tells soon whom it waits for
    with rank.init(timeout_s=25.0) as comm:
        part = comm.split(0)
        if rank.number == STOPPED:
            rank.tell("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        (pid,) = rank.until("stops", STOPPED)
        until_stopped(pid)
        led = rank.number == CONNECTS and part.core.native.is_connected_to(
            STOPPED, False
        )
        timeout_s = 20.0 if rank.number == CONNECTS else 2.0
        error = attempt(
            part.broadcast,
            np.ones(4),
            root=CONNECTS,
            algorithm="naive",
            timeout_s=timeout_s,
        )
        rank.tell("told")
        if rank.number == 0:
            rank.until("told", CONNECTS, 3)
            os.kill(pid, signal.SIGCONT)
        return error, led


def until_stopped(pid):
    await_that(lambda: state_of(pid) == "T", "a stop")


@pytest.mark.sweep
def test_rank_that_connects_to_a_stopped_one_is_not_named(forks):
    """Neither by rank 3, which shares a host with it, nor by rank 0, which does not."""
    patient = forks.having(UNISONO_SILENCE_S="60")
    ends = patient.run(4, connects, hosts=(2, 2))
    for end in ends:
        if end.rank == STOPPED:
            continue
        error, led = end.value
        assert not led, "the stream is there: this tries nothing"
        assert error["error"] == "CollectiveTimeout", end
        assert error["attributes"]["ranks"] == [STOPPED], end
