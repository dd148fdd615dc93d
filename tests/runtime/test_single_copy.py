"""Ordinary buffers of other processes, reached through the kernel if it allows it."""

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import unisono
from conformance import check, every_algorithm, perform
from forked import await_that, interrupt_in_call
from process_state import state_of
from processes import on_processes
from unisono import _native
from unisono.errors import CollectiveTimeout
from unisono.runtime.plan.plans import SINGLE_COPY_FROM

pytestmark = pytest.mark.one_in(4)

UNTRIED, REACHES, DENIED = range(3)
PR_SET_DUMPABLE = 4


def large(n):
    """As many float32 as it takes, and some more that divide by nothing."""
    return 2 * SINGLE_COPY_FROM * n * (n - 1) // 4 + 7


def warm(comm):
    """The first large call tries whether ranks can reach each other."""
    for _ in range(2):
        comm.all_reduce(np.ones(large(comm.world_size), np.float32))


def reaching(comm, cases):
    warm(comm)
    return perform(comm, cases), comm.core.native.cross_memory_access()


@pytest.mark.sweep
@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_single_copy_is_correct_for_every_algorithm(n):
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


def test_explain_shows_single_copy():
    before, after = on_processes(explained, 2)[0]
    assert "staged until the ranks have tried" in before
    assert "copied once" in after or "does not let" in after


def without(comm):
    warm(comm)
    x = np.full(large(2), comm.rank + 1, np.float32)
    comm.all_reduce(x)
    return float(x.min()), float(x.max()), comm.core.native.cross_memory_access()


def test_single_copy_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("UNISONO_SINGLE_COPY", "0")
    assert unisono.spawn(without, 2) == [(3.0, 3.0, UNTRIED)] * 2


def shut_off(rank):
    comm = rank.init()
    if rank.number == 1:
        if os.getuid() == 0:
            os.setuid(65534)  # root may access all processes, others not root's
        else:
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    comm.barrier()
    return without(comm)


def test_ranks_without_memory_access_use_windows(forks):
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


def is_stopped_in_write(comm):
    """Whether rank 1 has announced its write and was then stopped.

    The announcement alone is not enough: a rank that finds the call failed right after
    it does not write, and is not stopped.
    """
    return comm.core.native.has_writers() and state_of(comm.peers[1].pid) == "T"


def await_write(comm):
    """Wait until rank 1 stands still in its write into our buffer."""
    await_that(lambda: is_stopped_in_write(comm), "a rank stopped in its write")


def give_up_while_touched(comm, then):
    """Make rank 0 time out while rank 1 writes."""
    await_write(comm)
    comm.core.native.abort_unreachable(1, True)
    then(comm)


def goes_on(comm):
    """Let rank 1 continue, usually while rank 0 waits for it to stop writing."""
    time.sleep(0.2)
    os.kill(comm.peers[1].pid, signal.SIGCONT)


def test_buffer_is_not_written_after_its_call_has_failed(forks):
    first, second = forks.run(2, given_up)
    assert first.value == [7.0, 7.0], first
    assert second.status == 0, second


def stopped_in_write(rank, ending):
    """Rank 1 is stopped during the write, and continues when rank 0 has released x.

    Whether rank 0's array lives on, and what it holds after rank 1 has written.
    """
    comm = rank.init()
    warm(comm)
    if rank.number == 1:
        _native.arm_failpoints("reach.write:1:stop")
        with pytest.raises(unisono.UnisonoError):
            comm.all_reduce(np.ones(large(2), np.float32))
        return rank.tell("done")
    lives = ENDINGS[ending](comm)
    gc.collect()
    os.kill(comm.peers[1].pid, signal.SIGCONT)
    rank.until("done", 1)
    return lives() is not None


def by_timeout(comm):
    threading.Thread(target=give_up_while_touched, args=(comm, repr)).start()
    x = np.ones(large(2), np.float32)
    with pytest.raises(CollectiveTimeout):
        comm.all_reduce(x)
    return weakref.ref(x)


def by_signal(comm, **how):
    def strike():
        await_write(comm)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike).start()
    x = np.ones(large(2), np.float32)
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(x, **how)
    return weakref.ref(x)


def by_signal_anew(comm):
    """Not a call that was made before: it comes another way into the engine."""
    return by_signal(comm, timeout_s=50.0)


def by_close(comm):
    x = np.ones(large(2), np.float32)
    comm.all_reduce(x, async_op=True)
    await_write(comm)
    comm.close()
    return weakref.ref(x)


def by_later_call(comm):
    """The Work of the failed call is dropped; the next call forgets it."""
    x = np.ones(large(2), np.float32)
    work = comm.all_reduce(x, async_op=True)
    await_write(comm)
    comm.core.native.abort_unreachable(1, True)
    work.rest()
    comm.core.in_flight.add(work.native, None)  # as the next call does
    return weakref.ref(x)


ENDINGS = {
    way.__name__: way
    for way in (by_timeout, by_signal, by_signal_anew, by_close, by_later_call)
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_buffer_that_may_still_be_written_is_kept(forks, ending):
    first, second = forks.run(2, stopped_in_write, ending)
    assert first.value is True, first
    assert second.status == 0, second


def interrupted_unwritten(rank):
    """No rank was writing when rank 0 was interrupted: its array is released."""
    comm = rank.init()
    warm(comm)
    if rank.number == 1:
        rank.until("interrupted", 0)
        return None
    x = np.ones(large(2), np.float32)
    lives = weakref.ref(x)
    interrupt_in_call(comm)
    with contextlib.suppress(KeyboardInterrupt):
        comm.all_reduce(x)
    rank.tell("interrupted")
    del x
    gc.collect()
    return lives() is not None


def test_buffer_without_writers_is_released(forks):
    first, _ = forks.run(2, interrupted_unwritten)
    assert first.value is False, first
