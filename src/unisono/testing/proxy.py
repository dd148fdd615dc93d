"""A faulty network between two processes, without privileges: a fault-injecting proxy.

    with Proxy("127.0.0.1:4000") as proxy:
        ...                                   # others dial proxy.address
        proxy.delay(20)                       # milliseconds, both ways
        proxy.corrupt(at=1_000_000, direction="forth")
        proxy.freeze()                        # a partition
        proxy.thaw()

It listens on loopback and passes every TCP connection on to its target. Rules can be
set and changed at any time: for the bytes that go *forth* to the target, for those that
come *back* from it, or for both. A call returns when the rule is in force. They hold
for the connections of today and of tomorrow. What was done to bytes is in `log`.

Ranks find each other by the addresses that they publish. A rank that is started with
UNISONO_ADVERTISE=host:port publishes this instead of where it listens: so make a proxy,
give that rank `UNISONO_ADVERTISE=proxy.address`, and set `proxy.target` to where it
really listens once that is known; till then those who dial wait. For rank 0 nothing is
needed but the address by which the others are started, UNISONO_ADDRESS=proxy.address.

Without rules one stream had 1.2 to 1.6 GB/s through it, on two cores where it has
2.7 without it. The proxy is a thread of its own, on the host where it is made: for one
of `testing.Hosts` that is `host.call(lambda: Proxy(target, listen=host.address))`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from unisono.errors import BadArgument, unknown, whole_number
from unisono.testing._relay import ProxyEvent, Relay
from unisono.testing._streams import FaultRules, FaultSelection

__all__ = ["Direction", "Proxy", "ProxyEvent"]

Direction = Literal["forth", "back", "both"]
Address = str | tuple[str, int]

_WAYS = {"forth": ("forth",), "back": ("back",), "both": ("forth", "back")}


class Proxy:
    """Forwards connections to `target`, and injects faults."""

    def __init__(
        self,
        target: Address | None = None,
        *,
        listen: str = "127.0.0.1",
        seed: int = 0,
    ) -> None:
        """Listen at once, on a free port.

        `target` is "host:port" or a pair, and may be set later. `seed` decides what is
        left to chance: the same for connections that come in the same order.
        """
        found = None if target is None else _address(target)
        self._relay = Relay(found, listen, whole_number("Proxy: seed", seed))
        host = f"[{listen}]" if ":" in listen else listen
        self.address = f"{host}:{self._relay.port}"
        """The address to connect to instead of the target."""

    @property
    def target(self) -> tuple[str, int] | None:
        """Where new connections are forwarded to; if None, they wait."""
        return self._relay.target

    @target.setter
    def target(self, target: Address) -> None:
        found = _address(target)
        self._relay.do(lambda: setattr(self._relay, "target", found))

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes forwarded in each direction."""
        return self._relay.do(self._relay.nbytes)

    @property
    def connections(self) -> int:
        """The number of connections so far."""
        return self._relay.connections

    @property
    def log(self) -> list[ProxyEvent]:
        """The injected faults so far, in order."""
        return list(self._relay.log)

    # --- rules

    def delay(self, ms: float, direction: Direction = "both") -> None:
        """Delay every byte; 0 for no delay."""
        _refuse_negative("delay: ms", ms)
        self._rule(direction, delay_s=ms / 1e3)

    def throttle(
        self, nbytes_per_s: float | None, direction: Direction = "both"
    ) -> None:
        """Limit the rate of each connection in a direction; None for no limit."""
        if nbytes_per_s is not None and not nbytes_per_s > 0:
            raise BadArgument(f"throttle: {nbytes_per_s} bytes/s: expected more than 0")
        self._rule(direction, nbytes_per_s=nbytes_per_s or math.inf)

    def freeze(self, direction: Direction = "both") -> None:
        """Forward nothing, and keep all connections: a partition."""
        self._rule(direction, frozen=True)

    def thaw(self, direction: Direction = "both") -> None:
        """Continue where `freeze` stopped; nothing was lost."""
        self._rule(direction, frozen=False)

    def corrupt(
        self,
        at: int | Iterable[int] | None = None,
        *,
        probability: float = 0.0,
        bit: int = 0,
        direction: Direction = "both",
    ) -> None:
        """Flip a bit of every stream's byte number `at`, or of random bytes.

        With neither of them, of the very next byte that passes.
        """
        bit = whole_number("corrupt: bit", bit)
        if not 0 <= bit < 8:
            raise BadArgument(f"corrupt: bit = {bit}: a byte has bits 0 to 7")
        chance = _chance("corrupt", at, probability)
        following = at is None and not probability
        self._rule(direction, corrupt=chance, corrupt_next=following, bit=bit)

    def truncate(self, at: int, direction: Direction = "both") -> None:
        """Every stream ends after `at` bytes, as if its sender had closed it there."""
        at = whole_number("truncate: at", at)
        _refuse_negative("truncate: at", at)
        self._rule(direction, truncate_at=at)

    def duplicate(
        self,
        frame_nbytes: int,
        at: int | Iterable[int] | None = None,
        *,
        probability: float = 0.0,
        first: int = 0,
        direction: Direction = "both",
    ) -> None:
        """Forward frame number `at` twice, or random frames.

        The stream is taken for frames of `frame_nbytes` that begin at byte `first`.
        """
        self._frames("duplicate", frame_nbytes, at, probability, first, direction)

    def reorder(
        self,
        frame_nbytes: int,
        at: int | Iterable[int] | None = None,
        *,
        probability: float = 0.0,
        first: int = 0,
        direction: Direction = "both",
    ) -> None:
        """Forward frame number `at` after the next one, or random frames.

        A frame that none follows is held until the stream ends, or `clear`.
        """
        self._frames("reorder", frame_nbytes, at, probability, first, direction)

    def refuse(self) -> None:
        """Reset new connections from now on; existing ones continue."""
        self._relay.do(lambda: setattr(self._relay, "refuses", True))

    def drop(self) -> None:
        """Reset all existing connections, at both ends; queued bytes are lost."""

        def reset() -> None:
            for connection in list(self._relay.open_connections):
                self._relay.finish(connection, "drop")

        self._relay.do(reset)

    def half_close(self, direction: Direction = "forth") -> None:
        """Close this direction of all existing connections; the other continues."""
        directions = _directions(direction)

        def end() -> None:
            for connection in self._relay.open_connections:
                for direction in directions:
                    stream = connection.streams[direction]
                    self._relay.note(
                        connection.number, direction, "half-close", stream.taken
                    )
                    stream.end()

        self._relay.do(end)

    def clear(self) -> None:
        """Remove all rules."""

        def lift() -> None:
            self._relay.refuses = False
            for direction in self._relay.rules:
                self._relay.rules[direction] = FaultRules()
            for connection in self._relay.open_connections:
                for direction, stream in connection.streams.items():
                    stream.rules = self._relay.rules[direction]
                    stream.release()

        self._relay.do(lift)

    def close(self) -> None:
        """Reset all connections and stop listening."""
        self._relay.close()

    def __enter__(self) -> Proxy:
        """For `with Proxy(...) as proxy:`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _frames(
        self,
        what: str,
        frame_nbytes: int,
        at: int | Iterable[int] | None,
        probability: float,
        first: int,
        direction: Direction,
    ) -> None:
        size = whole_number(f"{what}: frame_nbytes", frame_nbytes)
        first = whole_number(f"{what}: first", first)
        _refuse_negative(f"{what}: first", first)
        if size < 1:
            raise BadArgument(f"{what}: frame_nbytes = {size}: expected at least 1")
        chance = _chance(what, at, probability)
        if not chance:
            raise BadArgument(f"{what}: which frames? give at= or probability=")
        self._rule(direction, frame_nbytes=size, first_frame=first, **{what: chance})

    def _rule(self, direction: Direction, **values: object) -> None:
        directions = _directions(direction)

        def change() -> None:
            for direction in directions:
                for name, value in values.items():
                    setattr(self._relay.rules[direction], name, value)

        self._relay.do(change)


def _directions(direction: str) -> tuple[str, ...]:
    if direction not in _WAYS:
        raise unknown("direction of a proxy", str(direction), _WAYS)
    return _WAYS[direction]


def _address(given: Address) -> tuple[str, int]:
    """Host and port of "127.0.0.1:4000", "[::1]:4000", or a pair."""
    if isinstance(given, str):
        host, colon, port = given.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isdecimal()):
            raise BadArgument(f"target {given!r}: expected host:port")
        given = host, int(port)
    host, number = given
    number = whole_number("target: port", number)
    if not 0 < number < 1 << 16:
        raise BadArgument(f"target: port {number}: expected 1 to 65535")
    return host, number


def _chance(
    what: str, at: int | Iterable[int] | None, probability: float
) -> FaultSelection:
    if not 0 <= probability <= 1:
        raise BadArgument(f"{what}: probability = {probability}: expected 0 to 1")
    if at is None:
        places = []
    elif isinstance(at, Iterable):
        places = list(at)
    else:
        places = [at]
    found = frozenset(whole_number(f"{what}: at", place) for place in places)
    for place in found:
        _refuse_negative(f"{what}: at", place)
    return FaultSelection(found, float(probability))


def _refuse_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise BadArgument(f"{name} = {value}: expected 0 or more")
