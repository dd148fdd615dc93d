"""Where the ranks of a communicator are: their hosts, places and rails."""

from __future__ import annotations

from unisono.runtime.call.arguments import Position
from unisono.runtime.call.options import CallOptions
from unisono.runtime.device.pieces import GRAIN
from unisono.runtime.plan.select import by_variable
from unisono.schedule.collective import COLLECTIVES

ROWS = ("all_gather", "reduce_scatter")
"""Collectives in which every rank has rows, which have stages on equal hosts."""


class Layout:
    """The places of ranks on their hosts.

    The place of a rank is its number among those of its host. Places that every host
    has are rails.
    """

    def __init__(self, hosts: tuple[int, ...]) -> None:
        """By the host of each rank."""
        self.hosts = hosts
        numbers = list(dict.fromkeys(hosts))
        self.ranks = [[r for r, h in enumerate(hosts) if h == k] for k in numbers]
        self.sizes = [len(ranks) for ranks in self.ranks]
        self.rails = min(self.sizes)
        self.places = [hosts[:r].count(h) for r, h in enumerate(hosts)]

    @property
    def is_regular(self) -> bool:
        """Whether hosts have equally many ranks, which follow each other."""
        in_order = [r for ranks in self.ranks for r in ranks]
        return min(self.sizes) == max(self.sizes) and in_order == sorted(in_order)

    def is_same_host(self, one: int, other: int) -> bool:
        """Whether two ranks are on one host."""
        return self.hosts[one] == self.hosts[other]

    def rail_root(self, root: int, place: int) -> int:
        """Which rank of a rail, in their order, is on the host of a root."""
        rail = sorted(ranks[min(place, self.rails - 1)] for ranks in self.ranks)
        return next(i for i, r in enumerate(rail) if self.is_same_host(r, root))

    def shares(self, total: int, at: Position) -> list[int]:
        """The elements of each rank of a host: those that are no rail have none."""
        ranks = self.hosts.count(self.hosts[at.rank])
        part = -(-total // self.rails)
        if total > GRAIN * self.rails:
            part = -(-part // GRAIN) * GRAIN
        ends = [min(total, part * (i + 1)) for i in range(self.rails)]
        sizes = [end - min(total, part * i) for i, end in enumerate(ends)]
        return sizes + [0] * (ranks - self.rails)


def has_stages(layout: Layout, collective: str, how: CallOptions) -> bool:
    """Whether a call is divided into stages; the same on all ranks."""
    if max(layout.sizes) == 1 or how.algorithm or how.reproducible:
        return False
    if by_variable(collective):
        return False
    if collective in ROWS:
        return layout.is_regular
    return COLLECTIVES[collective].chunk_multiple(2) == 1
