"""Calls that are begun: by other extension modules, and short ones at once."""

import threading

import numpy as np
import pytest

from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.runtime.plan.plans import CODES
from unisono.testing import world
from work_hooks import HOOK, Message, hooks, made

PENDING, SUCCEEDED, BROKEN = 0, 1, 2
MINUTE = 60 * 10**9
FLOAT = DTYPES["float32"]


def test_short_call_of_one_rank_is_done_when_it_was_begun(worlds):
    def run(comm):
        x = np.full(3, 5.0)
        for _ in range(20):
            assert comm.all_reduce(x, async_op=True).done()
        assert x.tolist() == [5] * 3
        behind = [comm.all_reduce(np.ones(100_000), async_op=True)]
        behind += [comm.all_reduce(x, async_op=True) for _ in range(5)]
        for work in behind:
            work.wait()

    worlds(1).run(run)


def test_short_message_has_left_when_it_was_begun(worlds):
    def run(comm):
        if comm.rank == 0:
            for i in range(20):
                assert comm.send(np.full(3, i), 1, async_op=True).done()
            comm.barrier()
            return
        comm.barrier()
        x = np.zeros(3, int)
        for i in range(20):  # they are there
            work = comm.recv(x, 0, async_op=True)
            assert work.done()
            assert work.source == 0
            assert x.tolist() == [i] * 3

    worlds(2).run(run)


def begun(comm, x):
    """An all_reduce in place that an extension module begins."""
    plan = comm.core.plan_of("all_reduce", FLOAT, x.size)
    at = x.ctypes.data
    return made(hooks().submit_planned(comm.core.native, plan, at, at, MINUTE))


def message(comm, x, peer, *, sends):
    name = "send" if sends else "recv"
    told = Message(
        *(sends, peer, 0, x.ctypes.data, x.nbytes),
        *(CODES[name], FLOAT.code, x.size, MINUTE),
    )
    return made(hooks().begin_message(comm.core.native, told))


def test_calls_of_extension_modules_are_in_flight_until_they_end(worlds):
    def run(comm):
        x, y = np.full((2, 3), comm.rank + 1, np.float32)
        calls, hook = comm.core.in_flight, hooks()
        if comm.rank == 0:
            work = begun(comm, x)
            receive = message(comm, y, 1, sends=False)
            assert hook.state(work) == hook.state(receive) == PENDING
            threads = [thread for _, thread in calls.unfinished()]
            assert threads == [threading.get_ident()] * 2
            assert calls.pending()
            calls.rest(1e-3)
            comm.send(np.ones(1), 1, tag=1)
        else:
            comm.recv(np.ones(1), 0, tag=1)
            work, receive = begun(comm, x), message(comm, y, 0, sends=True)
        assert hook.wait(work) == hook.wait(receive) == SUCCEEDED
        assert not hook.is_written(work)
        assert not calls.pending()
        assert calls.unfinished() == []
        return x.tolist(), y.tolist()

    assert worlds(2).run(run) == [([3] * 3, [2] * 3)] * 2


def test_messages_behind_one_that_waits_are_no_longer_in_flight(worlds):
    def run(comm):
        x, y = np.ones((2, 3), np.float32)
        if comm.rank == 0:
            waiting = message(comm, y, 1, sends=False)
            for _ in range(300):
                hooks().wait(message(comm, x, 1, sends=True))
            assert len(comm.core.in_flight.unfinished()) == 1
            comm.barrier()
            assert hooks().wait(waiting) == SUCCEEDED
            return
        for _ in range(300):
            comm.recv(x, 0)
        comm.barrier()
        comm.send(x, 0)

    worlds(2).run(run)


def test_extension_modules_leave_what_is_not_plain_to_python(worlds):
    def run(comm):
        x = np.ones(3, np.float32)
        for peer, sends in ((comm.rank, True), (2, True), (-1, True), (-2, False)):
            assert message(comm, x, peer, sends=sends) is None
        with pytest.raises(TypeError, match="expected a communicator and a plan"):
            hooks().submit_planned(comm.core.native, x, 0, 0, MINUTE)
        with pytest.raises(TypeError, match="expected a communicator"):
            hooks().begin_message(x, Message())

    worlds(2).run(run)


def test_begun_call_of_a_closed_communicator_has_failed():
    def run(comm):
        x = np.ones(3, np.float32)
        if comm.rank == 0:
            work = begun(comm, x)
            comm.close()
            assert hooks().wait(work) == BROKEN
            assert begun(comm, x) is None
            with pytest.raises(UsageError):
                comm.barrier()

    with world(2) as w:
        w.run(run)


def test_call_begun_while_another_thread_closes_has_failed():
    """As if it had been checked before, and comes after: nobody would advance it."""

    def run(comm):
        x = np.ones(3, np.float32)
        native, at = comm.core.native, x.ctypes.data
        plan = comm.core.plan_of("all_reduce", FLOAT, x.size)
        native.close()
        message = (True, 1 - comm.rank, 0, at, 1 << 20, FLOAT.code)
        told = []
        hook = HOOK(lambda _, how: told.append(how))
        for work in (
            native.submit(plan, at, at, MINUTE),
            native.transfer(*message, CODES["send"], FLOAT.code, 3, MINUTE, True),
        ):
            assert work.state() == BROKEN
            hooks().when_done(work, hook, None)
        assert told == [BROKEN] * 2

    with world(2) as w:
        w.run(run)
