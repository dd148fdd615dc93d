"""Every transport passes the conformance suite, and broken ones do not."""

import os
import socket

import pytest
from memory_transport import MemoryTransport

from tcp_pairs import tcp_pair
from unisono import _native
from unisono.errors import BadArgument, MissingLibrary
from unisono.testing import check_transport, check_wire
from unisono.transports import registry, tls
from unisono.transports.interface import Capabilities, Transport

pytestmark = pytest.mark.one_in(4)

QUICK = [("shm", 2), ("tcp", 2), ("threads", 3)]
CASES = [(name, n) for name in ("shm", "tcp", "threads") for n in (2, 3, 5)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.sweep) for c in CASES],
)
def test_transport_passes(name, ranks):
    check_transport(name, [ranks])


@pytest.mark.quick(ranks=[3])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_transport_of_one_python_and_one_native_file_passes(ranks):
    check_transport(MemoryTransport(), [ranks])


# --- wires


def socket_wires():
    return [_native.SocketWire(end.detach()) for end in socket.socketpair()]


def tcp_wires():
    return [_native.SocketWire(end.detach()) for end in tcp_pair()]


def tls_wires():
    socks = socket.socketpair()
    ends = [
        tls.begin(sock, bytes(32), is_client=client)
        for sock, client in zip(socks, (True, False), strict=True)
    ]
    while any([tls.continue_handshake(end) for end in ends]):
        pass
    return [
        _native.TlsWire(sock.detach(), end)
        for sock, end in zip(socks, ends, strict=True)
    ]


@pytest.mark.parametrize(
    "pair", [socket_wires, tcp_wires, tls_wires, _native.MemoryWire.pair]
)
def test_wire_passes(pair):
    check_wire(pair)


@pytest.mark.parametrize("fault", ["drop", "swap", "sleep"])
def test_broken_wire_fails(fault, monkeypatch):
    monkeypatch.setattr("unisono.testing.transports._WAKE_S", 0.5)
    with pytest.raises(AssertionError):
        check_wire(lambda: _native.MemoryWire.pair(fault))


def test_wire_that_is_attached_or_closed_is_refused():
    one, other = socket_wires()
    one.close()
    with pytest.raises(ValueError, match="attached or closed"):
        one.send(b"more")
    assert other.peer_closed()


# --- broken on purpose


class Broken(MemoryTransport):
    """Its wires drop a byte, swap two frames, or stop waking their reader."""

    def __init__(self, fault):
        self.fault = fault


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["drop", "swap", "sleep"])
def test_transport_with_broken_wires_fails(fault):
    with pytest.raises(AssertionError, match=r"check '(collectives|split)'"):
        check_transport(Broken(fault), [2], checks=["collectives"], timeout_s=5.0)


class Leaking(MemoryTransport):
    """Keeps a descriptor, or a wire, for every session."""

    def __init__(self, what):
        self.what, self.kept = what, []

    def connect(self, options):
        self.kept.append(os.pipe() if self.what == "pipe" else self.pair())
        return super().connect(options)


@pytest.mark.parametrize(("what", "named"), [("pipe", "pipe:"), ("wire", "eventfd")])
def test_transport_that_leaks_descriptors_fails(what, named, monkeypatch):
    monkeypatch.setattr("unisono.testing._transport_checks._SETTLE_S", 0.5)
    broken = Leaking(what)
    with pytest.raises(AssertionError, match=rf"left after .*{named}"):
        check_transport(broken, [2], checks=["tags", "any_source"])
    for ends in broken.kept:
        for end in ends:
            os.close(end) if what == "pipe" else end.wire.close()


class Silent(MemoryTransport):
    """Does not say who is missing."""

    def connect(self, options):
        try:
            return super().connect(options)
        except Exception as error:
            error.missing = ()
            raise


def test_transport_that_does_not_name_who_is_missing_fails():
    with pytest.raises(AssertionError, match=r"check 'missing' .* names \(\)"):
        check_transport(Silent(), [3], checks=["missing"])


def test_unknown_check_is_refused():
    with pytest.raises(BadArgument, match="expected some of"):
        check_transport("threads", [2], checks=["nothing"])


# --- the registry


@pytest.fixture
def registered():
    made = MemoryTransport()
    registry.register(made)
    yield made
    registry.unregister(made.name)


def test_registered_transport_is_found_by_name(registered):
    assert registry.get("memory") is registered
    assert registry.names() == ["memory", "shm", "tcp", "threads", "ucx"]
    check_transport("memory", [2], checks=["tags"])
    with pytest.raises(BadArgument, match="registered already"):
        registry.register(MemoryTransport())


def test_unknown_transport_is_refused_with_those_that_exist():
    with pytest.raises(BadArgument, match=r"'udp'; there are shm, tcp, threads, ucx"):
        registry.get("udp")


class Unavailable(MemoryTransport):
    name = "unavailable"

    def unavailable(self):
        return "its library is missing"


def test_unavailable_transport_says_what_it_lacks():
    registry.register(Unavailable())
    try:
        with pytest.raises(MissingLibrary, match="its library is missing"):
            registry.get("unavailable")
    finally:
        registry.unregister("unavailable")


class Point:
    """An installed package's entry point."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        return self.value


@pytest.mark.parametrize("value", [MemoryTransport, MemoryTransport()])
def test_entry_point_is_loaded(value, monkeypatch):
    points = [Point("memory", value)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert isinstance(registry.get("memory"), MemoryTransport)


@pytest.mark.parametrize("value", [object(), Capabilities(), MemoryTransport()])
def test_entry_point_that_is_no_transport_of_its_name_is_refused(value, monkeypatch):
    points = [Point("other", value)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(BadArgument, match="expected a Transport whose name is 'other'"):
        registry.get("other")


@pytest.mark.parametrize("name", ["shm", "tcp", "threads"])
def test_own_transports_are_what_they_say(name):
    found = registry.get(name)
    assert isinstance(found, Transport)
    assert found.name == name
    assert found.capabilities.between_hosts == (name == "tcp")
    assert found.capabilities.encryption == (name == "tcp")
    assert found.capabilities.between_processes == (name != "threads")
