"""How long a host sleeps before it looks at a device again, by a clock of our own."""

import pytest

from unisono.errors import CollectiveTimeout
from unisono.runtime.device import pipeline, work


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now, self.looks = 0.0, 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def reaches(self, moment):
        """A look at a device that is done at this time."""

        def look():
            self.looks += 1
            return self.now >= moment

        return look


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(work, "time", made)
    monkeypatch.setattr(pipeline, "time", made)
    return made


class Event:
    def __init__(self, query):
        self.query = query


def on_device(moment, clock):
    work.await_device(clock.reaches(moment), None, "a call")


def on_event(moment, clock):
    pipeline.await_event(Event(clock.reaches(moment)), lambda: None)


@pytest.mark.cases(14)
@pytest.mark.parametrize("waits", [on_device, on_event])
@pytest.mark.parametrize("moment", [0.0, 1e-5, 1e-4, 1.3e-3, 6e-3, 0.1, 2.0])
def test_little_of_a_wait_is_lost_at_its_end(clock, waits, moment):
    waits(moment, clock)
    lost = clock.now - moment
    assert 0 <= lost <= max(moment / 16, 2e-5) + 1e-12
    assert lost <= 1e-3 + 1e-12
    assert clock.looks <= 300 + moment / 1e-3


def test_timeout_is_not_passed_by_much(clock):
    with pytest.raises(CollectiveTimeout, match=r"not done after 0\.5 s"):
        work.await_device(lambda: False, 0.5, "a call")
    assert 0.5 < clock.now <= 0.502


def test_who_waits_for_an_event_asks_whether_to_go_on(clock):
    def look():
        if clock.now > 0.01:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pipeline.await_event(Event(lambda: False), look)
    assert clock.now < 0.012
