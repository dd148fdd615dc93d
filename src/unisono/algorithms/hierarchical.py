"""Hierarchical: one algorithm inside the hosts, another between them, over any levels.

Links inside a host are many times faster than those between. So first share out the
work inside, then let every rank of a host talk across with its own share only, and last
collect inside again. With g ranks on each of N hosts and rings on both levels,

              rounds                    inside                  across, per rank
  all_reduce  2(g-1) + 2(N-1)           2(g-1)/g buffers        2(N-1)/(gN)

where a flat ring would take 2(gN-1) rounds. `schedule/product.py` says how each
collective is put together.

`levels` tells the groups, from the inside out: 4x3 is three hosts of four ranks, 2x4x3
has a level below that; unequal groups are written out, 5+4+4. Without it, groups are
about as many as each has ranks, uneven if need be. `by` names the algorithm of each
level, from the inside out, as in direct/ring; the last one serves all levels above. If
that of the inner level has no reduce_scatter, as a tree, all_reduce goes through the
groups' first ranks.

Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
network hierarchy", MLSys 2019.
"""

import math
import re

import numpy as np

from unisono.algorithms.library import library
from unisono.algorithms.library import schedule as plain
from unisono.algorithms.registry import algorithm
from unisono.errors import BadArgument, UnsupportedWorld
from unisono.schedule import Schedule, product

USUAL = {"all_to_all": "direct", "barrier": "dissemination"}
USUAL |= dict.fromkeys(("broadcast", "reduce", "scatter", "gather"), "tree")
USUAL |= dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "ring")


@algorithm
def broadcast(n: int, levels: str = "", by: str = "") -> Schedule:
    """Between the groups' first ranks, then inside every group."""
    return stack("broadcast", n, levels, by)


@algorithm
def scatter(n: int, levels: str = "", by: str = "") -> Schedule:
    """To every group's first rank what is for the group, then inside."""
    return stack("scatter", n, levels, by)


@algorithm
def gather(n: int, levels: str = "", by: str = "") -> Schedule:
    """Inside every group, then from the groups' first ranks."""
    return stack("gather", n, levels, by)


@algorithm
def reduce(n: int, levels: str = "", by: str = "") -> Schedule:
    """Inside every group, then between the groups' first ranks."""
    return stack("reduce", n, levels, by)


@algorithm
def all_gather(n: int, levels: str = "", by: str = "") -> Schedule:
    """Across, every rank for its own share; then inside."""
    return stack("all_gather", n, levels, by)


@algorithm
def reduce_scatter(n: int, levels: str = "", by: str = "") -> Schedule:
    """Inside, to shares of the sum; then across, every rank for its own."""
    return stack("reduce_scatter", n, levels, by)


@algorithm
def all_reduce(n: int, levels: str = "", by: str = "") -> Schedule:
    """Reduce-scatter inside, all-reduce across, all-gather inside."""
    return stack("all_reduce", n, levels, by)


@algorithm
def all_to_all(n: int, levels: str = "", by: str = "") -> Schedule:
    """Inside, to the rank that speaks to the target's place; then across."""
    return stack("all_to_all", n, levels, by)


@algorithm
def barrier(n: int, levels: str = "", by: str = "") -> Schedule:
    """Across and then inside."""
    return stack("barrier", n, levels, by)


def stack(what: str, n: int, levels: str, by: str) -> Schedule:
    """The schedule of the innermost level, with the rest of the levels across it."""
    names = (by or USUAL[what]).split("/")
    sizes, above = groups(n, levels)
    across = _level(what, len(sizes), above, names[1:] or names)
    inner = names[0]
    if what != "all_reduce":
        return product(_each(what, inner, sizes), across)
    first, last = "reduce_scatter", "all_gather"
    if (first, inner.partition(":")[0]) not in library():
        first, last = "reduce", "broadcast"
    return product(_each(first, inner, sizes), across, _each(last, inner, sizes))


def _each(what: str, name: str, sizes: list[int]) -> list[Schedule]:
    """The schedule of every group, one and the same for groups of one size."""
    of_size = {size: plain(what, name, size) for size in set(sizes)}
    return [of_size[size] for size in sizes]


def _level(what: str, n: int, levels: str, names: list[str]) -> Schedule:
    if levels.isdecimal() and int(levels) != n:
        raise UnsupportedWorld(
            f"hierarchical: {n} groups on the outermost level, told were {levels}", n=n
        )
    if not levels or levels.isdecimal():
        return plain(what, names[0], n)
    return stack(what, n, levels, "/".join(names))


def groups(n: int, levels: str) -> tuple[list[int], str]:
    """The sizes of the innermost groups, and what is told of the levels above."""
    if not levels:
        hosts = max(1, round(math.sqrt(n)))
        return [part.size for part in np.array_split(np.arange(n), hosts)], ""
    if not re.fullmatch(r"[0-9]+([x+][0-9]+)*", levels):
        raise BadArgument(
            f"hierarchical: levels {levels!r}: expected 4x3, or 5+4+4 if uneven"
        )
    lowest, _, above = levels.partition("x")
    sizes = [int(size) for size in lowest.split("+")]
    if min(sizes) < 1:
        raise BadArgument(
            f"hierarchical: levels {levels!r}: groups have at least one rank"
        )
    if len(sizes) == 1 and n % sizes[0] == 0:
        sizes *= n // sizes[0]
    if sum(sizes) != n:
        raise UnsupportedWorld(
            f"hierarchical: {n} ranks do not make up groups of {lowest} (write unequal "
            "groups out, as in 5+4+4)",
            n=n,
        )
    return sizes, above
