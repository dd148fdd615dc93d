"""A topology: nodes, directed links between them, and the way from rank to rank.

Ranks are the nodes 0..n-1; switches, network cards and the like come after. A link has
a latency, a bandwidth and a kind ("nvlink", "network"); its two directions are two
links. A route is the list of links that a message takes from one rank to another, and
routing is a function of arrays, since a simulator needs thousands at once.

A `Topology` has its name and size; links are made at first use, so that a million
ranks cost nothing until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadTopology
from unisono.schedule.collective import Ints
from unisono.units import format_bandwidth, format_seconds

Floats = NDArray[np.float64]
Route = Callable[[Ints, Ints], Ints]
"""From k sources and k destinations to a table of k rows of links; -1 is no link."""


@dataclass(frozen=True, eq=False)
class Links:
    """Directed links as arrays: from node to node, seconds, bytes per second, kind."""

    src: Ints
    dst: Ints
    latency: Floats
    bandwidth: Floats
    kind: Ints
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        """The number of links."""
        return self.src.size


@dataclass(frozen=True)
class LinkBundle:
    """Links of one kind, from `src[i]` to `dst[i]`."""

    kind: str
    src: Ints
    dst: Ints
    latency: float
    bandwidth: float


def lay(cables: Sequence[LinkBundle]) -> Links:
    """The links of all cables, numbered in the order in which they are given."""
    kinds = tuple(dict.fromkeys(cable.kind for cable in cables))
    sizes = [cable.src.size for cable in cables]
    return Links(
        np.concatenate([cable.src for cable in cables] or [_NONE]),
        np.concatenate([cable.dst for cable in cables] or [_NONE]),
        np.repeat(np.array([c.latency for c in cables], dtype=np.float64), sizes),
        np.repeat(np.array([c.bandwidth for c in cables], dtype=np.float64), sizes),
        np.repeat(
            np.array([kinds.index(c.kind) for c in cables], dtype=np.int64), sizes
        ),
        kinds,
    )


_NONE = np.empty(0, dtype=np.int64)
_COSTS = ("overhead", "reduce", "duplex", "streams")


@dataclass(frozen=True, eq=False)
class Wiring:
    """The nodes and links of a topology.

    `parts` names the nodes after the ranks: (("nvswitch", 16), ("fabric", 1)). `levels`
    are ways to cut the world into regions, each an array over the nodes with -1 for
    those in between; from them follows what no schedule can beat. The first, if there
    is any, are the hosts.
    """

    n: int
    links: Links
    route: Route
    parts: tuple[tuple[str, int], ...] = ()
    levels: tuple[tuple[str, Ints], ...] = ()
    names: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Ranks and everything else."""
        return self.n + (sum(k for _, k in self.parts) or len(self.names))

    @property
    def host(self) -> Ints:
        """The host of every rank; all on one if no hosts are given."""
        hosts = next((where for name, where in self.levels if name == "host"), None)
        return np.zeros(self.n, dtype=np.int64) if hosts is None else hosts[: self.n]

    def label(self, node: int) -> str:
        """A rank is its number; other nodes have names, as nvswitch3."""
        if node < self.n:
            return str(node)
        place = node - self.n
        if self.names:
            return self.names[place]
        for name, count in self.parts:
            if place < count:
                return name if count == 1 else f"{name}{place}"
            place -= count
        raise BadTopology(f"node {node}: there are {self.num_nodes}")

    def link_name(self, link: int) -> str:
        """From which node to which, as in "3>nvswitch0"."""
        src, dst = int(self.links.src[link]), int(self.links.dst[link])
        return f"{self.label(src)}>{self.label(dst)}"

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Links by name; parallel ones share it."""
        links: dict[str, list[int]] = {}
        for link in range(len(self.links)):
            links.setdefault(self.link_name(link), []).append(link)
        return links

    def links_named(self, text: str) -> list[int]:
        """The links that "3>nvswitch0" means; "3-nvswitch0" is both directions."""
        ends = text.split(">") if ">" in text else text.split("-")
        if len(ends) == 2:
            names = [f"{ends[0]}>{ends[1]}"]
            names += [] if ">" in text else [f"{ends[1]}>{ends[0]}"]
            links = [link for name in names for link in self.by_name.get(name, ())]
            if links:
                return links
        some = ", ".join(list(self.by_name)[:3])
        raise BadTopology(f"link {text!r}: no such link; links are named as in {some}")

    @cached_property
    def twins(self) -> Ints:
        """For each link its other direction, or -1; parallel ones pair in order."""
        twins = np.full(len(self.links), -1)
        ends = np.stack([self.links.src, self.links.dst])
        there = np.lexsort((ends[1], ends[0]))
        back = np.lexsort((ends[0], ends[1]))
        if (ends[:, there] == ends[::-1, back]).all():  # as many each way, the usual
            twins[there] = back
            return twins
        waiting: dict[tuple[int, int], list[int]] = {}
        for link, (src, dst) in enumerate(ends.T.tolist()):
            others = waiting.get((dst, src))
            if others:
                twins[link] = others.pop(0)
                twins[twins[link]] = link
            else:
                waiting.setdefault((src, dst), []).append(link)
        return twins

    def checked(self, name: str) -> Wiring:
        """This wiring, unless a link has no sensible latency or bandwidth."""
        links = self.links
        for values, what, wrong in (
            (links.bandwidth, "bandwidth", ~(links.bandwidth > 0)),
            (links.latency, "latency", ~(links.latency >= 0)),
        ):
            bad = np.flatnonzero(wrong | ~np.isfinite(values))
            if bad.size:
                raise BadTopology(
                    f"{name}: link {self.link_name(int(bad[0]))} has {what} "
                    f"{values[bad[0]]:g}; expected a finite number, "
                    f"{'above' if what == 'bandwidth' else 'not below'} 0"
                )
        return self


@dataclass(frozen=True, eq=False)
class Topology:
    """Where ranks are and how they are linked, wired up when first looked at.

    `overhead` is the time a rank needs for each message it sends, besides the links';
    `reduce` the time to add up one byte, where that is not hidden behind the links.
    `duplex` is the part of its bandwidth that a link keeps while its other direction is
    busy, too: over TCP less than 1, since acknowledgements share the link with the
    data. With `streams` messages to different ranks leave side by side, as over
    sockets, instead of step by step, and each chunk that is copied is one. A switch
    inside a host that `sums` adds up what passes through it (NVLink SHARP), for engines
    that can use it; with `network_sums` the switches between hosts do so as well
    (InfiniBand SHARP). `staged` buffers are on GPUs, and engines that cannot read them
    copy them to the host and back.
    `per_host` is how many ranks every host has, `shape` the sides of a torus; names of
    algorithms are fitted to these. `grown(k)` is the member of the same family that is
    `scale` = k large, from which costs for any size are derived.
    """

    name: str
    n: int
    wire: Callable[[], Wiring] = field(repr=False)
    overhead: float = 0.0
    reduce: float = 0.0
    per_host: int = 0
    shape: tuple[int, ...] = ()
    scale: int = 0
    grown: Callable[[int], Topology] | None = field(default=None, repr=False)
    about: str = ""
    duplex: float = 1.0
    streams: bool = False
    sums: bool = False
    staged: bool = False
    network_sums: bool = False

    def __post_init__(self) -> None:
        """Refuse a world without ranks, and times that run backwards."""
        if self.n < 1:
            raise BadTopology(f"{self.name}: {self.n} ranks; expected at least one")
        for what, value in (("overhead", self.overhead), ("reduce", self.reduce)):
            if not (0 <= value < float("inf")):
                raise BadTopology(f"{self.name}: {what} {value:g}: expected 0 or more")
        if not 0 < self.duplex <= 1:
            raise BadTopology(
                f"{self.name}: duplex {self.duplex:g}: expected above 0, at most 1"
            )

    @cached_property
    def wiring(self) -> Wiring:
        """Nodes and links, made and checked at first use."""
        return self.wire().checked(self.name)

    @cached_property
    def family(self) -> tuple[object, ...]:
        """What is the same for all members of a family, and for no other."""
        if self.grown is None:
            return (self.name,)
        small = self.grown(2)
        links = small.wiring.links
        rates = links.latency.tobytes(), links.bandwidth.tobytes()
        return (small.name, small.overhead, small.reduce, small.duplex, *rates)

    def route(self, src: Ints, dst: Ints) -> Ints:
        """The links from each source to each destination, a row for each; -1 pads."""
        return self.wiring.route(src, dst)

    def but(self, **changes: object) -> Topology:
        """The same topology with some attributes changed, its family likewise."""
        costs = {k: v for k, v in changes.items() if k in _COSTS}
        grown = self.grown
        if costs and grown is not None:
            changes.setdefault("grown", lambda k: grown(k).but(**costs))
        return replace(self, **changes)  # type: ignore[arg-type]

    def describe(self) -> dict[str, object]:
        """What there is, as plain data."""
        wiring, links = self.wiring, self.wiring.links
        kinds = [_kind(links, k) for k in range(len(links.kinds))]
        return {
            "name": self.name,
            "about": self.about,
            "ranks": self.n,
            "hosts": int(np.unique(wiring.host).size),
            "nodes": {name: count for name, count in wiring.parts},
            "overhead": self.overhead,
            "reduce": self.reduce,
            "duplex": self.duplex,
            "streams": self.streams,
            "sums": self.sums,
            "network_sums": self.network_sums,
            "staged": self.staged,
            "links": kinds,
        }

    def __str__(self) -> str:
        """A few lines for people."""
        facts = self.describe()
        hosts = "one host" if facts["hosts"] == 1 else f"{facts['hosts']} hosts"
        ranks = "one rank" if self.n == 1 else f"{self.n} ranks"
        lines = [f"{self.name}: {ranks} on {hosts}"]
        lines += [f"  {self.about}"] if self.about else []
        links = self.wiring.links
        for k, kind in enumerate(links.kinds):
            mine = np.flatnonzero(links.kind == k)
            if not mine.size:
                continue
            low, high = links.bandwidth[mine].min(), links.bandwidth[mine].max()
            rate = format_bandwidth(high)
            rate = rate if low == high else f"{format_bandwidth(low)} to {rate}"
            wait = format_seconds(float(links.latency[mine].max()))
            example = self.wiring.link_name(int(mine[0]))
            lines.append(
                f"  {kind:<10} {mine.size:>7} links  {rate:>12}  {wait:>8}  {example}"
            )
        lines.append(f"  {format_seconds(self.overhead)} for each message sent")
        return "\n".join(lines)


def _kind(links: Links, kind: int) -> dict[str, object]:
    mine = links.kind == kind
    return {
        "kind": links.kinds[kind],
        "count": int(np.count_nonzero(mine)),
        "latency": float(links.latency[mine].max(initial=0.0)),
        "least_bandwidth": float(links.bandwidth[mine].min(initial=np.inf)),
        "most_bandwidth": float(links.bandwidth[mine].max(initial=0.0)),
    }


def padded(columns: Sequence[Ints]) -> Ints:
    """Columns of links side by side, the k-th hop of every route in the k-th."""
    return np.stack(np.broadcast_arrays(*columns), axis=-1)
