"""Machines: hosts with fast links inside and slower ones between.

    dgx-h100:128          eight GPUs on an NVLink switch, a network card for each GPU
    dgx-h100:128,nics=1   the same with one card for all eight
    dgx-h100:128,rails=1  card i of all hosts on a switch of their own, with PXN
    dgx-a100:16           the same machine one generation before
    cloud:16x8            16 virtual machines of 8 ranks that share one card, over TCP
    wan:3                 3 sites with long thin links between each two (wan:3x8)

On rails the switches are not joined. What is for a GPU on another rail goes over NVLink
first, to the GPU of its own host that is on that rail, and leaves by the card of this.
NCCL has that as PXN since 2.12:
https://developer.nvidia.com/blog/doubling-all2all-performance-with-nvidia-collective-communication-library-2-12/

Bandwidths are what programs reach, not those of data sheets; docs/simulation.md names
the sources.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unisono.errors import BadTopology
from unisono.schedule.collective import Ints
from unisono.topology.topology import (
    LinkBundle,
    Route,
    Topology,
    Wiring,
    lay,
    padded,
)

GPUS = 8
NVLINK_LATENCY = 1.2e-6
"""Twice that and a microsecond for the sender: NCCL's 3.4 us for a step of a ring."""
EFFICIENCY = 0.82
"""What NCCL reaches of NVLink's line rate, by its maintainers: 370 of 450 GB/s."""


def dgx_h100(
    hosts: int,
    nics: int = GPUS,
    nvlink: float = 450e9 * EFFICIENCY,
    network: float = 48e9,
    latency: float = 8e-6,
    rails: int = 0,
) -> Topology:
    """Eight H100 on NVLink 4 (450 GB/s a way) with cards of 400 Gb/s."""
    links = nvlink, network, latency
    made = _named("H100", "400 Gb/s", dgx_h100, hosts, nics, *links, rails)
    return made.but(sums=True)


def dgx_a100(
    hosts: int,
    nics: int = GPUS,
    nvlink: float = 300e9 * EFFICIENCY,
    network: float = 24e9,
    latency: float = 8e-6,
    rails: int = 0,
) -> Topology:
    """Eight A100 on NVLink 3 (300 GB/s a way) with cards of 200 Gb/s."""
    links = nvlink, network, latency
    return _named("A100", "200 Gb/s", dgx_a100, hosts, nics, *links, rails)


def _named(
    gpu: str,
    card: str,
    preset: Callable[..., Topology],
    hosts: int,
    nics: int,
    nvlink: float,
    network: float,
    latency: float,
    rails: int,
) -> Topology:
    """Such hosts under the name of their GPUs; `preset` makes more of them."""
    links = nvlink, network, latency, rails
    options = (f",nics={nics}" if nics != GPUS else "") + (",rails=1" if rails else "")
    return _dgx(hosts, nics, *links).but(
        name=f"dgx-{gpu.lower()}:{hosts}{options}",
        grown=lambda k: preset(k, nics, *links),
        about=f"8 {gpu} and {nics} x {card} in each host"
        + (", a network for each rail" if rails else ""),
    )


def _dgx(
    hosts: int, nics: int, nvlink: float, network: float, latency: float, rails: int
) -> Topology:
    if not 1 <= nics <= GPUS or GPUS % nics:
        raise BadTopology(f"nics = {nics}: expected 1, 2, 4 or 8 cards for 8 GPUs")
    n, cards = hosts * GPUS, hosts * nics if hosts > 1 else 0
    hubs = nics if rails else 1
    route = _dgx_route(n, nics, cards, hubs)

    def wire() -> Wiring:
        rank, each = np.arange(n), np.arange(cards)
        hub, nic = n + rank // GPUS, n + hosts + _card(rank, nics)
        inside = [
            LinkBundle("nvlink", rank, hub, NVLINK_LATENCY, nvlink),
            LinkBundle("nvlink", hub, rank, NVLINK_LATENCY, nvlink),
        ]
        if hosts == 1:  # a card that leads nowhere would count as a way out
            return Wiring(n, lay(inside), route, (("nvswitch", 1),))
        fabric = n + hosts + cards + each % hubs
        cables = [
            LinkBundle("pcie", rank, nic, 0.3e-6, 55e9),
            LinkBundle("pcie", nic, rank, 0.3e-6, 55e9),
            LinkBundle("network", n + hosts + each, fabric, latency / 2, network),
            LinkBundle("network", fabric, n + hosts + each, latency / 2, network),
        ]
        owned = [rank // GPUS, np.arange(hosts), each // nics]
        host = np.concatenate([*owned, np.full(hubs, -1)])
        middle = ("rail", hubs) if rails else ("fabric", 1)
        parts = (("nvswitch", hosts), ("nic", cards), middle)
        return Wiring(n, lay(inside + cables), route, parts, (("host", host),))

    # The sum is made while the bytes pass through the GPU, so it costs nothing apart.
    return Topology("dgx", n, wire, 1e-6, per_host=GPUS, scale=hosts)


def _dgx_route(n: int, nics: int, cards: int, hubs: int) -> Route:
    """The ways between such hosts, whose cards are joined by so many switches."""

    def route(src: Ints, dst: Ints) -> Ints:
        near = src // GPUS == dst // GPUS
        over = ~near & (_card(src, nics) % hubs != _card(dst, nics) % hubs)
        gate = np.where(over, src // GPUS * GPUS + dst % GPUS, src)
        columns = [
            np.where(near, src, 2 * n + gate),
            np.where(near, -1, 4 * n + _card(gate, nics)),
            np.where(near, -1, 4 * n + cards + _card(dst, nics)),
            np.where(near, n + dst, 3 * n + dst),
        ]
        if hubs > 1:  # over NVLink to the GPU that is on the rail
            columns[:0] = [np.where(over, src, -1), np.where(over, n + gate, -1)]
        return np.where((src == dst)[..., None], -1, padded(columns))

    return route


def _card(rank: Ints, nics: int) -> Ints:
    """By which card a GPU leaves its host, counted over all hosts."""
    return rank // GPUS * nics + rank % GPUS * nics // GPUS


def cloud(
    shape: tuple[int, int],
    memory: float = 10e9,
    network: float = 12.5e9,
    latency: float = 25e-6,
) -> Topology:
    """Virtual machines with 100 Gb/s: ranks share memory inside, and one card."""
    hosts, ranks = shape
    n = hosts * ranks

    def route(src: Ints, dst: Ints) -> Ints:
        near = src // ranks == dst // ranks
        table = padded(
            [
                src,
                np.where(near, -1, 2 * n + src // ranks),
                np.where(near, -1, 2 * n + hosts + dst // ranks),
                n + dst,
            ]
        )
        return np.where((src == dst)[..., None], -1, table)

    def wire() -> Wiring:
        rank, each = np.arange(n), np.arange(hosts)
        own, fabric = n + rank // ranks, np.full(hosts, n + hosts)
        cables = [
            LinkBundle("memory", rank, own, 0.5e-6, memory),
            LinkBundle("memory", own, rank, 0.5e-6, memory),
            LinkBundle("network", n + each, fabric, latency / 2, network),
            LinkBundle("network", fabric, n + each, latency / 2, network),
        ]
        host = np.concatenate([rank // ranks, each, [-1]])
        parts = (("host", hosts), ("fabric", 1))
        return Wiring(n, lay(cables), route, parts, (("host", host),))

    def grown(k: int) -> Topology:
        return cloud((k, ranks), memory=memory, network=network, latency=latency)

    return Topology(
        f"cloud:{hosts}x{ranks}",
        n,
        wire,
        2e-6,
        1 / 20e9,
        per_host=ranks,
        scale=hosts,
        grown=grown,
        about="virtual machines with 100 Gb/s, TCP between them",
    )


def wan(
    shape: tuple[int, int],
    network: float = 12.5e9,
    between: float = 1.25e9,
    latency: float = 30e-3,
) -> Topology:
    """Sites of some ranks on a switch; each two sites share a line of 10 Gb/s."""
    sites, ranks = shape
    n = sites * ranks

    def route(src: Ints, dst: Ints) -> Ints:
        a, b = src // ranks, dst // ranks
        far = np.where(a == b, -1, 2 * n + a * (sites - 1) + b - (b > a))
        return np.where((src == dst)[..., None], -1, padded([src, far, n + dst]))

    def wire() -> Wiring:
        rank = np.arange(n)
        hub = n + rank // ranks
        a = np.repeat(np.arange(sites), sites - 1)
        place = np.tile(np.arange(sites - 1), sites)
        b = place + (place >= a)
        cables = [
            LinkBundle("network", rank, hub, 10e-6, network),
            LinkBundle("network", hub, rank, 10e-6, network),
            LinkBundle("line", n + a, n + b, latency, between),
        ]
        site = np.concatenate([rank // ranks, np.arange(sites)])
        return Wiring(n, lay(cables), route, (("site", sites),), (("host", site),))

    def grown(k: int) -> Topology:
        return wan((k, ranks), network=network, between=between, latency=latency)

    return Topology(
        f"wan:{sites}x{ranks}" if ranks > 1 else f"wan:{sites}",
        n,
        wire,
        2e-6,
        1 / 20e9,
        per_host=ranks,
        scale=sites,
        grown=grown,
        about="sites with 10 Gb/s and 30 ms between each two",
    )
