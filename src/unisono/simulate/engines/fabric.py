"""Machines as libraries see them: equal hosts, links inside and cards between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.errors import BadTopology
from unisono.topology import Topology


@dataclass(frozen=True)
class Fabric:
    """Equal hosts of equal ranks. Bandwidths are of one direction.

    `inside` is a rank's, between ranks of its host; `across` that of a host's network
    cards together, which its ranks share. A switch that `sums` adds up what passes
    through it: NVLink SHARP inside a host. With `network_sums` those between hosts do:
    InfiniBand SHARP. Buffers that are `staged` are on GPUs.
    """

    hosts: int
    per_host: int
    inside: float
    across: float = 0.0
    inside_latency: float = 0.0
    across_latency: float = 0.0
    sums: bool = False
    staged: bool = False
    network_sums: bool = False

    def __post_init__(self) -> None:
        """Refuse machines on which nothing moves."""
        if self.hosts < 1 or self.per_host < 1:
            raise BadTopology(
                f"{self.hosts} hosts of {self.per_host} ranks: expected 1 or more"
            )
        needed = {
            "inside": self.per_host > 1 and self.inside,
            "across": self.hosts > 1 and self.across,
        }
        for name, rate in needed.items():
            if rate is not False and not rate > 0:
                raise BadTopology(f"bandwidth {name} hosts is {rate}: expected above 0")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.hosts * self.per_host

    @classmethod
    def of(cls, topology: Topology) -> Fabric:
        """What a topology is to a library; hosts must be equal."""
        wiring = topology.wiring
        host = wiring.host[: wiring.n]
        sizes = np.bincount(host - host.min())
        if len(set(sizes[sizes > 0].tolist())) != 1:
            raise BadTopology(
                f"{topology.name}: hosts have {sizes.tolist()} ranks; an engine is "
                "modelled for equal hosts (simulate without --engine)"
            )
        first = np.flatnonzero(host == host[0])
        others = np.flatnonzero(host != host[0])
        inside, near = _route(topology, first[:2]) if first.size > 1 else (0.0, 0.0)
        across, far = 0.0, 0.0
        if others.size:
            _, far = _route(topology, np.array([first[0], others[0]]))
            links, where = wiring.links, dict(wiring.levels)["host"]
            leaves = (where[links.src] == host[0]) & (where[links.dst] != host[0])
            across = float(links.bandwidth[leaves].sum())
        hosts = int(np.count_nonzero(sizes))
        what = topology.sums, topology.staged, topology.network_sums
        return cls(hosts, int(first.size), inside, across, near, far, *what)


def _route(topology: Topology, pair: np.ndarray) -> tuple[float, float]:
    """The bandwidth and the latency of the way from one rank to another."""
    route = topology.route(pair[:1], pair[1:])[0]
    links, used = topology.wiring.links, route[route >= 0]
    return float(links.bandwidth[used].min()), float(links.latency[used].sum())
