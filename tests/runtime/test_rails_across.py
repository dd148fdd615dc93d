"""Streams over several network cards: the same results, and failures with names.

First ranks that are threads, whose streams have lanes as over several cards; then two
hosts with two links of different speed.
"""

import functools
import select
import socket
import time
from array import array
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ

import numpy as np
import pytest
from test_across_hosts import collectives, groups, in_flight, messages
from test_cut_streams import control, cut, everything_small, needs_tls

from forked import await_that
from tcp_pairs import reset, tcp_pair
from unisono import _native
from unisono.errors import CollectiveTimeout, PeerLost
from unisono.runtime.world.address import free_port
from unisono.testing import Hosts, needs_hosts, world, world_across
from unisono.transports import threads
from unisono.transports.streams import pair_of, streams_between_threads

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(3)]

BOTH = {"UNISONO_INTERFACE": "eth0,eth1"}
TWO = ("short=65", "cut=2")


@pytest.fixture(params=[2, 3])
def _rails(request, monkeypatch):
    made = functools.partial(streams_between_threads, rails=request.param)
    monkeypatch.setattr(threads, "streams_between_threads", made)


def everything(comm):
    wrong = collectives(comm, 9000) + messages(comm) + groups(comm)
    return wrong + in_flight(comm) + everything_small(comm)


@pytest.mark.usefixtures("_rails")
@pytest.mark.parametrize("io_threads", ["0", "3"])
def test_lanes_taken_as_free_give_the_same_results(monkeypatch, io_threads):
    monkeypatch.setenv("UNISONO_IO_THREADS", io_threads)
    monkeypatch.setenv("UNISONO_IO_LEAST", "1")
    with world(3, hosts=(0, 0, 1), timeout_s=60.0) as made:
        assert made.run(everything) == [[]] * 3


@pytest.mark.usefixtures("_rails")
@needs_tls
def test_encrypted_lanes_give_the_same_results():
    with world(3, hosts=(0, 0, 1), tls="mutual", timeout_s=60.0) as made:
        assert made.run(everything) == [[]] * 3


@pytest.mark.usefixtures("_rails")
@pytest.mark.parametrize(
    ("how", "tls"),
    [
        *((how, None) for how in ("short=1", "cut=1", *TWO)),
        *(pytest.param(how, "mutual", marks=needs_tls) for how in TWO),
    ],
)
def test_cut_lanes_taken_as_free_give_the_same_results(how, tls):
    with cut(how), world(2, hosts=(0, 1), tls=tls, timeout_s=60.0) as made:
        assert made.run(everything_small) == [[]] * 2
    with cut(how), world(2, hosts=(0, 1), tls=tls, timeout_s=60.0) as made:
        assert made.run(control) == [[]] * 2


@pytest.mark.usefixtures("_rails")
def test_large_messages_in_pieces_keep_their_order():
    """A lane that is ahead waits for the one that is behind."""
    names = [f"{n}:*:cut=3" for n in ("stream.receive", "socket.send")]
    _native.arm_failpoints(",".join(names))
    try:
        with world(2, hosts=(0, 1), timeout_s=60.0) as made:
            assert made.run(long_call) == [[]] * 2
    finally:
        _native.arm_failpoints("")


def long_call(comm):
    n = 300_000
    mine = np.arange(n, dtype=np.float32) * (comm.rank + 1)
    found = comm.all_reduce(mine)
    wrong = ["sum"] * bool((found != np.arange(n, dtype=np.float32) * 3).any())
    if comm.rank == 0:
        comm.send(np.arange(n), 1)
        return wrong
    got = comm.recv(np.empty(n, np.int64), 0)
    return wrong + ["message"] * bool((got != np.arange(n)).any())


# --- a lane that fails


class Cables:
    """The wires of streams between threads, which can be cut."""

    def __init__(self):
        self.made = []

    def pair(self):
        one, other = tcp_pair()
        self.made.append((one.dup(), other.dup()))
        return pair_of(*(_native.SocketWire(s.detach()) for s in (one, other)))

    def cut(self, number, how, when="begun"):
        """Once bytes wait in it that the receiver has not read, or no more fit."""
        sender, receiver = self.made[number]
        assert select.select([receiver], [], [], 60)[0]
        queued = None
        while when == "full" and queued != (queued := self._queued()):
            time.sleep(0.2)
        if how == "end":
            sender.shutdown(socket.SHUT_RDWR)
        else:
            reset(sender)

    def _queued(self):
        return [array("i", ioctl(ends[0], TIOCOUTQ, bytes(4))) for ends in self.made]

    def close(self):
        for ends in self.made:
            for end in ends:
                end.close()


@pytest.fixture
def cables(monkeypatch):
    made = Cables()
    monkeypatch.setattr(
        threads,
        "streams_between_threads",
        lambda n, pair, lanes: streams_between_threads(n, made.pair, rails=2),
    )
    yield made
    made.close()


def through_cut_lane(comm, cables, call, *how):
    """Rank 0 is in the middle of the first call when a lane of its stream is cut.

    The lane may have carried all that it was to carry in this call, so there are more.
    """
    if comm.rank == 1:
        await_that(lambda: len(cables.made) == 2)
        cables.cut(*how)
    x = np.ones(1 << 21, np.float32)
    try:
        for _ in range(100):
            if call == "all_reduce":
                comm.all_reduce(x, timeout_s=60)
            elif comm.rank == 0:
                comm.send(x, 1, timeout_s=60)
            else:
                comm.recv(x, 0, timeout_s=60)
    except PeerLost as error:
        return str(error)
    return "no failure"


@pytest.mark.parametrize("call", ["all_reduce", "send"])
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("when", ["begun", "full"])
def test_lane_that_fails_in_the_middle_is_a_failure_with_a_name(
    cables, call, lane, how, when
):
    with world(2, hosts=(0, 1), timeout_s=60.0) as made:
        found = made.run(through_cut_lane, cables, call, lane, how, when)
    for rank, words in enumerate(found):
        assert f"rank {1 - rank}" in words, found


# --- over two cards


def carried():
    counters = "/sys/class/net/eth{}/statistics/tx_bytes"
    return [int(Path(counters.format(card)).read_text()) for card in (0, 1)]


def over_both(comm):
    """What each card has sent, as a share of the data; and what `explain` says."""
    x = np.arange(1 << 20, dtype=np.float32)
    before = carried()
    right = bool((comm.all_reduce(x * (comm.rank + 1)) == x * 3).all())
    shares = [(b - a) / x.nbytes for a, b in zip(before, carried(), strict=True)]
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        right = right and bool((comm.recv(np.empty_like(x), 0) == x).all())
    return right, shares, comm.explain("all_reduce", x)


def until_it_fails(comm, timeout_s, folder):
    """After its first call each rank leaves a file in the folder."""
    x = np.ones(1 << 21, np.float32)
    comm.all_reduce(x)
    Path(folder, str(comm.rank)).touch()
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 60:
            comm.all_reduce(x, timeout_s=timeout_s)
    except (PeerLost, CollectiveTimeout) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@needs_hosts()
def test_two_cards_carry_a_stream_together():
    with Hosts(2, rate="300mbit", rails=["100mbit"]) as hosts:
        check_shares(world_across([1, 1], on=hosts, env=BOTH).run(over_both))


@needs_hosts()
@needs_tls
@pytest.mark.sweep
def test_two_cards_carry_an_encrypted_stream_over_ipv6():
    with Hosts(2, rate="300mbit", rails=["100mbit"]) as hosts:
        where = f"[{hosts[0].address6}]:{hosts[0].call(free_port)}"
        env = {**BOTH, "UNISONO_ADDRESS": where, "UNISONO_TLS": "mutual"}
        ends = world_across([1, 1], on=hosts, env=env).run(over_both)
    check_shares(ends, "over fd00:77::")


@needs_hosts()
@pytest.mark.sweep
def test_card_that_one_host_alone_names_is_not_used():
    one = {"UNISONO_INTERFACE": "eth0"}
    with Hosts(2, rails=[None]) as hosts:
        world = world_across([1, 1], on=hosts, env_of=[BOTH, one].__getitem__)
        ends = world.run(over_both)
    for right, shares, _ in ends:
        assert right
        assert shares[1] < 0.01, shares
    assert "; 1 to rank 1: it names 1 of its own" in ends[0][2]


@needs_hosts()
@pytest.mark.sweep
def test_hosts_may_name_their_cards_in_another_order():
    turned = {"UNISONO_INTERFACE": "eth1,eth0"}
    with Hosts(2, rate="300mbit", rails=["100mbit"]) as hosts:
        world = world_across([1, 1], on=hosts, env_of=[BOTH, turned].__getitem__)
        check_shares(world.run(over_both))


def check_shares(ends, names="over 10.7"):
    for right, shares, explained in ends:
        assert right
        assert shares[0] > 0.3, shares
        assert shares[1] > 0.05, shares
        assert names in explained
        assert "each as much as it can carry" in explained


@needs_hosts()
@pytest.mark.sweep
def test_card_that_is_down_is_left_out_and_named():
    with Hosts(2, rails=[None]) as hosts:
        hosts.unplug(1, 1)
        running = world_across([1, 1], on=hosts, env=BOTH).start(over_both)
        with running:
            ends = running.wait()
    for end in ends:
        right, shares, explained = end.result
        assert right
        assert shares[1] < 0.01, shares
        assert "is not used towards rank" in end.stderr
        assert "; not 10.78.0." in explained


@needs_hosts()
@pytest.mark.sweep
def test_card_that_goes_down_is_a_failure_with_a_name(tmp_path):
    with Hosts(2, rate="300mbit", rails=["100mbit"]) as hosts:
        world = world_across([1, 1], on=hosts, env=BOTH)
        with world.start(until_it_fails, 4.0, str(tmp_path)) as running:
            await_that(lambda: len(list(tmp_path.iterdir())) == 2, "both first calls")
            hosts.unplug(1, 1)
            ends = running.wait()
    kinds = [end.result[0] for end in ends]
    assert set(kinds) <= {"PeerLost", "CollectiveTimeout"}, kinds
    assert "CollectiveTimeout" in kinds
    assert any("rank" in end.result[1] for end in ends)
