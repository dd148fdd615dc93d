"""Where the ranks of a communicator are: their hosts, places and lanes."""

from __future__ import annotations

from unisono.runtime.call.options import CallOptions
from unisono.runtime.device.pieces import GRAIN
from unisono.runtime.plan.select import by_variable
from unisono.schedule.collective import COLLECTIVES


class Layout:
    """The places of ranks on their hosts.

    The place of a rank is its number among those of its host. Places that every host
    has are lanes.
    """

    def __init__(self, hosts: tuple[int, ...]) -> None:
        """By the host of each rank."""
        self.hosts = hosts
        self.sizes = [hosts.count(h) for h in sorted(set(hosts))]
        self.lanes = min(self.sizes)
        self.places = [hosts[:r].count(h) for r, h in enumerate(hosts)]

    def shares(self, total: int, ranks: int) -> list[int]:
        """The elements of each rank of a host: those that are no lane have none."""
        part = -(-total // self.lanes)
        if total > GRAIN * self.lanes:
            part = -(-part // GRAIN) * GRAIN
        ends = [min(total, part * (i + 1)) for i in range(self.lanes)]
        sizes = [end - min(total, part * i) for i, end in enumerate(ends)]
        return sizes + [0] * (ranks - self.lanes)


def has_stages(layout: Layout, collective: str, how: CallOptions) -> bool:
    """Whether a call is divided into stages; the same on all ranks."""
    return (
        max(layout.sizes) > 1
        and COLLECTIVES[collective].chunk_multiple(2) == 1
        and not (how.algorithm or how.reproducible or by_variable(collective))
    )
