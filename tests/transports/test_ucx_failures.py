"""Ranks whose data goes by UCX, killed or stopped at work: the others name them."""

import os
import signal
import time

import numpy as np
import pytest
from ucx_worlds import TRANSPORTS, needs_ucx, use

import unisono
from unisono import _native
from unisono.errors import PeerLost
from unisono.testing import world_across

pytestmark = needs_ucx

VICTIM = 1
LOG = "UNISONO_TEST_LOG"
"""Names a file that gets a line for each rank: how long it took to notice."""
PLACES = ["ucx.send", "ucx.receive", "stream.send", "stream.receive"]
CASES = [
    (place, hit, action, count)
    for place in PLACES
    for hit in (1, 7, 40)
    for action in ("kill", "stop")
    for count in (3, 300_000)
]
QUICK = [("ucx.send", 7, "kill", 300_000), ("ucx.receive", 7, "stop", 3)]


def work(place, hit, action, count):
    """Calls until one fails; whom the error names."""
    comm = unisono.init(timeout_s=60.0)
    x = np.ones(count, np.float32)
    pids = comm.all_gather(np.array([os.getpid()])).reshape(-1)
    assert "data by UCX" in comm.explain("all_reduce", x)
    if comm.rank == VICTIM:
        _native.arm_failpoints(f"{place}:{hit}:{action}")
    last = time.monotonic()
    try:
        while True:
            found = comm.all_reduce(np.ones(count, np.float32))
            assert (found == comm.size).all()
            last = time.monotonic()
    except PeerLost as error:
        if LOG in os.environ:
            with open(os.environ[LOG], "a") as log:
                what = f"{place}:{hit}:{action} {os.environ['UCX_TLS']}"
                log.write(f"{time.monotonic() - last:.3f} s {what}\n")
        return tuple(error.ranks)
    finally:
        if comm.rank == 0 and action == "stop":
            os.kill(int(pids[VICTIM]), signal.SIGKILL)
        comm.close()


@pytest.mark.parametrize("by", TRANSPORTS)
@pytest.mark.parametrize(
    ("place", "hit", "action", "count"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.sweep) for c in CASES],
)
def test_survivors_name_the_victim(place, hit, action, count, by, monkeypatch):
    use(monkeypatch, by)
    monkeypatch.setenv("UNISONO_FABRIC", "ucx")
    monkeypatch.setenv("UNISONO_SILENCE_S", "2")
    world = world_across([1, 1, 1], init=False, timeout_s=90.0)
    with world.start(work, place, hit, action, count) as running:
        ends = running.wait()
    assert ends[VICTIM].error is not None or ends[VICTIM].result is None
    for end in (ends[0], ends[2]):
        assert end.error is None, end.stderr
        assert end.result == (VICTIM,)
