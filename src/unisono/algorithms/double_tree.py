"""Double tree: two binary trees, each rank at work in one and at rest in the other.

In a binary tree half of the ranks are leaves, which never send down. Take a second tree
in which those are the inner ranks, cut the data in two, and give each tree one half:
now all ranks send and receive alike, and with many segments a broadcast costs about as
much as sending the message once.

                rounds, n = 2^l, one segment
  all_reduce    4l - 2
  broadcast     at most 2⌈log2 n⌉ + 1
  reduce        the same

The trees are in-order: rank r = odd · 2^k is at height k, and its children are r ±
2^(k-1). The second tree is the first mirrored (n even) or turned by one (n odd; then
one rank is inner in both).

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", Parallel Computing 35 (2009).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, at_once, copy_step
from unisono.schedule.collective import ALL_REDUCE, BROADCAST, Ints

ADVICE = Advice(
    en=Words(
        good=(
            "Large buffers among many ranks, in many segments: few rounds, and all "
            "links are busy."
        ),
        bad="Small buffers: a single tree has fewer rounds.",
        memory="None: segments are added and passed on in the buffer itself.",
    ),
    zh=Words(
        good="rank 很多、多段的大数据：轮数少，所有链路都忙碌。",
        bad="小数据：单棵树的轮数更少。",
        memory="不需要：各段在缓冲区内相加并转发。",
    ),
)


@algorithm(least={"segments": 1})
def broadcast(n: int, segments: int = 1) -> Schedule:
    """The root feeds both trees of the other ranks, each with one half."""
    return Schedule(BROADCAST, n, 2, lambda: _feed(n)).split(segments)


@algorithm(least={"segments": 1})
def reduce(n: int, segments: int = 1) -> Schedule:
    """The broadcast backwards: each tree adds up one half, and the root has both."""
    return broadcast(n, segments=segments).mirror()


@algorithm(least={"segments": 1})
def all_reduce(n: int, segments: int = 1) -> Schedule:
    """Up both trees adding, and down again."""
    return Schedule(ALL_REDUCE, n, 2, lambda: _up_and_down(n)).split(segments)


def _feed(n: int) -> Iterator[Step]:
    if n == 1:
        return
    tops = [int(ranks(n - 1)[0]) + 1 for ranks in (_first, _second)]
    yield copy_step([0, 1], src=0, dst=tops)
    yield from at_once(
        _down(0, _first(n - 1) + 1),
        _down(1, _second(n - 1) + 1),
    )


def _up_and_down(n: int) -> Iterator[Step]:
    down = list(at_once(_down(0, _first(n)), _down(1, _second(n))))
    for s in reversed(down):
        yield s.backwards(swap_kinds=True).named("reduce")
    for s in down:
        yield s.named("broadcast")


def _first(n: int) -> Ints:
    """Which rank stands at each place of the first tree."""
    return np.arange(n)


def _second(n: int) -> Ints:
    """Which rank stands at each place of the second tree."""
    return np.arange(n)[::-1] if n % 2 == 0 else (np.arange(n) + 1) % n


def _down(chunk: int, ranks: Ints) -> Iterator[Step]:
    """Hand a chunk down the in-order tree whose places are filled by `ranks`."""
    places = np.arange(1, ranks.size)
    parent = parents(places, ranks.size)
    depth = np.zeros(ranks.size, dtype=np.int64)
    for place in sorted(places, key=lambda p: -(p & -p)):
        depth[place] = depth[parent[place - 1]] + 1
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = places[depth[places] == level]
        yield copy_step(chunk, src=ranks[parent[here - 1]], dst=ranks[here])


def parents(place: Ints, n: int) -> Ints:
    """The parent of each place but 0: one height up, to the side where there is one."""
    low = place & -place
    above = (place - low) | (2 * low)
    return np.where(above < n, above, place - low)
