"""A user's own topology, as a TOML file.

    name = "two boxes"
    ranks = 4
    hosts = [[0, 1], [2, 3]]            # optional: which ranks share a host
    switches = ["left", "right"]        # nodes besides the ranks
    overhead = "1us"                    # optional: for each message a rank sends
    reduce = "20GB/s"                   # optional: how fast a rank adds up
    duplex = 0.95                       # optional: of a link, while both ways are busy
    streams = true                      # optional: messages to several ranks at once
    sums = true                         # optional: the switch of a host adds up
    network_sums = true                 # optional: those between hosts add up
    staged = true                       # optional: engines may copy from GPUs to hosts

    [kinds.bus]
    latency = "500ns"
    bandwidth = "25GB/s"

    [kinds.wire]
    latency = "5us"
    bandwidth = "100Gb/s"

    [[links]]                           # both directions
    between = [["0..1"], ["left"]]
    kind = "bus"

    [[links]]                           # one direction
    from = ["left"]
    to = ["right"]
    kind = "wire"

A list of links joins each of the first to each of the second. Links of one kind between
the same two nodes act as one, with the sum of their bandwidths; of different kinds the
quickest is used alone. Messages take the quickest path; ranks forward messages for
others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from unisono.errors import BadArgument, BadTopology, unknown
from unisono.schedule.collective import Ints
from unisono.topology.routing import Paths, seconds
from unisono.topology.topology import LinkBundle, Links, Topology, Wiring, lay
from unisono.units import parse_bandwidth, parse_seconds

MOST = 1 << 16


class _LinkKind(msgspec.Struct, forbid_unknown_fields=True):
    latency: str | float
    bandwidth: str | float


class _LinkEntry(
    msgspec.Struct, forbid_unknown_fields=True, rename={"from_": "from"}, kw_only=True
):
    kind: str
    between: tuple[list[str | int], list[str | int]] | None = None
    from_: list[str | int] | None = None
    to: list[str | int] | None = None


class _TopologyFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    ranks: int
    kinds: dict[str, _LinkKind]
    links: list[_LinkEntry]
    name: str = ""
    hosts: list[list[int]] = []
    switches: list[str] = []
    overhead: str | float = 0.0
    reduce: str | float = 0.0
    duplex: float = 1.0
    streams: bool = False
    sums: bool = False
    network_sums: bool = False
    staged: bool = False


def load(path: Path) -> Topology:
    """Read a topology, or raise BadTopology with what is wrong in which file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise BadTopology(f"{path}: cannot be read: {why}") from why
    return loads(text, str(path))


def loads(text: str, where: str = "topology") -> Topology:
    """The topology that the text of a file describes."""
    try:
        file = msgspec.convert(tomllib.loads(text), type=_TopologyFile)
        return _topology(file, where)
    except BadTopology as why:
        raise BadTopology(f"{where}: {why}") from why
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError, BadArgument) as why:
        raise BadTopology(f"{where}: not a topology: {why}") from why


def _topology(file: _TopologyFile, where: str) -> Topology:
    if not 1 <= file.ranks <= MOST:
        raise BadTopology(f"ranks = {file.ranks}: expected 1 to {MOST}")
    node = {str(r): r for r in range(file.ranks)}
    node |= {name: file.ranks + i for i, name in enumerate(file.switches)}
    if len(node) != file.ranks + len(file.switches):
        raise BadTopology("switches: a name is listed twice, or is that of a rank")
    cables = [cable for link in file.links for cable in _cables(link, file, node)]
    links, unused = _joined(lay(cables))
    name = file.name or where
    host = _hosts(file)
    levels = (("host", _with_switches(host, len(file.switches), links)),)
    wiring = Wiring(
        file.ranks,
        links,
        lambda src, dst: paths.table(src, dst),
        levels=levels if file.hosts else (),
        names=tuple(file.switches),
    )
    wiring.checked(name)
    paths = Paths(name, links, len(node), np.empty(0, dtype=np.int64))
    _refuse_unreachable(paths, file.ranks)
    rate = _number(file.reduce, parse_bandwidth)
    sizes = np.bincount(host)
    return Topology(
        name,
        file.ranks,
        lambda: wiring,
        _number(file.overhead, parse_seconds),
        1 / rate if rate else 0.0,
        per_host=int(sizes[0]) if file.hosts and (sizes == sizes[0]).all() else 0,
        about=f"read from {where}"
        + (f"; {unused} links beside quicker ones are not used" if unused else ""),
        duplex=file.duplex,
        streams=file.streams,
        sums=file.sums,
        network_sums=file.network_sums,
        staged=file.staged,
    )


def _cables(
    link: _LinkEntry, file: _TopologyFile, node: dict[str, int]
) -> Iterable[LinkBundle]:
    if link.kind not in file.kinds:
        raise unknown("kind of link", link.kind, file.kinds)
    if (link.between is None) == (link.from_ is None or link.to is None):
        raise BadTopology('links: each has either "between", or "from" and "to"')
    first, second = link.between or (link.from_ or [], link.to or [])
    a, b = _nodes(first, node), _nodes(second, node)
    src, dst = np.repeat(a, b.size), np.tile(b, a.size)
    apart = src != dst
    kind = file.kinds[link.kind]
    latency = _number(kind.latency, parse_seconds)
    bandwidth = _number(kind.bandwidth, parse_bandwidth)
    yield LinkBundle(link.kind, src[apart], dst[apart], latency, bandwidth)
    if link.between is not None:
        yield LinkBundle(link.kind, dst[apart], src[apart], latency, bandwidth)


def _joined(links: Links) -> tuple[Links, int]:
    """Without parallel links; and how many are left out because others are quicker."""
    ends = np.stack([links.src, links.dst, links.kind])
    _, first, which = np.unique(ends, axis=1, return_index=True, return_inverse=True)
    if first.size == len(links):
        bundles = links
    else:
        order = np.argsort(first)
        total = np.zeros(first.size)
        np.add.at(total, which.ravel(), links.bandwidth)
        bundles = replace(_some(links, first[order]), bandwidth=total[order])
    _, pair = np.unique(
        np.stack([bundles.src, bundles.dst]), axis=1, return_inverse=True
    )
    with np.errstate(divide="ignore"):  # what has no bandwidth is refused later
        ranked = np.lexsort((seconds(bundles), pair.ravel()))
    _, best = np.unique(pair.ravel()[ranked], return_index=True)
    return _some(bundles, np.sort(ranked[best])), len(bundles) - best.size


def _some(links: Links, which: Ints) -> Links:
    return Links(
        links.src[which],
        links.dst[which],
        links.latency[which],
        links.bandwidth[which],
        links.kind[which],
        links.kinds,
    )


def _nodes(names: list[str | int], node: dict[str, int]) -> Ints:
    """The nodes of some names; "0..7" is a range of ranks."""
    nodes: list[int] = []
    for name in map(str, names):
        span = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", name)
        each = map(str, range(int(span[1]), int(span[2]) + 1)) if span else [name]
        for one in each:
            if one not in node:
                raise BadTopology(f"links: {unknown('node', one, node)}")
            nodes.append(node[one])
    return np.array(nodes, dtype=np.int64)


def _number(value: str | float, parse: object) -> float:
    return parse(value) if isinstance(value, str) else float(value)  # type: ignore[operator]


def _hosts(file: _TopologyFile) -> Ints:
    host = np.full(file.ranks, -1)
    for i, ranks in enumerate(file.hosts):
        for rank in ranks:
            if not 0 <= rank < file.ranks or host[rank] >= 0:
                raise BadTopology(
                    f"hosts: rank {rank} is listed twice, or not one of {file.ranks}"
                )
            host[rank] = i
    if file.hosts and (host < 0).any():
        raise BadTopology(f"hosts: rank {int(np.argmin(host))} is on none of them")
    host[host < 0] = 0  # no hosts given: one host
    return host


def _with_switches(host: Ints, switches: int, links: Links) -> Ints:
    """A switch belongs to a host if all ranks it is linked to do, else to none."""
    n = host.size
    host_of = np.concatenate([host, np.full(switches, -1)])
    for node in range(n, n + switches):
        near = np.concatenate(
            [links.dst[links.src == node], links.src[links.dst == node]]
        )
        own = np.unique(host[near[near < n]])
        if own.size == 1:
            host_of[node] = own[0]
    return host_of


def _refuse_unreachable(paths: Paths, n: int) -> None:
    """All ranks reach each other if all reach rank 0 and rank 0 reaches them."""
    out: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    for a, b in zip(paths.starts, paths.ends, strict=True):
        out.setdefault(a, []).append(b)
        back.setdefault(b, []).append(a)
    for edges, words in ((out, "0 to rank {}"), (back, "{} to rank 0")):
        lost = sorted(set(range(n)) - _reached(edges))
        if lost:
            raise BadTopology(
                f"no path from rank {words.format(lost[0])} ({len(lost)} ranks cut "
                "off); add links that join all ranks in both directions"
            )


def _reached(edges: dict[int, list[int]]) -> set[int]:
    seen, todo = {0}, [0]
    while todo:
        for node in edges.get(todo.pop(), ()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen
