"""Signals wait while a process is started."""

import os
import signal

import pytest

from unisono.launch.deferred_signals import deferred_signals


@pytest.fixture
def handled():
    """The signals that were handled; SIGHUP raises as well."""
    seen = []

    def note(number, frame):
        seen.append(number)

    def fail(number, frame):
        seen.append(number)
        raise RuntimeError("hung up")

    handlers = {signal.SIGTERM: note, signal.SIGHUP: fail}
    before = {number: signal.signal(number, new) for number, new in handlers.items()}
    yield seen
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    for number, old in before.items():
        signal.signal(number, old)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def test_signals_are_handled_at_the_end(handled):
    with deferred_signals():
        send(signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGTERM]
    send(signal.SIGTERM)
    assert handled == [signal.SIGTERM] * 2


def test_all_are_handled_though_one_raises(handled):
    with pytest.raises(RuntimeError, match="hung up"), deferred_signals():
        send(signal.SIGHUP, signal.SIGTERM)
    assert handled == [signal.SIGHUP, signal.SIGTERM]


def test_second_signal_of_a_kind_is_not_deferred(handled):
    def twice():
        with deferred_signals():
            send(signal.SIGHUP)
            assert handled == []
            send(signal.SIGHUP)
            pytest.fail("the second one was deferred as well")

    with pytest.raises(RuntimeError, match="hung up"):
        twice()
    assert handled == [signal.SIGHUP] * 2


def test_within_another_nothing_is_deferred_twice(handled):
    with deferred_signals():
        with deferred_signals():
            send(signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGTERM]
