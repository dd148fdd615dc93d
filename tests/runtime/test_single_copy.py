"""Ordinary buffers of other processes, reached through the kernel if it allows it."""

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
from conformance import check, every_algorithm, perform
from forked import Forks, await_that

import unisono
from unisono import _native
from unisono.errors import CollectiveTimeout
from unisono.runtime.plans import REACHES_FROM

UNTRIED, REACHES, DENIED = range(3)
PR_SET_DUMPABLE = 4


@pytest.fixture(scope="module")
def forks():
    with Forks() as made:
        yield made


def large(n):
    """As many float32 as it takes, and some more that divide by nothing."""
    return 2 * REACHES_FROM * n * (n - 1) // 4 + 7


def warm(comm):
    """The first large call tries whether ranks can reach each other."""
    for _ in range(2):
        comm.all_reduce(np.ones(large(comm.world_size), np.float32))


def reaching(comm, cases):
    warm(comm)
    return perform(comm, cases), comm._native.reach()


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_algorithm(n):
    cases = every_algorithm(n, [large(n)])
    results = unisono.spawn(reaching, n, (cases,))
    if any(reach != REACHES for _, reach in results):
        pytest.skip("the system does not let processes reach each other's memory")
    check(cases, [made for made, _ in results])


def explained(comm):
    x = np.ones(large(2), np.float32)
    before = comm.explain("all_reduce", x)
    warm(comm)
    return before, comm.explain("all_reduce", x)


def test_explain_tells():
    before, after = unisono.spawn(explained, 2)[0]
    assert "staged until the ranks have tried" in before
    assert "copied once" in after or "does not let" in after


def without(comm):
    warm(comm)
    x = np.full(large(2), comm.rank + 1, np.float32)
    comm.all_reduce(x)
    return float(x.min()), float(x.max()), comm._native.reach()


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("UNISONO_SINGLE_COPY", "0")
    assert unisono.spawn(without, 2) == [(3.0, 3.0, UNTRIED)] * 2


def shut_off(rank):
    comm = rank.init()
    if rank.number == 1:
        if os.getuid() == 0:
            os.setuid(65534)  # root may reach everybody, others not root
        else:
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    comm.barrier()
    return without(comm)


def test_ranks_that_may_not_reach_others_are_staged(forks):
    for end in forks.run(2, shut_off):
        assert end.value == [3.0, 3.0, DENIED], end


def given_up(rank):
    """Rank 1 is stopped as it brings its part; rank 0 does not wait for it."""
    comm = rank.init()
    warm(comm)
    x = np.ones(large(2), np.float32)
    if rank.number == 1:
        return brings_its_part(rank, comm, x)
    threading.Thread(target=give_up_while_touched, args=(comm, goes_on)).start()
    with pytest.raises(CollectiveTimeout):
        comm.all_reduce(x)
    x[:] = 7  # ours again
    rank.until("done", 1)
    return float(x.min()), float(x.max())


def brings_its_part(rank, comm, x):
    """And stands still while it has its hands in rank 0's buffer."""
    _native.arm_failpoints("deliver:1:stop")
    with pytest.raises(unisono.UnisonoError):
        comm.all_reduce(x)
    rank.tell("done")


def give_up_while_touched(comm, then):
    """Have rank 0 lose patience while rank 1 writes."""
    await_that(comm._native.touched, "a hand in the buffer")
    comm._native.give_up(1, True)
    then(comm)


def goes_on(comm):
    """Let rank 1 go on, most often while rank 0 waits for its hands."""
    time.sleep(0.2)
    os.kill(comm.peers[1].pid, signal.SIGCONT)


def test_a_buffer_is_not_written_after_its_call_has_failed(forks):
    first, second = forks.run(2, given_up)
    assert first.value == [7.0, 7.0], first
    assert second.status == 0, second


def stopped(rank):
    """Rank 1 stands still for longer than anybody waits for its hands."""
    comm = rank.init()
    warm(comm)
    x = np.ones(large(2), np.float32)
    if rank.number == 1:
        return brings_its_part(rank, comm, x)
    from unisono.runtime import verdicts

    threading.Thread(target=give_up_while_touched, args=(comm, repr)).start()
    with pytest.raises(CollectiveTimeout):
        comm.all_reduce(x)
    os.kill(comm.peers[1].pid, signal.SIGCONT)
    return len(verdicts._KEPT)


def test_a_buffer_that_may_still_be_written_is_kept(forks):
    first, second = forks.run(2, stopped)
    assert first.value == 1, first
    assert second.status == 0, second
