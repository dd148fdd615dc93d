"""What each link of a topology has to do, over the time of a collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.errors import NotOffered
from unisono.schedule.collective import Ints
from unisono.simulate import Result
from unisono.topology.topology import Floats

COLUMNS = 120
"""Into how many equal parts the time is divided."""


@dataclass(frozen=True)
class LinkLoad:
    """One direction of a link: what it carried, and its use in each part of the time.

    `use` are parts of its bandwidth, `used` is their mean. `src` and `dst` are nodes.
    """

    name: str
    kind: str
    src: int
    dst: int
    nbytes: float
    bandwidth: float
    used: float
    use: list[float]


def carried_over_time(result: Result, columns: int = COLUMNS) -> Floats:
    """The bytes of each link in each part of the time, a row for each link.

    The bytes of a message count evenly from when it leaves until its last byte does,
    which is the latency of its route before it arrives. That is what simulation by
    steps computes with. By events, flows that share a link for a part of their time
    change their rates meanwhile, and their sum can look larger than the link.
    """
    line = result.timeline
    if line is None:
        raise NotOffered(
            f"{result.algorithm} on {result.topology.name}: its messages were not kept;"
            " take fidelity='steps' or 'events'"
        )
    rate = bandwidths(result)
    carried = np.zeros((rate.size, columns))
    if not result.time or not line.nbytes.any():
        return carried
    links = result.topology.wiring.links
    routes = result.topology.route(line.src, line.dst)
    latency = np.append(links.latency, 0.0)[routes].sum(axis=1)
    lasts = np.maximum(line.end - line.start - latency, result.time * 1e-9)[:, None]
    first, last = line.start[:, None], line.start[:, None] + lasts
    edges = np.linspace(0.0, result.time, columns + 1)
    within = np.minimum(last, edges[1:]) - np.maximum(first, edges[:-1])
    parts = line.nbytes[:, None] * np.clip(within, 0.0, None) / lasts
    for hop in routes.T:
        there = hop >= 0
        np.add.at(carried, hop[there], parts[there])
    return carried * _coded(result, routes)


def _coded(result: Result, routes: Ints) -> float:
    """What a codec leaves of a byte."""
    line, there = result.timeline, routes >= 0
    if line is None or result.carried is None:
        return 1.0
    plain = float((line.nbytes * there.sum(axis=1)).sum())
    return float(result.carried.sum()) / plain if plain else 1.0


def bandwidths(result: Result) -> Floats:
    """What the links had, slow ones included."""
    had = result.bandwidth
    return result.topology.wiring.links.bandwidth if had is None else had


def loads(result: Result, columns: int = COLUMNS) -> list[LinkLoad]:
    """The links that carried something, those with most to do first."""
    wiring = result.topology.wiring
    had = bandwidths(result)
    carried = carried_over_time(result, columns)
    total = carried.sum(axis=1)
    use = carried / had[:, None] / (max(result.time, 1e-300) / columns)
    busy = np.flatnonzero(total > 0)
    order = busy[np.argsort(-use[busy].mean(axis=1), kind="stable")]
    return [
        LinkLoad(
            name=wiring.link_name(link),
            kind=wiring.links.kinds[wiring.links.kind[link]],
            src=int(wiring.links.src[link]),
            dst=int(wiring.links.dst[link]),
            nbytes=float(total[link]),
            bandwidth=float(had[link]),
            used=round(float(use[link].mean()), 4),
            use=[round(part, 3) for part in use[link].tolist()],
        )
        for link in order.tolist()
    ]
