"""Hosts on one machine: network namespaces, with links of a given speed between them.

    with Hosts(3, rate="1gbit") as hosts:
        process = hosts[1].run([sys.executable, "rank.py"], env={"UNISONO_RANK": "1"})
        hosts.partition({0}, {1, 2})
        hosts.heal()

Each host has one link, eth0, to a switch that stands in a namespace of its own; the
machine's own network is not touched, and nothing here can be reached from it. With
rails=["100mbit"] each has a second one, eth1, of that rate and in a network of its own,
and so on. Hosts
have IPv4 and IPv6 addresses, a loopback, a host name, and a UNISONO_HOST_ID, so that
ranks of different hosts do not take each other for neighbours. They share file system,
processors and clock: what is measured between them is the link's speed only as long as
the processors keep up.

A rate is a token bucket (tbf) in each direction of a host's link. It counts the bytes
of Ethernet frames without preamble and gap, so that "1gbit" carries at most 956 Mbit/s
of data in one TCP stream, where a gigabit card carries 941. A link that was idle lets
through at once what it carries in 250 µs, at least 4 KiB. What comes too fast queues
(for 10 ms, at least 256 KiB, or what `queue` says) and is then lost, as in a switch.

Measured on two cores (benchmarks/links.py): at "1gbit" a stream had 929 to 954
Mbit/s, at "20mbit" 19.1, and volleys of datagrams on an idle gigabit link were never
more than 31 KiB ahead of its rate. With a dozen other processes on those cores a
gigabit fell to 680 to 820 Mbit/s.

This needs root. `hosts_available()` tells why it cannot be had, and tests begin with
`pytestmark = needs_hosts()`, which skips them with that reason.

Nothing is left behind. Namespaces have no names: the kernel removes them with the last
process that uses them, even after kill -9. The processes of a host are killed when the
context is left, and by a reaper when this process is gone without leaving it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from unisono.errors import BadArgument, UnisonoError, UsageError, whole_number
from unisono.launch.processes import Reaper
from unisono.testing._namespaces import call_inside, kill_inside, new_network
from unisono.units import parse_bytes, parse_rate, parse_seconds

T = TypeVar("T")

_MOST_HOSTS = 200
_BURST_S = 250e-6  # a shorter one loses throughput when the kernel's timers are late
_SMALLEST_BURST = 4 << 10
_QUEUE_S = 0.01
_SHORTEST_QUEUE = 256 << 10
_PATIENCE_S = 30.0
_MOST_RAILS = 7


class NetworkHost:
    """One host: its address, and the processes started on it."""

    def __init__(
        self, number: int, network: int, identity: str, reaper: Reaper
    ) -> None:
        """Made by Hosts."""
        self.number = number
        self.name = f"host{number}"
        self.address = self.address_on(0)
        self.address6 = self.address6_on(0)
        self.identity = identity
        self._network, self._reaper = network, reaper
        self._processes: list[subprocess.Popen[Any]] = []

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process on this host; `env` is added to our own environment.

        It leads a process group. `options` are those of subprocess.Popen.
        """
        environment = {**os.environ, "UNISONO_HOST_ID": self.identity, **(env or {})}

        def start() -> subprocess.Popen[Any]:
            with warnings.catch_warnings():
                # It warns of code between fork and exec with threads: ours has no lock.
                warnings.simplefilter("ignore", DeprecationWarning)
                return subprocess.Popen(
                    command,
                    env=environment,
                    process_group=0,
                    preexec_fn=self._reaper.register,
                    **options,
                )

        process = self.call(start)
        self._processes.append(process)
        return process

    def address_on(self, card: int) -> str:
        """Its IPv4 address on eth0, eth1 and so on."""
        return f"10.{77 + card}.0.{self.number + 1}"

    def address6_on(self, card: int) -> str:
        """Its IPv6 address on eth0, eth1 and so on."""
        return f"fd00:{77 + card}::{self.number + 1:x}"

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of function(*args), called in a thread on this host.

        Sockets that it makes belong to this host for ever.
        """
        return call_inside(self._network, self.name, lambda: function(*args))

    def end(self) -> None:
        """Kill all processes of this host, and wait until they are gone."""
        until = time.monotonic() + _PATIENCE_S
        while kill_inside(self._network):
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(until - time.monotonic(), 0.0))
            if time.monotonic() > until:
                raise UnisonoError(f"{self.name}: has processes that cannot be killed")
            time.sleep(0.005)
        for process in self._processes:
            process.poll()

    def __repr__(self) -> str:
        """Name and address."""
        return f"<{self.name} {self.address}>"


class Hosts:
    """Hosts and the switch between them, as long as the context is open."""

    def __init__(
        self,
        num_hosts: int,
        *,
        rate: str | None = None,
        latency: str | None = None,
        queue: str | None = None,
        rails: Sequence[str | None] = (),
    ) -> None:
        """Check the arguments.

        `rate` limits both directions of every host's link ("1gbit", "20mbit"). `rails`
        are the rates of further links of every host, None for no limit. `latency` is
        added to every packet from host to host ("5ms"), for which the kernel must have
        netem. `queue` is how much may wait before a link ("16M"): where all send to
        one, a short queue loses packets, and TCP waits for 200 ms.
        """
        self._num_hosts = whole_number("Hosts: num_hosts", num_hosts)
        if not 1 <= self._num_hosts <= _MOST_HOSTS:
            raise BadArgument(f"Hosts({num_hosts}): expected 1 to {_MOST_HOSTS} hosts")
        if len(rails) > _MOST_RAILS:
            raise BadArgument(f"Hosts: rails: expected at most {_MOST_RAILS}")
        self._rates = [
            None if each is None else parse_rate(each) for each in (rate, *rails)
        ]
        self._latency_s = 0.0 if latency is None else parse_seconds(latency)
        self._queue = None if queue is None else parse_bytes(queue)
        if self._queue is not None and self._queue < _SHORTEST_QUEUE:
            raise BadArgument(f"Hosts: queue = {queue}: expected 256K or more")
        self._hosts: list[NetworkHost] = []
        self._vanished: set[int] = set()
        self._num_bridges = 1
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        """Create and connect the hosts; UsageError if that is not possible."""
        if why := hosts_available():
            raise UsageError(f"Hosts: {why}")
        if self._latency_s and (why := _netem_missing()):
            raise UsageError(f"Hosts: latency: {why}")
        with self._open as undo:
            reaper = undo.enter_context(Reaper())
            self._switch = _kept(undo)
            job = secrets.token_hex(8)
            for number in range(self._num_hosts):
                identity = f"host{number}-{job}"
                self._hosts.append(NetworkHost(number, _kept(undo), identity, reaper))
            undo.callback(self._end)
            self._join()
            self._open = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill all processes; the kernel removes the rest."""
        self._open.close()

    def __len__(self) -> int:
        """The number of hosts."""
        return len(self._hosts)

    def __getitem__(self, number: int) -> NetworkHost:
        """One of them."""
        return self._hosts[number]

    def __iter__(self) -> Iterator[NetworkHost]:
        """All of them."""
        return iter(self._hosts)

    def partition(self, *groups: Iterable[int]) -> None:
        """From now on only hosts of one group reach each other; packets are dropped.

        Packets between groups are lost without a word. Hosts that no group names are
        one group more. A new partition takes the place of an earlier one, and those
        who have vanished remain so.
        """
        named = [[self._number(i) for i in group] for group in groups]
        together = [i for group in named for i in group]
        if len(set(together)) < len(together):
            raise BadArgument(f"partition: {named}: a host is in one group only")
        rest = [host.number for host in self if host.number not in together]
        lines = []
        for number, group in enumerate([*named, rest]):
            present = [i for i in group if i not in self._vanished]
            for card in range(len(self._rates)):
                bridge = _bridge(number, card)
                if number >= self._num_bridges:
                    lines += _bridge_lines(bridge)
                lines += [f"link set {_port(i, card)} master {bridge}" for i in present]
        self._at_switch(lines)
        self._forget_addresses()
        self._num_bridges = max(self._num_bridges, len(named) + 1)

    def heal(self) -> None:
        """All hosts reach each other again, those that had vanished too."""
        self._vanished.clear()
        ports = [(host.number, k) for host in self for k in range(len(self._rates))]
        self._at_switch(
            [f"link set {_port(i, k)} master {_bridge(0, k)} up" for i, k in ports]
        )
        self._forget_addresses()

    def vanish(self, number: int) -> None:
        """Disconnect this host until `heal`: all its packets are dropped.

        Its link stays up. A link that goes down is seen by the kernel at its other end,
        which is more than a host learns of another one that has lost its power.
        """
        number = self._number(number)
        self._vanished.add(number)
        cards = range(len(self._rates))
        self._at_switch([f"link set {_port(number, k)} nomaster" for k in cards])

    def unplug(self, number: int, card: int = 0) -> None:
        """Take one link of a host down until `heal`; its kernel sees that."""
        port = _port(self._number(number), self._card(card))
        self._at_switch([f"link set {port} down"])

    def limit(self, number: int, rate: str | None, card: int = 0) -> None:
        """Another rate for both directions of a host's link; None for no limit."""
        host = self._hosts[self._number(number)]
        bits = None if rate is None else parse_rate(rate)
        self._shape(host, self._card(card), bits)

    # --- construction

    def _join(self) -> None:
        lines = ["link set lo up"]
        for card in range(len(self._rates)):
            lines += _bridge_lines(_bridge(0, card))
            for host in self:
                # By the path of our descriptor, since this network has no name.
                where = f"/proc/{os.getpid()}/fd/{host._network}"
                port = _port(host.number, card)
                lines += [
                    f"link add dev {port} type veth peer name eth{card} netns {where}",
                    f"link set {port} master {_bridge(0, card)} up",
                ]
        self._at_switch(lines)
        for host in self:
            lines = ["link set lo up"]
            for card in range(len(self._rates)):
                lines += [
                    f"addr add {host.address_on(card)}/24 dev eth{card}",
                    f"addr add {host.address6_on(card)}/64 dev eth{card} nodad",
                    f"link set eth{card} up",
                ]
            host.call(_tell, ["ip", "-batch", "-"], lines)
            for card, rate in enumerate(self._rates):
                self._shape(host, card, rate)

    def _shape(self, host: NetworkHost, card: int, rate: int | None) -> None:
        name, port = f"eth{card}", _port(host.number, card)
        host.call(_tell, ["tc", "-batch", "-"], self._shaping(name, rate))
        host.call(_tell, ["ip", "-batch", "-"], _sizing(name, rate))
        self._in_switch(["tc", "-batch", "-"], self._shaping(port, rate))
        self._in_switch(["ip", "-batch", "-"], _sizing(port, rate))

    def _shaping(self, device: str, rate: int | None) -> list[str]:
        delay_s = self._latency_s / 2  # once to the switch, once from it
        return _shaping(device, rate, delay_s, self._queue)

    def _forget_addresses(self) -> None:
        """Let hosts ask anew where others are.

        A question that was asked in vain before fails seconds later, and with it
        connections that were begun after that.
        """
        for host in self:
            host.call(_tell, ["ip", "-batch", "-"], ["neigh flush all"])

    def _at_switch(self, lines: Sequence[str]) -> None:
        self._in_switch(["ip", "-batch", "-"], lines)

    def _in_switch(self, command: Sequence[str], lines: Sequence[str]) -> None:
        call_inside(self._switch, "switch", lambda: _tell(command, lines))

    def _number(self, number: int) -> int:
        number = whole_number("host", number)
        if not 0 <= number < len(self._hosts):
            raise BadArgument(
                f"host {number}: expected 0 to {len(self._hosts) - 1}, "
                "as long as the context is open"
            )
        return number

    def _card(self, card: int) -> int:
        card = whole_number("card", card)
        if not 0 <= card < len(self._rates):
            raise BadArgument(f"card {card}: expected 0 to {len(self._rates) - 1}")
        return card

    def _end(self) -> None:
        for host in self._hosts:
            host.end()
        self._hosts.clear()


@cache
def hosts_available() -> str:
    """Why hosts cannot be created here, or "" if they can."""
    if sys.platform != "linux":
        return f"needs network namespaces, which {sys.platform} has not"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}, of the package iproute2"
    try:
        return _tried("tbf rate 1gbit burst 16kb limit 256kb", "veth links and tbf")
    except PermissionError as why:
        return f"needs root: {why.strerror}"
    except OSError as why:
        return f"needs namespaces of networks, mounts and host names: {why}"


def needs_hosts() -> Any:
    """A pytest mark that skips tests where hosts cannot be created, with the reason.

    For a test, or for a whole file: `pytestmark = needs_hosts()`.
    """
    import pytest

    why = hosts_available()
    return pytest.mark.skipif(bool(why), reason=why)


@cache
def _netem_missing() -> str:
    why = _tried("netem delay 1ms", "netem")
    return why and f"{why}; delay the bytes of a connection with testing.Proxy instead"


def _tried(discipline: str, what: str) -> str:
    """Try a link with this queueing discipline; what the kernel lacks."""
    network = new_network()
    links = [*_bridge_lines("group0"), "link add dev port0 type veth peer name eth0"]
    try:
        call_inside(network, "trial", lambda: _tell(["ip", "-batch", "-"], links))
        discipline = f"qdisc replace dev port0 root {discipline}"
        call_inside(
            network, "trial", lambda: _tell(["tc", "-batch", "-"], [discipline])
        )
    except UnisonoError as why:
        return f"needs {what}, which this kernel refuses: {why}"
    finally:
        os.close(network)
    return ""


def _kept(undo: contextlib.ExitStack) -> int:
    network = new_network()
    undo.callback(os.close, network)
    return network


def _port(host: int, card: int) -> str:
    """The switch's end of a link."""
    return f"port{host}" + (f"c{card}" if card else "")


def _bridge(group: int, card: int) -> str:
    """What joins the links of a group of hosts that are on one card of each."""
    return f"group{group}" + (f"c{card}" if card else "")


def _bridge_lines(name: str) -> list[str]:
    # Without snooping IPv6 neighbours are found at once.
    return [
        f"link add dev {name} type bridge mcast_snooping 0",
        f"link set {name} up",
    ]


def _shaping(
    device: str, rate: int | None, delay_s: float, queue: int | None
) -> list[str]:
    """The queueing disciplines of a device: first delay, then rate limit."""
    lines = [f"qdisc replace dev {device} root handle 9: pfifo limit 1000"]
    at = "root handle 1:"
    if delay_s:
        lines.append(
            f"qdisc replace dev {device} {at} netem delay {delay_s * 1e6:.0f}us "
            "limit 100000"
        )
        at = "parent 1: handle 2:"
    if rate is not None:
        usual = max(_SHORTEST_QUEUE, int(rate / 8 * _QUEUE_S))
        lines.append(
            f"qdisc replace dev {device} {at} tbf rate {rate}bit "
            f"burst {_burst(rate)} limit {queue or usual}"
        )
    return lines


def _sizing(device: str, rate: int | None) -> list[str]:
    """Packets that the bucket can let through whole; larger it would cut to pieces."""
    largest = 65536 if rate is None else min(65536, _burst(rate))
    return [f"link set dev {device} gso_max_size {largest}"]


def _burst(rate: int) -> int:
    return max(_SMALLEST_BURST, int(rate / 8 * _BURST_S))


def _tell(command: Sequence[str], lines: Sequence[str]) -> None:
    """Run these lines with ip or tc."""
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        raise UnisonoError(f"{command[0]}: {' '.join(done.stderr.split())}")
