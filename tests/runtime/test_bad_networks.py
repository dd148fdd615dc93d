"""Bad networks between hosts: the right result or a named error, never silence.

A proxy stands in the way of ranks on emulated hosts, which needs no privileges: those
who dial rank 1 dial it through one proxy, and rank 1 reaches rank 0 through another,
its lifeline included. And hosts that are network namespaces are parted by their switch.
"""

import contextlib
import os
import sys
import threading
import time

import numpy as np
import pytest

from forked import attempt
from unisono.errors import PeerLost
from unisono.runtime.world.address import free_port
from unisono.testing import Hosts, Proxy, needs_hosts, world_across

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(4)]

SILENCE_S = 2
CALM = {"UNISONO_SILENCE_S": "30", "UNISONO_TIMEOUT_S": "30"}
"""Who is to be waited for is waited for, however busy this machine is."""


def go_on(comm, flag):
    """Call all_reduce in a loop until a rank sees the flag; the number of calls."""
    n = comm.world_size
    for turn in range(1 << 30):
        x = np.full(20_000, comm.rank + turn, np.float32)
        x[0] = os.path.exists(flag)
        comm.all_reduce(x)
        wanted = n * (n - 1) / 2 + n * turn
        assert (x[1:] == wanted).all(), f"turn {turn}: a wrong sum"
        sys.stdout.write(".")
        sys.stdout.flush()
        if x[0]:
            return turn
    return None


# --- through proxies


@pytest.fixture
def forks(forks):
    return forks.having(UNISONO_SILENCE_S=str(SILENCE_S), UNISONO_TIMEOUT_S="30")


def works(rank, flag):
    """Beside the loop, since this is who is started: its error, if it raises."""
    turns = []
    with rank.init() as comm:
        error = attempt(lambda: turns.append(go_on(comm, flag)))
    return turns, error


class Scene:
    """Ranks at work on hosts of one each, with a proxy before rank 0 and rank 1."""

    def __init__(self, forks, flag, n=2, **environ):
        self.ports = [free_port(), free_port()]
        self.to_0, self.to_1 = (Proxy(f"127.0.0.1:{port}") for port in self.ports)
        self.flag = flag
        real = f"127.0.0.1:{self.ports[0]}"
        env = [environ | {"UNISONO_ADDRESS": real} for _ in range(n)]
        env[1] = environ | {
            "UNISONO_ADDRESS": self.to_0.address,
            "UNISONO_ADVERTISE": self.to_1.address,
            "UNISONO_PORT": str(self.ports[1]),
        }
        self._thread = threading.Thread(target=self._run, args=(forks, n, env))
        self._thread.start()

    def _run(self, forks, n, env):
        hosts = (1,) * n
        self.ends = forks.run(n, works, str(self.flag), hosts=hosts, env=env)

    def await_work(self, more=200_000):
        """Until so much more has passed to rank 1."""
        until = time.monotonic() + 50
        start = self.to_1.nbytes["forth"]
        while self.to_1.nbytes["forth"] < start + more:
            assert time.monotonic() < until, "nothing passes"
            time.sleep(0.01)

    def results(self):
        """What the ranks came to: turns and errors."""
        self._thread.join()
        return [end.value for end in self.ends]

    def end(self):
        """Let the ranks end well; what they came to."""
        self.flag.touch()
        return self.results()


@pytest.fixture
def scene(forks, tmp_path, request):
    made = Scene(forks, tmp_path / "flag", **getattr(request, "param", {}))
    yield made
    made.flag.touch()
    made._thread.join()
    made.to_0.close()
    made.to_1.close()


def all_well(results):
    assert all(turns and error is None for turns, error in results), results
    assert len({turns[0] for turns, _ in results}) == 1


def all_raise(results, *errors):
    for _, error in results:
        assert error, f"no error: {results}"
        assert error["error"] in errors, error
        assert "rank 0" in error["message"] or "rank 1" in error["message"]


@pytest.mark.parametrize(
    "scene", [CALM | {"n": 2}, CALM | {"n": 3}], ids=["2", "3"], indirect=True
)
def test_corrupted_byte_raises_on_all_ranks(scene):
    scene.await_work()
    scene.to_1.corrupt(direction="forth")
    all_raise(scene.results(), "Corrupted")


def test_corrupted_byte_beside_the_lifeline_raises_on_all_ranks(scene):
    scene.await_work()
    scene.to_0.corrupt(direction="forth")
    all_raise(scene.results(), "Corrupted", "PeerLost")


@pytest.mark.parametrize("scene", [CALM], ids=["calm"], indirect=True)
def test_slow_network_changes_no_result(scene):
    scene.await_work()
    scene.to_1.delay(30)
    scene.to_0.throttle(3_000_000)
    scene.await_work()
    all_well(scene.end())


@pytest.mark.parametrize("scene", [CALM], ids=["calm"], indirect=True)
def test_network_that_freezes_briefly_changes_no_result(scene):
    scene.await_work()
    for proxy in (scene.to_0, scene.to_1):
        proxy.freeze()
    time.sleep(1)
    for proxy in (scene.to_0, scene.to_1):
        proxy.thaw()
    scene.await_work()
    all_well(scene.end())


def test_network_that_freezes_for_ever_raises_peer_lost(scene):
    scene.await_work()
    scene.to_0.freeze()
    scene.to_1.freeze()
    results = scene.results()
    all_raise(results, "PeerLost")
    assert [error["attributes"]["ranks"] for _, error in results] == [[1], [0]]


LATE = CALM | {"UNISONO_TIMEOUT_S": "8"}


@pytest.mark.parametrize("scene", [LATE], ids=["late"], indirect=True)
def test_one_frozen_direction_raises_timeout(scene):
    """Both live and say so; the call is late."""
    scene.await_work()
    scene.to_1.freeze("forth")
    all_raise(scene.results(), "CollectiveTimeout")


def test_half_closed_connection_raises_peer_lost(scene):
    scene.await_work()
    scene.to_1.half_close("forth")
    all_raise(scene.results(), "PeerLost")


@pytest.mark.parametrize("scene", [{"n": 2}, {"n": 3}], ids=["2", "3"], indirect=True)
def test_reset_connection_raises_peer_lost(scene):
    scene.await_work()
    scene.to_1.drop()
    all_raise(scene.results(), "PeerLost")


def test_truncated_stream_raises_peer_lost(scene):
    scene.await_work()
    scene.to_1.truncate(scene.to_1.nbytes["forth"] + 100_000, direction="forth")
    all_raise(scene.results(), "PeerLost")


def test_invalid_address_is_refused(forks):
    for name, result in (("UNISONO_PORT", "many"), ("UNISONO_ADVERTISE", "nowhere")):
        end = forks.run(2, refuses, hosts=(1, 1), env=[{}, {name: result}])[1]
        assert end.value["error"] == "BadArgument", end
        assert name in end.value["message"]


def refuses(rank):
    return attempt(rank.init, rendezvous_timeout_s=1) if rank.number else None


# --- between namespaces


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@contextlib.contextmanager
def running(hosts, ranks, flag, silence_s=SILENCE_S):
    """Ranks at work in namespaces; healed afterwards."""
    env = {"UNISONO_SILENCE_S": str(silence_s), "UNISONO_TIMEOUT_S": "40"}
    world = world_across(ranks, on=hosts, env=env, grace_s=30)
    with world.start(go_on, str(flag)) as found:
        try:
            await_turns(found, sum(ranks), 3)
            yield found
        finally:
            hosts.heal()


def await_turns(found, n, more):
    begun = [len(found.stdout(rank)) for rank in range(n)]
    until = time.monotonic() + 50
    while any(len(found.stdout(r)) < begun[r] + more for r in range(n)):
        assert time.monotonic() < until, "they do not go on"
        time.sleep(0.02)


@pytest.mark.sweep
@needs_hosts()
def test_short_partition_raises_no_error(hosts, tmp_path):
    flag = tmp_path / "flag"
    with running(hosts, [2, 1], flag, silence_s=30) as found:
        hosts.partition({0}, {1})
        before = found.stdout(0)
        time.sleep(1)
        # what had come before may still be summed, and reported
        assert len(found.stdout(0)) <= len(before) + 2, "this was no partition"
        hosts.heal()
        await_turns(found, 3, 3)
        flag.touch()
        ends = found.wait()
    assert [(end.status, end.error) for end in ends] == [(0, None)] * 3
    assert len({end.result for end in ends}) == 1


@pytest.mark.sweep
@pytest.mark.quick(ranks=[[1, 1, 1]])
@needs_hosts()
@pytest.mark.parametrize(
    ("ranks", "sides"),
    [([2, 1], ({0}, {1})), ([1, 1, 1], ({0, 1}, {2})), ([1, 2, 1], ({0}, {1, 2}))],
    ids=str,
)
def test_after_a_long_partition_each_side_names_the_other(
    ranks, sides, hosts, tmp_path
):
    place = [host for host, n in enumerate(ranks) for _ in range(n)]
    with running(hosts, ranks, tmp_path / "flag") as found:
        hosts.partition(*sides)
        ends = found.wait()
    for end in ends:
        assert isinstance(end.error, PeerLost), (end, end.stderr)
        mine = next(side for side in sides if end.host in side)
        assert all(place[rank] not in mine for rank in end.error.ranks), end.error
        assert not end.ended_by_launcher


@needs_hosts()
def test_host_that_vanishes_is_named(hosts, tmp_path):
    with running(hosts, [1, 1, 2], tmp_path / "flag") as found:
        hosts.vanish(2)
        ends = found.wait()
    for end in ends[:2]:
        assert isinstance(end.error, PeerLost), (end, end.stderr)
        assert set(end.error.ranks) <= {2, 3}
        assert end.error.host == hosts[2].identity
