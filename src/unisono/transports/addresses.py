"""Where a rank listens, and why there.

Loopback by default. With other hosts in the job, it is the address
from which this host reaches rank 0 (the kernel is asked for the route; nothing is
sent), or what `interface` names (UNISONO_INTERFACE): an interface (eth0), a network
(10.0.0.0/8), or an address of this host; several, separated by commas, are rails
(`transports/rails.py`), and the first is where others connect. All interfaces at once
(0.0.0.0 or ::) only if named so. Rank 0 listens at each address of its host that its
name stands for. The choice comes with its reason:

    10.0.3.4 on eth0: the route to 10.0.3.1 leaves there

An address that other hosts can reach is refused to a job that has no secret.

IPv4 and IPv6 alike. A link-local address (fe80::1%eth0) is complete only with the
interface it is on, whose name is each host's own; so it travels without, and who gets
it adds the interface by which it reaches the sender.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import BadArgument, ConnectFailed
from unisono.transports.secret import SECRET, SECRET_FILE, Secret

INTERFACE = "UNISONO_INTERFACE"
MOST_RAILS = 8
PORT = "UNISONO_PORT"
"""At which port this rank listens, if it is not rank 0; by default a free one."""
ADVERTISE = "UNISONO_ADVERTISE"
"""Where others connect to this rank, if not where it listens: a forwarded port."""

_SIOCGIFCONF = 0x8912
_IFREQ = 40 if struct.calcsize("P") == 8 else 32
SocketAddress = tuple[str | int | bytes, ...]
_Host = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Address:
    """A host, by name or number, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str = "address") -> Address:
        """From "host:port" or "[v6]:port"."""
        found = re.fullmatch(
            r"(?:\[([^\[\]]+)\]|([^:\[\]\s]+)):([0-9]{1,5})", text.strip(), re.ASCII
        )
        if not found or int(found[3]) > 65535:
            raise BadArgument(
                f"{what} = {text!r}: expected host:port, as in 10.0.0.1:29500, "
                "node1:29500 or [fd00::1]:29500"
            )
        return cls(found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        """As `parse` reads it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def is_number(self) -> bool:
        """Whether the host is an IP address and not a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    def resolve(self) -> list[tuple[int, SocketAddress]]:
        """What the system makes of it: families and socket addresses, best first."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as why:
            raise ConnectFailed(
                f"{self}: no such host is known here ({why}): check the name, or give "
                "the number"
            ) from None
        return [(family, tuple(where)) for family, _, _, _, where in found]

    def sent(self) -> Address:
        """As it travels: a link-local address without its interface."""
        return Address(self.host.partition("%")[0], self.port)

    def received(self, interface: str) -> Address:
        """As it came, for use here: link-local on the interface that leads there."""
        if ":" in self.host and ipaddress.ip_address(self.host).is_link_local:
            return Address(f"{self.host}%{interface}", self.port)
        return self


def by_loopback(family: int, where: SocketAddress) -> bool:
    """Whether bytes to there never leave this machine, since it is there itself.

    The kernel is asked for the route; nothing is sent.
    """
    host = str(where[0])
    if is_loopback(host):
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return bool(probe.getsockname()[0] == host)
    except OSError:
        return False


@dataclass(frozen=True)
class Rail:
    """An address of this host, and the network card it is on."""

    host: str
    interface: str

    def __str__(self) -> str:
        """As errors and `explain` name it."""
        return f"{self.host} on {self.interface}"


@dataclass(frozen=True)
class Choice:
    """An address of this host, the interface it is on, and why it was chosen.

    `bind` is where to listen, if not at the address that others use; `others` are
    where to listen as well, at the same port. `rails` are what UNISONO_INTERFACE names,
    if it names several, beginning with this one.
    """

    host: str
    interface: str
    why: str
    bind: str = ""
    others: tuple[str, ...] = ()
    rails: tuple[Rail, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.host} on {self.interface}: {self.why}"

    def listen_address(self) -> Address:
        """Where to listen: at any free port, unless UNISONO_PORT names one."""
        port = os.environ.get(PORT, "0")
        if not port.isdecimal() or int(port) > 65535:
            raise BadArgument(f"{PORT}={port}: expected a port, 0 to 65535")
        return Address(self.bind or self.host, int(port))

    def published(self, port: int) -> Address:
        """The address for others: UNISONO_ADVERTISE, or where this rank listens."""
        text = os.environ.get(ADVERTISE)
        return Address.parse(text, what=ADVERTISE) if text else Address(self.host, port)


LOOPBACK = Choice("127.0.0.1", "lo", "loopback, since no other was named")


def choose(interface: str | None = None, towards: Address | None = None) -> Choice:
    """The address at which this rank listens, so that others reach it.

    `interface` is what the user named, if anything; `towards` where rank 0 is.
    """
    if interface and "," in interface:
        return _several(named_interfaces(interface), towards)
    if interface:
        return _named(interface.strip(), towards)
    return _by_route(towards) if towards is not None else LOOPBACK


def named_interfaces(interface: str) -> list[str]:
    """What the text names, in its order."""
    return [name for each in interface.split(",") if (name := each.strip())]


def chosen_address(given: Address) -> Choice:
    """The address of this host at which rank 0 listens, by a name that was given.

    Of the addresses of the name, the first that this host has; and the others that it
    has, since a rank that connects may reach only one of them.
    """
    found = [_host_of(family, where) for family, where in given.resolve()]
    hosts = list(dict.fromkeys(found))
    host, *others = list(filter(_is_own, hosts)) or hosts[:1]
    why = f"{given.host} was given as the address of rank 0"
    if is_loopback(host) and given.host != "localhost" and not is_loopback(given.host):
        why += "; on this host that name is a loopback address; others cannot reach it"
    return Choice(host, _interface_of(host), why, others=tuple(others))


def refuse_open(host: str, secret: Secret) -> None:
    """Refuse an address that other hosts can reach to a job that has no secret."""
    if not secret.is_open or secret.anywhere or is_loopback(host):
        return
    raise BadArgument(
        f"{host}: other hosts can connect there, and this job has no secret; make one "
        f"(openssl rand -hex 32) and give it to all ranks as {SECRET}, or in a file of "
        f"mode 0600 named by {SECRET_FILE}; insecure=True is for networks where you "
        "trust everybody"
    )


def listen(address: Address, secret: Secret, *, who: str) -> socket.socket:
    """A socket that listens there; ConnectFailed says why `who` cannot."""
    family, where = address.resolve()[0]
    refuse_open(str(where[0]), secret)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as why:
        listener.close()
        raise ConnectFailed(
            f"{who} cannot listen at {address}: {why.strerror}; {_advice(why)}"
        ) from why
    return listener


def _advice(why: OSError) -> str:
    if why.errno == errno.EADDRINUSE:
        return "another program, or another job, has this port: choose another"
    if why.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this host: name one, or an interface"
    if why.errno == errno.EACCES:
        return "ports below 1024 are not for everybody: choose another"
    return "choose another address"


def is_loopback(host: str) -> bool:
    """Whether only this host can connect there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interfaces() -> dict[str, list[str]]:
    """The addresses of this host by interface, link-local ones with their scope."""
    found: dict[str, list[str]] = {}
    for name, host in [*_interfaces_v4(), *_interfaces_v6()]:
        found.setdefault(name, []).append(host)
    return found


def _by_route(towards: Address) -> Choice:
    failure: OSError | None = None
    for family, where in towards.resolve():
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where if where[1] else (where[0], 9, *where[2:]))
                host = _host_of(family, probe.getsockname())
        except OSError as why:
            failure = why
            continue
        to = _host_of(family, where)
        name = _interface_of(host)
        return Choice(host, name, f"the route to {to} leaves there")
    raise ConnectFailed(
        f"there is no route from this host to {towards}: "
        f"{failure.strerror if failure else 'no address'}"
    )


def _named(value: str, towards: Address | None) -> Choice:
    here = interfaces()
    where = f"{INTERFACE}={value}"
    if value in here:
        host = _best(here[value], towards)
        return Choice(host, value, f"{where} names the interface")
    try:
        network = ipaddress.ip_network(value.partition("%")[0])
    except ValueError:
        network = None
    if network is None:
        raise BadArgument(
            f"{where}: no interface, network or address of this host; {_listed(here)}"
        )
    if network.network_address.is_unspecified and network.prefixlen in (32, 128):
        route = _by_route(towards) if towards is not None else LOOPBACK
        return Choice(
            route.host, route.interface, f"{where} means all; {route.why}", value
        )
    inside = [
        (name, host)
        for name, hosts in here.items()
        for host in hosts
        if _number(host) in network
    ]
    if not inside:
        raise BadArgument(f"{where}: this host has no address there; {_listed(here)}")
    host = _best([host for _, host in inside], towards)
    name = next(name for name, other in inside if other == host)
    return Choice(host, name, f"{where} holds it")


def _several(names: Sequence[str], towards: Address | None) -> Choice:
    """The first is where others connect; all are rails."""
    given = f"{INTERFACE}={','.join(names)}"
    if not 0 < len(names) <= MOST_RAILS:
        raise BadArgument(f"{given}: expected 1 to {MOST_RAILS} names")
    found = [_named(name, towards) for name in names]
    if len(found) == 1:
        return found[0]
    for name, each in zip(names, found, strict=True):
        if each.bind:
            wrong = "means all, and cannot be one of several: name each card"
        elif _number(each.host).is_link_local:
            wrong = f"has {each.host} alone, which is link-local: give it an address"
        elif is_loopback(each.host) != is_loopback(found[0].host):
            wrong = "is not on the same side of this host as the first: one is loopback"
        elif [other.host for other in found].count(each.host) > 1:
            wrong = f"is {each.host}, which is named twice"
        else:
            continue
        raise BadArgument(f"{given}: {name} {wrong}")
    rails = tuple(Rail(each.host, each.interface) for each in found)
    why = f"{given} names it first, of {len(rails)}"
    others = tuple(rail.host for rail in rails[1:])
    return Choice(rails[0].host, rails[0].interface, why, others=others, rails=rails)


def _best(hosts: Sequence[str], towards: Address | None) -> str:
    """Of the family that leads to rank 0; rather global than link-local; then IPv4."""
    family = 0
    if towards is not None:
        family = 6 if towards.resolve()[0][0] == socket.AF_INET6 else 4

    def rank(host: str) -> tuple[bool, bool, int]:
        number = _number(host)
        return (
            number.version != (family or number.version),
            number.is_link_local,
            number.version,
        )

    return min(hosts, key=rank)


def _listed(here: dict[str, list[str]]) -> str:
    listed = (f"{name} ({', '.join(hosts)})" for name, hosts in here.items())
    return "there are " + ", ".join(listed)


def _interface_of(host: str) -> str:
    for name, hosts in interfaces().items():
        if host in hosts:
            return name
    return "lo" if is_loopback(host) else "?"


def _is_own(host: str) -> bool:
    family, where = Address(host, 0).resolve()[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
            return True
    except OSError:
        return False


def _number(host: str) -> _Host:
    return ipaddress.ip_address(host.partition("%")[0])


def _host_of(family: int, where: SocketAddress) -> str:
    """The host of a socket address, with its scope if it needs one."""
    host = str(where[0]).partition("%")[0]
    if family == socket.AF_INET6 and len(where) == 4 and where[3]:
        return f"{host}%{socket.if_indextoname(int(where[3]))}"
    return host


def _interfaces_v4() -> list[tuple[str, str]]:
    room = array.array("B", bytes(_IFREQ * 256))
    address, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            filled = fcntl.ioctl(
                probe.fileno(), _SIOCGIFCONF, struct.pack("iP", size, address)
            )
        except OSError:
            return []
    raw = room.tobytes()[: struct.unpack("iP", filled)[0]]
    found = []
    for at in range(0, len(raw), _IFREQ):
        name = raw[at : at + 16].partition(b"\0")[0].decode(errors="replace")
        found.append((name, socket.inet_ntoa(raw[at + 20 : at + 24])))
    return found


def _interfaces_v6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        digits, _, _, _, _, name = line.split()
        host = ipaddress.IPv6Address(bytes.fromhex(digits))
        scope = f"%{name}" if host.is_link_local else ""
        found.append((name, f"{host}{scope}"))
    return found
