"""Calls in which something happens to the caller: a signal, another thread, a forgotten
plan. What comes out is what was raised or the right result, and nothing hangs."""

import ctypes
import gc
import os
import signal
import sys
import threading

import numpy as np
import pytest

import unisono
from forked import await_that, interrupt_in_call

COUNT = 64
M_PERTURB = -6


class Asked(Exception):
    """What a handler raises."""


def failed_before_handler_raises(rank, call):
    """The handler runs in the call; by when it raises, the call has failed."""
    comm = rank.init()
    x = np.ones(COUNT, np.float32)
    for _ in range(3):
        comm.all_reduce(x)
    if rank.number == 1:
        rank.until("raised", 0)
        return None

    def handler(*_):
        comm.core.native.abort_unreachable(1, True)
        raise Asked

    signal.signal(signal.SIGUSR1, handler)
    interrupt_in_call(comm, signal.SIGUSR1)
    try:
        CALLS[call](comm, x)
    except BaseException as error:
        return type(error).__name__
    finally:
        rank.tell("raised")


CALLS = {
    "made before": lambda comm, x: comm.all_reduce(x),
    "new": lambda comm, x: comm.all_reduce(x, timeout_s=50.0),
    "in flight": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
    "message": lambda comm, x: comm.recv(x, 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_handler_raises_after_the_call_has_failed(forks, call):
    first, _ = forks.run(2, failed_before_handler_raises, call)
    assert first.value == "Asked", first


def interrupted_behind_another_thread(rank):
    """The main thread waits behind another's call, and both end by one Ctrl-C."""
    comm = rank.init()
    comm.barrier()
    if rank.number == 1:
        rank.until("interrupted", 0)
        return None
    ended = []

    def call():
        try:
            comm.all_reduce(np.ones(COUNT, np.float32))
        except unisono.UnisonoError as error:
            ended.append(type(error).__name__)

    other = threading.Thread(target=call)
    other.start()
    await_that(lambda: not all(r["retired"] for r in comm.records()), "the first call")

    def strike():
        await_that(lambda: unfinished(comm) == 2, "the second call")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike).start()
    try:
        comm.all_reduce(np.ones(COUNT, np.float32))
    except KeyboardInterrupt:
        ended.append("KeyboardInterrupt")
    other.join()
    rank.tell("interrupted")
    return sorted(ended)


def unfinished(comm):
    return sum(not r["retired"] for r in comm.records())


def test_interrupt_ends_a_wait_for_the_call_of_another_thread(forks):
    first, _ = forks.run(2, interrupted_behind_another_thread)
    assert len(first.value) == 2, first
    assert "KeyboardInterrupt" in first.value, first


def plan_forgotten_in_call(rank):
    """While a call waits, another thread forgets its plan in all places."""
    ctypes.CDLL(None).mallopt(M_PERTURB, 165)  # what is freed is overwritten
    comm = rank.init()

    def call(count=COUNT):
        x = np.full(count, comm.rank + 1, np.float32)
        comm.all_reduce(x)
        return x

    for _ in range(3):
        call()
    call(COUNT + 1)
    another = list(comm.core.plans.values())[-1]
    comm.barrier()
    if rank.number == 1:
        rank.until("forgotten", 0)
        return float(call().min())

    def forget():
        await_that(lambda: unfinished(comm) == 1, "a call")
        many = np.ones(4000, np.float32)
        for count in range(COUNT + 1, many.size):  # every slot of the quick path
            comm.core.native.remember(6, many[:count], None, "sum", 0, another)
        comm.core.plans.clear()
        gc.collect()
        rank.tell("forgotten")

    threading.Thread(target=forget).start()
    return float(call().min())


def test_plan_is_owned_by_the_call_that_runs_it(forks):
    for end in forks.run(2, plan_forgotten_in_call):
        assert end.value == 3.0, end


def test_engine_holds_no_python_object_of_a_plan(worlds):
    """Its threads could not release one without the interpreter lock."""
    world = worlds(2)
    world.run(lambda comm: comm.all_reduce(np.ones(COUNT, np.float32)))
    comm = world.comms[0]
    plans = list(comm.core.plans.values())
    before = [sys.getrefcount(plan) for plan in plans]
    works = [comm.all_reduce(np.ones(COUNT, np.float32), async_op=True)]
    assert [sys.getrefcount(plan) for plan in plans] == before
    works.append(world.comms[1].all_reduce(np.ones(COUNT, np.float32), async_op=True))
    for work in works:
        work.wait()
