"""Calls of several threads of a rank on one communicator, and the errors they cause."""

import threading
import time

import numpy as np
import pytest

from unisono.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from unisono.runtime.observe.recorder import records
from unisono.runtime.observe.threads import name_threads
from unisono.testing import world

ADVICE = "give each thread a communicator of its own, made by comm.duplicate()"
MANY = "Several threads of rank"


def caught(call):
    """The text of the error that a call raises."""
    with pytest.raises((CollectiveMismatch, PeerLost)) as error:
        call()
    return str(error.value)


def in_thread(comm, name, call, nth=1):
    """Start a call on a thread; return when it is this rank's nth. Keeps its error."""
    found = []
    thread = threading.Thread(target=lambda: found.append(caught(call)), name=name)
    thread.start()
    while len(records(comm.core.session.logbook)) < nth:
        time.sleep(1e-3)
    return thread, found


def calls_of_two_threads(comm, ready):
    """Rank 0 makes two calls from two threads, rank 1 those of the second alone."""
    if comm.rank:
        assert ready.wait(100)
        return [caught(lambda: comm.all_gather(np.ones(3)))]
    threading.current_thread().name = "trainer"
    thread, found = in_thread(comm, "loader", lambda: comm.all_reduce(np.ones(3)))
    ready.set()
    mine = caught(lambda: comm.all_gather(np.ones(3)))
    thread.join()
    return [mine, *found]


def test_mismatch_of_two_threads_names_them():
    ready = threading.Event()
    with world(2) as w:
        both, (other,) = w.run(lambda comm: calls_of_two_threads(comm, ready))
    for text in both:
        assert "call 1 differs between ranks" in text
        assert f"{MANY} 0 made calls at the same time (loader, trainer)" in text
        assert text.endswith(ADVICE)
    assert MANY not in other  # that rank has one


def test_timeout_of_two_threads_names_them():
    over = threading.Event()

    def late(comm):
        if comm.rank:
            assert over.wait(100)
            comm.close()
            return None
        calls = [("loader", comm.all_reduce), ("trainer", comm.all_gather)]
        started = [
            in_thread(comm, name, lambda call=call: call(np.ones(3)), nth)
            for nth, (name, call) in enumerate(calls, start=1)
        ]
        error = CollectiveTimeout("late", ranks=[1])
        name_threads(comm.core, error, refused=False)
        over.set()
        for thread, _ in started:
            thread.join()
        return str(error)

    with world(2) as w:
        text, _ = w.run(late)
    assert text.startswith("late. Several threads of rank 0")
    assert "(loader, trainer)" in text


def test_calls_in_flight_count_for_the_threads_that_started_them():
    ready = threading.Event()

    def begun(comm):
        if comm.rank:
            assert ready.wait(100)
            return caught(lambda: comm.all_gather(np.ones(3)))
        started = threading.Event()

        def start():
            work = comm.all_reduce(np.ones(3), async_op=True)
            started.set()
            caught(work.wait)

        hook = threading.Thread(target=start, name="hook")
        hook.start()
        assert started.wait(100)
        call = lambda: comm.all_gather(np.ones(3))  # noqa: E731
        thread, found = in_thread(comm, "trainer", call, nth=2)
        ready.set()
        thread.join()
        hook.join()
        return found[0]

    with world(2) as w:
        first, other = w.run(begun)
    assert f"{MANY} 0" in first
    assert "(hook, trainer)" in first
    assert MANY not in other


def test_one_thread_or_messages_beside_it_are_not_named():
    def alone(comm):
        into = np.empty(3)
        waiting = comm.recv(into, tag=7, async_op=True)
        thread = threading.Thread(target=lambda: comm.send(np.ones(3), 1 - comm.rank))
        thread.start()
        text = caught(lambda: comm.all_reduce(np.ones(3 + comm.rank)))
        thread.join()
        assert not waiting.done() or waiting.exception() is not None
        return text

    with world(2) as w:
        assert all(MANY not in text for text in w.run(alone))


def test_refused_call_of_another_thread_is_not_a_cause():
    def refused(comm):
        caught(lambda: comm.all_reduce(np.ones(3 + comm.rank)))
        found = []
        call = lambda: found.append(caught(lambda: comm.all_reduce(np.ones(3))))  # noqa: E731
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0]

    with world(2) as w:
        for text in w.run(refused):
            assert "differs between ranks" in text
            assert MANY not in text
