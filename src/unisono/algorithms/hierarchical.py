"""Hierarchical: one algorithm inside the hosts, another between them, over any levels.

Links inside a host are many times faster than those between. So first share out the
work inside, then let every rank of a host send across its own share only, and last
collect inside again. With g ranks on each of N hosts and rings on both levels,

              rounds                    inside                  across, per rank
  all_reduce  2(g-1) + 2(N-1)           2(g-1)/g buffers        2(N-1)/(gN)

where a flat ring would take 2(gN-1) rounds. `schedule/product.py` describes how each
collective is put together.

`levels` gives the groups, from the inside out: 4x3 is three hosts of four ranks, 2x4x3
has a level below that; unequal groups are written out, 5+4+4. Without it, groups are
about as many as each has ranks, and of one size if n has such a divisor (8: 4x2). Where
the ranks of a host do not follow each other, `hosts` gives the host of each rank
instead: 0.1.0.1, or in short 0-1x2 (see `schedule/placement.py`). Where there is a
root, its group leads on every level, so whatever crosses into another group crosses
once.

`by` names the algorithm of each level, from the inside out, as in direct/ring; the last
one serves all levels above. If that of the inner level has no reduce_scatter, as a
tree, all_reduce goes through the groups' first ranks. With `segments` the data are cut,
each part a step behind the one before it: while one is on its way between the hosts,
the next is shared out inside and the last collected.

Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
network hierarchy", MLSys 2019.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.library import offers
from unisono.algorithms.library import schedule as plain
from unisono.algorithms.registry import algorithm
from unisono.errors import BadArgument, UnsupportedWorld
from unisono.schedule import COLLECTIVES, Schedule, product
from unisono.schedule.collective import Ints
from unisono.schedule.placement import numbered, parse_hosts, written

ADVICE = Advice(
    en=Words(
        good=(
            "Several hosts with several ranks each: the slow links between hosts "
            "carry the least."
        ),
        bad=(
            "One host, or one rank on each: there are no two levels to divide the "
            "work by."
        ),
        memory=(
            "In scatter, gather and all_to_all some ranks hold what is for others "
            "of their host."
        ),
    ),
    zh=Words(
        good="多台主机、每台多个 rank：主机之间的慢链路传输最少。",
        bad="只有一台主机，或每台只有一个 rank：没有两层可分。",
        memory="scatter、gather 和 all_to_all 中，有的 rank 要暂存同主机的数据。",
    ),
)


USUAL = {"all_to_all": "direct", "barrier": "dissemination"}
USUAL |= dict.fromkeys(("broadcast", "reduce", "scatter", "gather"), "tree")
USUAL |= dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "ring")


@algorithm(least={"segments": 1})
def broadcast(
    n: int,
    root: int = 0,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Between the groups' first ranks, then inside every group."""
    return stack("broadcast", n, (levels, hosts), by, segments, root)


@algorithm(least={"segments": 1})
def scatter(
    n: int,
    root: int = 0,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """To every group's first rank what is for the group, then inside."""
    return stack("scatter", n, (levels, hosts), by, segments, root)


@algorithm(least={"segments": 1})
def gather(
    n: int,
    root: int = 0,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Inside every group, then from the groups' first ranks."""
    return stack("gather", n, (levels, hosts), by, segments, root)


@algorithm(least={"segments": 1})
def reduce(
    n: int,
    root: int = 0,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Inside every group, then between the groups' first ranks."""
    return stack("reduce", n, (levels, hosts), by, segments, root)


@algorithm(least={"segments": 1})
def all_gather(
    n: int,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Across, every rank for its own share; then inside."""
    return stack("all_gather", n, (levels, hosts), by, segments)


@algorithm(least={"segments": 1})
def reduce_scatter(
    n: int,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Inside, to shares of the sum; then across, every rank for its own."""
    return stack("reduce_scatter", n, (levels, hosts), by, segments)


@algorithm(least={"segments": 1})
def all_reduce(
    n: int,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Reduce-scatter inside, all-reduce across, all-gather inside."""
    return stack("all_reduce", n, (levels, hosts), by, segments)


@algorithm(least={"segments": 1})
def all_to_all(
    n: int,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Inside, to the rank that sends to the target's place; then across."""
    return stack("all_to_all", n, (levels, hosts), by, segments)


@algorithm(least={"segments": 1})
def barrier(
    n: int,
    levels: str = "",
    hosts: str = "",
    by: str = "",
    segments: int = 1,
) -> Schedule:
    """Across and then inside."""
    return stack("barrier", n, (levels, hosts), by, segments)


def stack(
    what: str,
    n: int,
    layout: tuple[str, str],
    by: str,
    segments: int,
    root: int = 0,
) -> Schedule:
    """The product of all levels, relabelled for the placement of the ranks."""
    shape, ranks = placed(n, *layout)
    if COLLECTIVES[what].rooted:
        shape, order = led_by(n, shape, int(np.flatnonzero(ranks == root)[0]))
        ranks = ranks[order]
    made = _levels(what, n, shape, (by or USUAL[what]).split("/"))
    if not np.array_equal(ranks, np.arange(n)):
        made = made.relabel(ranks)
    return made.split(segments)


def _levels(what: str, n: int, shape: list[list[int]], names: list[str]) -> Schedule:
    """The schedule of the innermost level, with the rest of the levels across it."""
    if not shape:
        return plain(what, names[0], n)
    sizes, inner = shape[0], names[0]
    across = _levels(what, len(sizes), shape[1:], names[1:] or names)
    if what != "all_reduce":
        return product(_each(what, inner, sizes), across)
    first, last = "reduce_scatter", "all_gather"
    if not offers(inner.partition(":")[0], first):
        first, last = "reduce", "broadcast"
    return product(_each(first, inner, sizes), across, _each(last, inner, sizes))


def _each(what: str, name: str, sizes: list[int]) -> list[Schedule]:
    """The schedule of every group, one and the same for groups of one size."""
    of_size = {size: plain(what, name, size) for size in set(sizes)}
    return [of_size[size] for size in sizes]


def placed(n: int, levels: str, hosts: str) -> tuple[list[list[int]], Ints]:
    """The sizes of the groups on each level, and the ranks in the order of groups."""
    if not hosts:
        return groups(n, levels), np.arange(n)
    if levels:
        raise BadArgument(
            f"hierarchical: levels={levels} and hosts={hosts}: give one of them"
        )
    of_rank = parse_hosts(hosts, n)
    _, sizes = np.unique(of_rank, return_counts=True)
    return [sizes.tolist()], np.argsort(of_rank, kind="stable")


def led_by(n: int, shape: list[list[int]], leader: int) -> tuple[list[list[int]], Ints]:
    """The same groups with `leader`'s first on every level, and it the first of all.

    Returned are the sizes in the new order, and who stands where.
    """
    order = np.arange(n)
    if shape:
        sizes = np.array(shape[0])
        ends = np.cumsum(sizes)
        own = int(np.searchsorted(ends, leader, side="right"))
        above, following = led_by(sizes.size, shape[1:], own)
        order = np.concatenate(
            [np.arange(ends[g] - sizes[g], ends[g]) for g in following]
        )
        shape = [sizes[following].tolist(), *above]
    return shape, np.concatenate([[leader], order[order != leader]])


def _default_hosts(n: int) -> int:
    """About the root of n: a divisor, if there is one that is no less than half of it.

    Groups of one size take fewer rounds: 8 ranks are 4x2, not 3+3+2.
    """
    root = math.sqrt(n)
    divisors = [d for d in range(2, int(root) + 1) if n % d == 0 and d >= root / 2]
    return max(divisors) if divisors else round(root)


def groups(n: int, levels: str) -> list[list[int]]:
    """The sizes of the groups on each level, from the inside out."""
    if not levels:
        hosts = _default_hosts(n)
        return [[part.size for part in np.array_split(np.arange(n), hosts)]]
    if not re.fullmatch(r"[0-9]+([x+][0-9]+)*", levels):
        raise BadArgument(
            f"hierarchical: levels {levels!r}: expected 4x3, or 5+4+4 if uneven"
        )
    shape: list[list[int]] = []
    *below, outermost = levels.split("x")
    for sizes in below or [outermost]:
        shape.append(_sizes(n, sizes))
        n = len(shape[-1])
    if below and "+" in outermost:
        shape.append(_sizes(n, outermost))
    elif below and int(outermost) != n:
        raise UnsupportedWorld(
            f"hierarchical: {n} groups on the outermost level, but levels gives "
            f"{outermost}",
            n=n,
        )
    return shape


def _sizes(n: int, text: str) -> list[int]:
    sizes = [int(size) for size in text.split("+")]
    if min(sizes) < 1:
        raise BadArgument(
            f"hierarchical: levels {text!r}: groups have at least one rank"
        )
    if len(sizes) == 1 and n % sizes[0] == 0:
        sizes *= n // sizes[0]
    if sum(sizes) != n:
        raise UnsupportedWorld(
            f"hierarchical: {n} ranks do not make up groups of {text} (write unequal "
            "groups out, as in 5+4+4)",
            n=n,
        )
    return sizes


def telling(hosts: Sequence[int]) -> str:
    """The parameter for a placement, as short as possible."""
    hosts = numbered(hosts)
    if list(hosts) != sorted(hosts):
        return f"hosts={written(hosts)}"
    sizes = np.bincount(hosts).tolist()
    if len(set(sizes)) == 1:
        return f"levels={sizes[0]}x{len(sizes)}"
    return f"levels={'+'.join(map(str, sizes))}"
