"""Conditions of a run: which ranks are late, which links are slow or failed.

    Conditions(delays={3: 1e-3}, slow={"0>switch": 0.1}, failed=["4-5"])

Links are named as `unisono topology show` names them: "a>b" is one direction, "a-b"
both. A `CodecModel` gives the share of the bytes that is sent, and its cost on the
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.errors import BadArgument
from unisono.schedule.collective import Collective, Ints
from unisono.simulate.bound import least_time
from unisono.topology.routing import around
from unisono.topology.topology import Floats, Route, Topology


@dataclass(frozen=True)
class CodecModel:
    """`ratio` of the bytes is sent; encoding and decoding take seconds per byte."""

    ratio: float = 1.0
    encode: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 0 < self.ratio < float("inf"):
            raise BadArgument(f"codec: ratio {self.ratio:g}: expected above 0")
        for what, value in (("encode", self.encode), ("decode", self.decode)):
            if not 0 <= value < float("inf"):
                raise BadArgument(f"codec: {what} {value:g}: expected 0 or more")


@dataclass(frozen=True)
class Conditions:
    """What differs from the topology; by default nothing does.

    `delays` are seconds by which ranks begin late, `slow` the part of its bandwidth
    that a link still has, `reduce` seconds to add up a byte, instead of the topology's.
    """

    delays: Mapping[int, float] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)
    failed: Sequence[str] = ()
    reduce: float | None = None
    codec: CodecModel = CodecModel()

    @property
    def usual(self) -> bool:
        """Whether nothing differs from the topology."""
        return not self.delays and not self.slow and not self.failed


@dataclass(frozen=True, eq=False)
class SimulatedWorld:
    """A topology under conditions, as the simulators need it.

    The arrays over links have one more at the end, the link that is none: no latency,
    no limit. So the -1 of a padded route finds it.
    """

    topology: Topology
    n: int
    route: Route
    latency: Floats
    bandwidth: Floats
    start: Floats
    reduce: float
    codec: CodecModel
    failed: Ints

    def bound(self, what: Collective, nbytes: float, root: int) -> float:
        """What no schedule can beat: with these links, and the bytes that are sent."""
        rate = self.bandwidth[:-1].copy()
        rate[self.failed] = 0.0
        sent = nbytes * self.codec.ratio
        return least_time(what, self.topology, sent, root, rate)

    @property
    def overhead(self) -> float:
        """The time a rank needs for each message that it sends."""
        return self.topology.overhead

    @property
    def twins(self) -> Ints:
        """The other direction of each link; none if that makes no difference."""
        busy = self.topology.duplex < 1
        return self.topology.wiring.twins if busy else np.empty(0, dtype=np.int64)

    @classmethod
    def of(cls, topology: Topology, conditions: Conditions) -> SimulatedWorld:
        """The topology under these conditions, or the reason why that cannot be."""
        wiring = topology.wiring
        bandwidth = wiring.links.bandwidth.copy()
        for name, left in conditions.slow.items():
            if not 0 < left < float("inf"):
                raise BadArgument(
                    f"slow link {name}: {left:g} of its bandwidth; expected above 0 "
                    "(a link that is down is a failed one)"
                )
            bandwidth[wiring.links_named(name)] *= left
        broken = [k for name in conditions.failed for k in wiring.links_named(name)]
        reduce = topology.reduce if conditions.reduce is None else conditions.reduce
        if not 0 <= reduce < float("inf"):
            raise BadArgument(f"reduce = {reduce:g}: expected 0 or more")
        failed = np.array(sorted(set(broken)), dtype=np.int64)
        route = wiring.route if not broken else around(topology.name, wiring, failed)
        return cls(
            topology,
            topology.n,
            route,
            np.append(wiring.links.latency, 0.0),
            np.append(bandwidth, np.inf),
            _starts(topology.n, conditions.delays),
            reduce,
            conditions.codec,
            failed,
        )


def _starts(n: int, delays: Mapping[int, float]) -> Floats:
    start = np.zeros(n)
    for rank, late in delays.items():
        if not 0 <= rank < n:
            raise BadArgument(f"delay of rank {rank}: ranks are 0..{n - 1}")
        if not 0 <= late < float("inf"):
            raise BadArgument(f"delay of rank {rank}: {late:g} s; expected 0 or more")
        start[rank] = late
    return start
