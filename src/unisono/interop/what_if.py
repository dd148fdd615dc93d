"""What if the collectives of a trace ran on another network, or by another library?

    answer = what_if("step.pt.trace.json.gz", "dgx-h100:2", codec="fp8")
    by_nccl = what_if("step.pt.trace.json.gz", "dgx-h100:2", engine="nccl")
    answer.before, answer.after, answer.calls

The computing stays as it was recorded. A collective that takes longer or shorter than
before is hidden by the same computing as before (Kineto), or runs beside whatever does
not wait for it (Chakra, where it is known what waits for what).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from unisono import codecs
from unisono.errors import BadArgument
from unisono.interop import chakra, kineto
from unisono.interop.kineto import Call
from unisono.simulate.engines.engine import OURS
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
    engine: str
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
    engine: str = OURS,
) -> Answer:
    """The time of a trace if its collectives ran there, simulated by steps.

    With "auto" the quickest of the usual algorithms is taken for each; with a codec
    every call sends fewer bytes (what encoding costs is not counted). With another
    engine, as "nccl", they are the calls of that library, by its model; it has neither
    our algorithms nor our codecs.
    """
    _refuse(engine, algorithm=algorithm != "auto", codec=codec != "none")
    where = parse(topology) if isinstance(topology, str) else topology
    trace, prices = read(path), _Prices(where, algorithm, codec, engine)
    priced = [prices.of(call) for call in trace.calls]
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
        engine,
        trace.seconds,
        trace.with_times([seconds for seconds, _ in priced]),
        tuple(sorted(replaced, key=lambda one: -one.after)),
        trace.left_out,
    )


def _refuse(engine: str, **given: bool) -> None:
    """Refuse options that only schedules have, with an engine that has none."""
    for option, value in given.items():
        if value and engine != OURS:
            raise BadArgument(
                f"what-if: {option} is for schedules, and the engine {engine} has "
                "none; leave one of the two out"
            )


@dataclass
class _Prices:
    """What calls take; equal groups are simulated once for each kind of call."""

    topology: Topology
    algorithm: str
    codec: str
    engine: str
    _groups: dict[tuple[int, int], EqualGroups] = field(default_factory=dict)

    def of(self, call: Call) -> tuple[float, str]:
        """Seconds, and by what."""
        size = call.ranks or self.topology.n
        if size == 1:
            return call.seconds, "as recorded"
        stride = call.stride if size < self.topology.n else 1
        if (size, stride) not in self._groups:
            self._groups[size, stride] = self._made(size, stride)
        nbytes = call.nbytes
        if self.codec != "none":
            share = codecs.get(self.codec).share(call.itemsize)
            nbytes = round(nbytes * min(1.0, share))
        return self._groups[size, stride].time(call.collective, nbytes)

    def _made(self, size: int, stride: int) -> EqualGroups:
        n = self.topology.n
        if stride < 1 or n % (size * stride):
            raise BadArgument(
                f"what-if: a group of {size} ranks, {stride} apart, does not divide "
                f"the {n} ranks of {self.topology.name}; name a topology with a "
                "multiple of them"
            )
        ranks = np.arange(n).reshape(-1, size, stride).transpose(0, 2, 1)
        members = np.ascontiguousarray(ranks.reshape(-1, size))
        return EqualGroups(self.topology, members, self.algorithm, self.engine)
