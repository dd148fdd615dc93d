"""The wait for a segment of another rank."""

from types import SimpleNamespace

import pytest

from unisono.errors import ConnectFailed
from unisono.transports import session
from unisono.transports.session import Session


@pytest.mark.parametrize("timeout_s", [0.001, 0.5, 7.0])
def test_wait_does_not_sleep_beyond_its_deadline(monkeypatch, timeout_s):
    now = [100.0]

    def sleep(seconds):
        assert seconds >= 0
        now[0] += max(seconds, 1e-9)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(session, "time", clock)
    engine = SimpleNamespace(
        has=lambda *_: False, dead=lambda _: False, out_of_resources=lambda: False
    )
    waits = SimpleNamespace(engine=engine, peers={1: "rank 1"})
    with pytest.raises(ConnectFailed, match="did not arrive"):
        Session.await_segment(waits, 1, 0, timeout_s)
    assert now[0] == pytest.approx(100 + timeout_s, abs=1e-6)
