"""Halving and doubling: halve what you answer for, then double what you know.

In reduce_scatter partners at distance q/2, q/4, ... 1 each keep one half of what they
still share and send the other half, which is added there. Backwards that is an
all_gather. For n other than a power of two there are two ways:

- fold: q = 2^⌊log2 n⌋ ranks take part, and the surplus ranks hand their data in
  before and get the result after (n = 13: five ranks fold onto eight);
- `blocks`: n is cut into blocks of powers of two (13 = 8 + 4 + 1). Each block halves
  for itself, each smaller block hands its sums to the next larger one; and back again.

With l = ⌊log2 n⌋:

                  rounds, n = 2^l    span         folded: rounds   span
  reduce_scatter  l                  (n-1)/n      l + 2            about 2
  all_gather      l                  (n-1)/n      l + 2            about 2
  all_reduce      2l                 2(n-1)/n     2l + 2           4 - 2/q

By blocks, all_reduce takes 2l + 2 steps too. A small block then sends to several ranks
of a larger one at once, which costs rounds (n = 13: 16) and, as a step lasts until its
busiest rank is done, span (below 5); but work stays below 3/2, where folding has 2 -
1/q.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.butterfly import settle
from unisono.algorithms.recursive_doubling import gather_blocks, power_below
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, at_once, copy_step, embed, fold
from unisono.schedule.collective import ALL_GATHER, REDUCE_SCATTER
from unisono.schedule.transform import Cast

ADVICE = Advice(
    en=Words(
        good=(
            "Powers of two, at medium and large sizes: few rounds and the fewest bytes."
        ),
        bad=(
            "Other numbers of ranks: some hand in all they have first, about twice "
            "the bytes."
        ),
        memory="None: sums are made in the buffer itself.",
    ),
    zh=Words(
        good="rank 数为 2 的幂、中等和较大的数据：轮数少，字节最少。",
        bad="其他 rank 数：多余的 rank 要先交出全部数据，字节约为两倍。",
        memory="不需要：直接在缓冲区内求和。",
    ),
)


@algorithm
def reduce_scatter(n: int, blocks: bool = False) -> Schedule:
    """Partners halve what they share, the farthest first."""
    if blocks:
        return all_gather(n, blocks=True).mirror()
    return fold(halving(power_below(n)), n)


@algorithm
def all_gather(n: int, blocks: bool = False) -> Schedule:
    """Partners double what they know, the nearest first."""
    if blocks:
        return Schedule(ALL_GATHER, n, n, lambda: _gather_by_blocks(n))
    return fold(halving(power_below(n)).mirror(), n)


@algorithm(chunks=lambda n, blocks: power_below(n))
def all_reduce(n: int, blocks: bool = False) -> Iterator[Step]:
    """Halve while adding, then double."""
    q = power_below(n)
    if not blocks:
        yield from fold(halving(q).then(halving(q).mirror()), n)
        return
    down = list(hand_down(n, q))
    for step in reversed(down):
        yield step.backwards(swap_kinds=True).named("reduce_scatter")
    for step in down:
        yield step.named("all_gather")


def halving(q: int) -> Schedule:
    """The reduce_scatter among q ranks, a power of two."""
    return Schedule(REDUCE_SCATTER, q, q, lambda: settle([2] * (q.bit_length() - 1)))


def _gather_by_blocks(n: int) -> Iterator[Step]:
    """The largest block collects the chunks and hands them down, but not to owners."""
    owner = np.arange(n)
    home = owner * power_below(n) // n
    yield copy_step(owner, src=owner, dst=home).where(owner != home).named("collect")
    for step in hand_down(n, n):
        yield step.where(step.dst != step.chunk)


def hand_down(n: int, chunks: int) -> Iterator[Step]:
    """From one rank of the largest block per chunk to everyone in every block.

    In a block of b ranks chunk c is at home at place c·b // chunks. A block doubles
    once it has handed its share to the next smaller one.
    """
    chunk = np.arange(chunks)
    first, sizes = _blocks(n)
    levels = sizes[0].bit_length() - 1
    runs = []
    for k, (base, size) in enumerate(zip(first, sizes, strict=True)):
        home = chunk * size // chunks
        idle = [copy_step([], [], [])] * (levels + 1 - (size.bit_length() - 1))
        steps = embed(gather_blocks(size), home, _shifted(base))
        runs.append((*idle, *steps))
        if k + 1 < len(sizes):
            below = first[k + 1] + chunk * sizes[k + 1] // chunks
            share = copy_step(chunk, src=base + home, dst=below)
            runs.append((*idle[:-1], share))
    yield from at_once(*runs)


def _shifted(base: int) -> Cast:
    return lambda _, rank: base + rank


def _blocks(n: int) -> tuple[list[int], list[int]]:
    """The first rank and the size of every block, the largest first."""
    sizes = [1 << k for k in reversed(range(n.bit_length())) if n >> k & 1]
    return [sum(sizes[:i]) for i in range(len(sizes))], sizes
