"""Where a rank listens: by route, by name, by network; and what is refused."""

import contextlib
import ipaddress
import socket

import pytest

from unisono.errors import BadArgument, ConnectFailed
from unisono.transports import addresses
from unisono.transports.addresses import (
    Address,
    by_loopback,
    choose,
    chosen_address,
    interfaces,
    is_loopback,
    refuse_open,
)
from unisono.transports.secret import make_secret, open_secret

HERE = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.3.4", "fd00::4", "fe80::4%eth0"],
    "ib0": ["fe80::9%ib0", "192.168.7.4"],
}


@pytest.fixture
def here(monkeypatch):
    """A host with two networks."""
    monkeypatch.setattr(addresses, "interfaces", lambda: HERE)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("node-1.cluster:0", "node-1.cluster", 0),
        ("[fd00::1]:65535", "fd00::1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        (" localhost:1 ", "localhost", 1),
    ],
)
def test_addresses_are_parsed_and_formatted(text, host, port):
    found = Address.parse(text)
    assert found == Address(host, port)
    assert str(found) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "host", ":80", "host:", "::1:80", "[::1]", "h:65536", "a b:1", "h:-1", "h:٣"],
)
def test_invalid_address_is_refused(text):
    with pytest.raises(BadArgument, match="expected host:port"):
        Address.parse(text)


def test_unknown_host_is_an_error():
    with pytest.raises(ConnectFailed, match="no such host"):
        Address("no.such.host.invalid", 1).resolve()


def test_loopback_is_the_default():
    choice = choose()
    assert choice.host == "127.0.0.1"
    assert str(choice) == "127.0.0.1 on lo: loopback, since no other was named"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_interface_is_chosen_by_route(host):
    choice = choose(None, Address(host, 0))
    assert choice.host == host
    assert str(choice) == f"{host} on lo: the route to {host} leaves there"


def test_missing_route_is_an_error(monkeypatch):
    def unreachable(self, where):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConnectFailed, match=r"no route .* 10\.9\.9\.9:1: Network is"):
        choose(None, Address("10.9.9.9", 1))


@pytest.mark.parametrize(
    ("given", "towards", "host", "interface"),
    [
        ("eth0", None, "10.0.3.4", "eth0"),
        ("eth0", "10.0.3.1", "10.0.3.4", "eth0"),
        ("eth0", "fd00::1", "fd00::4", "eth0"),
        ("ib0", None, "192.168.7.4", "ib0"),
        ("ib0", "fd00::1", "fe80::9%ib0", "ib0"),
        ("10.0.0.0/8", None, "10.0.3.4", "eth0"),
        ("192.168.0.0/16", None, "192.168.7.4", "ib0"),
        ("fd00::/16", None, "fd00::4", "eth0"),
        ("10.0.3.4", None, "10.0.3.4", "eth0"),
        (" lo ", None, "127.0.0.1", "lo"),
    ],
)
def test_interface_is_chosen_by_name(here, given, towards, host, interface):
    choice = choose(given, Address(towards, 1) if towards else None)
    assert (choice.host, choice.interface, choice.bind) == (host, interface, "")
    assert f"UNISONO_INTERFACE={given.strip()}" in choice.why


@pytest.mark.parametrize(
    "given", ["eth7", "10.9.0.0/16", "10.0.3.5", "fd01::/16", "1/2"]
)
def test_unknown_interface_is_refused(here, given):
    with pytest.raises(BadArgument, match=r"there are lo \(127.0.0.1, ::1\), eth0"):
        choose(given)


@pytest.mark.parametrize(("given", "to"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_all_interfaces_are_used_only_if_named(given, to):
    choice = choose(given, Address(to, 1))
    assert (choice.host, choice.bind) == (to, given)
    assert "means all" in choice.why


def test_name_with_several_addresses_gives_one_of_this_host(monkeypatch):
    """Of those that it stands for, one that this host has."""
    both = [(socket.AF_INET, (host, 1)) for host in ("203.0.113.7", "127.0.1.1")]

    def resolve(self):
        number = [(socket.AF_INET, (self.host, self.port))]
        return both if self.host == "node1" else number

    monkeypatch.setattr(Address, "resolve", resolve)
    choice = chosen_address(Address("node1", 1))
    assert choice.host == "127.0.1.1"
    assert "others cannot reach it" in choice.why
    assert "reach" not in chosen_address(Address("127.0.0.1", 1)).why
    assert chosen_address(Address("203.0.113.7", 1)).host == "203.0.113.7"


def test_link_local_addresses_are_sent_without_their_interface():
    mine = Address("fe80::4%eth0", 80)
    assert mine.sent() == Address("fe80::4", 80)
    assert mine.sent().received("enp3") == Address("fe80::4%enp3", 80)
    for other in (Address("fd00::4", 80), Address("10.0.3.4", 80)):
        assert other.sent().received("enp3") == other


def test_interfaces_of_this_host_have_valid_addresses():
    found = interfaces()
    assert "127.0.0.1" in found["lo"]
    for hosts in found.values():
        for host in hosts:
            ipaddress.ip_address(host)


def test_is_loopback_recognises_loopback_addresses():
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    for host in ("10.0.0.1", "0.0.0.0", "::", "localhost", "fe80::1%lo"):
        assert not is_loopback(host)


def test_what_is_sent_to_an_own_address_stays_on_this_machine():
    own = [host for hosts in interfaces().values() for host in hosts]
    for host in ("127.0.0.9", *own):
        family, where = Address(host, 0).resolve()[0]
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.bind(where)  # not if its interface is down
            assert by_loopback(family, where), host
    assert not by_loopback(socket.AF_INET, ("203.0.113.77", 80))  # of no machine


@pytest.mark.parametrize("host", ["10.0.3.4", "0.0.0.0", "::", "fd00::4"])
def test_network_address_without_secret_is_refused(host):
    with pytest.raises(BadArgument, match=r"openssl rand -hex 32.*insecure=True"):
        refuse_open(host, open_secret("job"))
    refuse_open(host, open_secret("job", anywhere=True))
    refuse_open(host, make_secret())
    refuse_open("127.0.0.1", open_secret("job"))
    refuse_open("::1", open_secret("job"))
