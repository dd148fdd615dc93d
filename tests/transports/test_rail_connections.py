"""Connections over several network cards: each begins at its card, and leaves by it.

First over the two loopback addresses, IPv4 and IPv6, then on hosts with two cards.
"""

import contextlib
import errno
import socket
import subprocess
from pathlib import Path

import pytest

from unisono import _native
from unisono.errors import ConnectFailed
from unisono.testing import Hosts, needs_hosts
from unisono.transports import listener as listening
from unisono.transports.addresses import Address, Rail, listen
from unisono.transports.handshake import Identity, data_purpose
from unisono.transports.listener import Listener
from unisono.transports.rails import Rails, joined
from unisono.transports.secret import make_secret

pytestmark = pytest.mark.timeout(120)

needs_tls = pytest.mark.skipif(bool(_native.tls_missing()), reason="no OpenSSL 3")
SECRET = make_secret()
PURPOSE = data_purpose(1)
BOTH = ("127.0.0.1", "::1")
SOME = 256 << 10


def why_no_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ""
    except OSError as why:
        return f"this machine has no ::1: {why}"


needs_ipv6 = pytest.mark.skipif(bool(why_no_ipv6()), reason=why_no_ipv6() or "it is")


def made_listener(rank, hosts, *, tls=False):
    me = Identity(SECRET, "job", rank, tls=tls)
    return Listener(Address(hosts[0], 0), me, others=hosts[1:])


def rails_between(one, two, hosts, theirs, cards=("lo", "lo")):
    """Of the first towards the second."""
    one.add_addresses({1: two.address})
    mine = [Rail(*each) for each in zip(hosts, cards, strict=True)]
    return Rails(one, mine, [(), [Address(h, two.address.port) for h in theirs]])


def connected(rails, two, lane):
    """The two ends of a lane."""
    there = rails.connect(1, PURPOSE, lane, 20.0, str)
    return there, two.expect(0, PURPOSE, 20.0)


# --- over loopback


@needs_ipv6
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=needs_tls)])
def test_lanes_begin_at_the_addresses_of_their_rails(tls):
    with made_listener(0, BOTH, tls=tls) as one, made_listener(1, BOTH, tls=tls) as two:
        rails = rails_between(one, two, BOTH, BOTH[::-1])
        for lane, host in enumerate(BOTH * 2):
            ends = connected(rails, two, lane)
            for end in ends:
                assert end.socket.getsockname()[0] == host
                assert end.socket.getpeername()[0] == host
                assert (end.tls is not None) == tls
            ends[0].send(b"over this one", timeout_s=20.0)
            assert ends[1].receive(64, timeout_s=20.0) == b"over this one"
            for end in ends:
                end.close()
        assert "not" not in str(rails)


def test_rails_of_different_families_are_not_joined():
    mine = (Rail("10.0.0.1", "eth0"), Rail("fd00::1", "eth1"))
    v4 = [Address("10.0.0.2", 5), Address("10.1.0.2", 5)]
    v6 = [Address("fd00::2", 5), Address("fd01::2", 5)]
    assert joined(mine, v4, lambda to: "") == ()
    assert joined(mine, v6, lambda to: "") == ()
    pairs = joined(mine, [v6[0], v4[0]], lambda to: "")
    assert [(p.rail, p.to) for p in pairs] == [(mine[0], v4[0]), (mine[1], v6[0])]


class Taken:
    """At the second address the first ports are taken."""

    def __init__(self, monkeypatch, times):
        self.times, self.tried = times, []
        monkeypatch.setattr(listening, "listen", self)

    def __call__(self, address, secret, *, who):
        if address.host == "127.0.0.2":
            self.tried.append(address.port)
            if len(self.tried) <= self.times:
                why = OSError(errno.EADDRINUSE, "in use")
                raise ConnectFailed(f"{who}: taken") from why
        return listen(address, secret, who=who)


def test_port_that_is_taken_at_one_card_is_not_the_last_that_is_tried(monkeypatch):
    taken = Taken(monkeypatch, 3)
    with made_listener(0, ("127.0.0.1", "127.0.0.2")) as one:
        assert taken.tried[-1] == one.address.port
        assert len(taken.tried) == 4


def test_port_that_is_taken_always_is_an_error(monkeypatch):
    Taken(monkeypatch, 1000)
    with pytest.raises(ConnectFailed, match="taken"):
        made_listener(0, ("127.0.0.1", "127.0.0.2"))


# --- on hosts with two cards


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2, rails=[None]) as made:
        yield made


def sent_by_card():
    counters = "/sys/class/net/eth{}/statistics/tx_bytes"
    return [int(Path(counters.format(card)).read_text()) for card in (0, 1)]


def lanes_by_card(hosts, addresses, cards=("eth0", "eth1")):
    """For each of two lanes: where it begins, its card, and what each card has sent."""
    found = []
    with contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(hosts[r].call(made_listener, r, addresses[r]))
            for r in (0, 1)
        )
        rails = rails_between(one, two, addresses[0], addresses[1], cards)
        for lane in (0, 1):
            ends = hosts[0].call(connected, rails, two, lane)
            before = hosts[0].call(sent_by_card)
            ends[0].send(bytes(SOME), timeout_s=20.0)
            left = SOME
            while left:
                left -= len(ends[1].receive(left, timeout_s=20.0))
            after = hosts[0].call(sent_by_card)
            sock = ends[0].socket
            bound = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
            sent = [b - a for a, b in zip(before, after, strict=True)]
            found.append((sock.getsockname()[0], bound.strip(b"\0").decode(), sent))
            for end in ends:
                end.close()
        assert "not" not in str(rails)
    return found


def check_lanes(found, addresses, bound):
    for lane, (begins, card, sent) in enumerate(found):
        assert begins == addresses[lane]
        assert card == bound[lane]
        assert sent[lane] >= SOME, sent
        assert sent[1 - lane] < SOME / 8, sent


@needs_hosts()
@pytest.mark.parametrize("family", ["address_on", "address6_on"])
def test_each_lane_leaves_by_its_card(hosts, family):
    addresses = [[getattr(host, family)(card) for card in (0, 1)] for host in hosts]
    check_lanes(lanes_by_card(hosts, addresses), addresses[0], ["", ""])


@needs_hosts()
@pytest.mark.parametrize("family", ["address_on", "address6_on"])
def test_lane_leaves_by_its_card_where_the_route_does_not(hosts, family):
    addresses = [[getattr(host, family)(card) for card in (0, 1)] for host in hosts]

    def route(verb):
        words = ["ip", "route", verb, addresses[1][1], "dev", "eth0"]
        hosts[0].call(lambda: subprocess.run(words, check=True, timeout=20))

    route("add")
    try:
        found = lanes_by_card(hosts, addresses)
    finally:
        route("del")
    check_lanes(found, addresses[0], ["", "eth1"])
