"""What if the collectives of a trace ran on another network, or by another algorithm?

    answer = what_if("step.pt.trace.json.gz", "dgx-h100:2", codec="fp8")
    answer.before, answer.after, answer.calls

The computing stays as it was recorded. A collective that takes longer or shorter than
before is hidden by the same computing as before (Kineto), or runs beside whatever does
not wait for it (Chakra, where it is known what waits for what).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from unisono import codecs
from unisono.errors import BadArgument
from unisono.interop import chakra, kineto
from unisono.interop.kineto import Call
from unisono.simulate.groups import EqualGroups
from unisono.topology import Topology, parse


class Replayable(Protocol):
    """A trace of which the collectives can be given other times."""

    @property
    def calls(self) -> Sequence[Call]:
        """Its collectives."""

    @property
    def seconds(self) -> float:
        """The time from begin to end."""

    @property
    def left_out(self) -> int:
        """Collectives that keep their times, since their sizes are not known."""

    def with_times(self, seconds: list[float]) -> float:
        """The time if collectives took so long."""


@dataclass(frozen=True)
class Replaced:
    """One kind of call: how often, and its seconds in all, recorded and simulated."""

    collective: str
    ranks: int
    nbytes: int
    times: int
    before: float
    after: float
    algorithm: str


@dataclass(frozen=True)
class Answer:
    """The time of the trace before and after, and what was replaced."""

    topology: str
    before: float
    after: float
    calls: tuple[Replaced, ...]
    left_out: int


@dataclass(frozen=True)
class ChakraTrace:
    """Nodes that are run again: one thing is computed, and one sent, at a time."""

    nodes: tuple[chakra.ChakraNode, ...]
    calls: tuple[Call, ...]
    places: tuple[int, ...]
    left_out: int = 0

    @property
    def seconds(self) -> float:
        """The time with the durations that were recorded."""
        return self.with_times([call.seconds for call in self.calls])

    def with_times(self, seconds: list[float]) -> float:
        """The time if collectives took so long."""
        new = dict(zip(self.places, seconds, strict=True))
        end: dict[int, float] = {}
        free = {"compute": 0.0, "send": 0.0}
        waiting = list(enumerate(self.nodes))
        known = {node.id for node in self.nodes}
        while waiting:
            later = []
            for place, node in waiting:
                if any(other in known and other not in end for other in node.after):
                    later.append((place, node))
                    continue
                sends = node.kind in ("collective", "send", "recv")
                stream = "send" if sends else "compute"
                begin = max([free[stream], *(end.get(o, 0.0) for o in node.after)])
                end[node.id] = begin + new.get(place, node.seconds)
                free[stream] = end[node.id]
            if len(later) == len(waiting):
                raise BadArgument("chakra: nodes wait for each other in a circle")
            waiting = later
        return max(end.values(), default=0.0)


def read(path: Path | str) -> Replayable:
    """A trace of one rank: Chakra's (.et), or one in Chrome's form."""
    if Path(path).suffix != ".et":
        return kineto.load(path)
    nodes, calls, places, unknown = tuple(chakra.load(path)), [], [], 0
    for place, node in enumerate(nodes):
        if node.kind != "collective":
            continue
        kind = int(node.attributes.get("comm_type", -1))
        nbytes = int(node.attributes.get("comm_size", 0))
        if not 0 <= kind < len(chakra.COLLECTIVES) or not nbytes:
            unknown += 1
            continue
        what = chakra.COLLECTIVES[kind]
        calls.append(Call(what, nbytes, 4, 0, 1, node.seconds))
        places.append(place)
    return ChakraTrace(nodes, tuple(calls), tuple(places), unknown)


def what_if(
    path: Path | str,
    topology: Topology | str,
    *,
    algorithm: str = "auto",
    codec: str = "none",
) -> Answer:
    """The time of a trace if its collectives ran there, simulated by steps.

    With "auto" the quickest of the usual algorithms is taken for each; with a codec
    every call sends fewer bytes (what encoding costs is not counted).
    """
    where = parse(topology) if isinstance(topology, str) else topology
    trace = read(path)
    priced = [_priced(call, where, algorithm, codec) for call in trace.calls]
    kinds: dict[tuple[str, int, int, str], list[tuple[float, float]]] = {}
    for call, (seconds, name) in zip(trace.calls, priced, strict=True):
        key = call.collective, call.ranks or where.n, call.nbytes, name
        kinds.setdefault(key, []).append((call.seconds, seconds))
    replaced = (
        Replaced(
            what,
            ranks,
            nbytes,
            len(each),
            sum(old for old, _ in each),
            sum(new for _, new in each),
            name,
        )
        for (what, ranks, nbytes, name), each in kinds.items()
    )
    return Answer(
        where.name,
        trace.seconds,
        trace.with_times([seconds for seconds, _ in priced]),
        tuple(sorted(replaced, key=lambda one: -one.after)),
        trace.left_out,
    )


def _priced(
    call: Call, topology: Topology, algorithm: str, codec: str
) -> tuple[float, str]:
    size, n = call.ranks or topology.n, topology.n
    if size == 1:
        return call.seconds, "as recorded"
    stride = call.stride if size < n else 1
    if stride < 1 or n % (size * stride):
        raise BadArgument(
            f"what-if: a group of {size} ranks, {stride} apart, does not divide the "
            f"{n} ranks of {topology.name}; name a topology with a multiple of them"
        )
    ranks = np.arange(n).reshape(-1, size, stride).transpose(0, 2, 1)
    members = np.ascontiguousarray(ranks.reshape(-1, size))
    nbytes = call.nbytes
    if codec != "none":
        nbytes = round(nbytes * min(1.0, codecs.get(codec).share(call.itemsize)))
    return EqualGroups(topology, members, algorithm).time(call.collective, nbytes)
