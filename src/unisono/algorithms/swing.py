"""Swing: recursive doubling that keeps close to home on a ring or torus.

In step s rank r exchanges with r + ρ(s) if it is even and r - ρ(s) if it is odd, where
ρ is 1, -1, 3, -5, 11, ... = (1 - (-2)^(s+1)) / 3. That reaches everyone in log2 n steps
as doubling does, but each distance is about two thirds of the power of two, so on rings
and tori less traffic crosses each link. Other n than powers of two are folded.

                  rounds      span, in buffers
  reduce_scatter  log2 n      (n-1)/n, both the least possible
  all_gather      log2 n      (n-1)/n
  all_reduce      2 log2 n    2(n-1)/n; folded 2⌊log2 n⌋ + 2 and 4 - 2/q

De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024.
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.recursive_doubling import power_below
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step, fold
from unisono.schedule.collective import ALL_GATHER, Ints

ADVICE = Advice(
    en=Words(
        good=(
            "Rings and tori with powers of two: few rounds, and partners are near "
            "each other."
        ),
        bad=(
            "Switches, where distance costs nothing; and other numbers of ranks, "
            "which are folded."
        ),
        memory="None: sums are made in the buffer itself.",
    ),
    zh=Words(
        good="rank 数为 2 的幂的环形和环面网络：轮数少，通信对象近。",
        bad="距离没有代价的交换机；以及需要折叠的其他 rank 数。",
        memory="不需要：直接在缓冲区内求和。",
    ),
)


@algorithm
def all_gather(n: int) -> Schedule:
    """From the farthest partner to the nearest, each sends all it has."""
    q = power_below(n)
    return fold(Schedule(ALL_GATHER, q, q, lambda: swings(q)), n)


@algorithm
def reduce_scatter(n: int) -> Schedule:
    """The same backwards, from the nearest partner to the farthest."""
    return all_gather(n).mirror()


@algorithm
def all_reduce(n: int) -> Schedule:
    """Swing out adding, and swing back."""
    q = power_below(n)
    inner = Schedule(ALL_GATHER, q, q, lambda: swings(q))
    return fold(inner.mirror().then(inner), n)


def swings(q: int) -> Iterator[Step]:
    """The all_gather among q ranks, a power of two."""
    r = np.arange(q)
    has = r[:, None]  # the chunks that each rank has
    for s in reversed(range(q.bit_length() - 1)):
        partner = partners(r, s, q)
        yield copy_step(has, src=r[:, None], dst=partner[:, None])
        has = np.concatenate([has, has[partner]], axis=1)


def partners(r: Ints, s: int, n: int) -> Ints:
    """The partner of each rank in step s."""
    hop = (1 - (-2) ** (s + 1)) // 3
    partner: Ints = (r + np.where(r % 2 == 0, hop, -hop)) % n
    return partner
