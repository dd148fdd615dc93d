"""Recursive doubling: partners exchange all they have, at distances 1, 2, 4, ...

After k steps every rank knows what its block of 2^k ranks knew. With n a power of two
all know everything after log2 n steps, and have added in the same tree: the same bits.
Other n are folded: the surplus over the power of two q below n hands in first and gets
the result last.

              rounds                        span, in buffers
  all_gather  log2 n, else ⌊log2 n⌋ + 2     (n-1)/n, folded about 2
  all_reduce  log2 n, else ⌊log2 n⌋ + 2     as many buffers as rounds

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step, fold, reduce_step
from unisono.schedule.collective import ALL_GATHER, ALL_REDUCE

ADVICE = Advice(
    en=Words(
        good="Small buffers: few rounds, the fewest for powers of two.",
        bad="Large buffers to reduce: whole buffers are exchanged in every round.",
        memory="None: what arrives is added or put in its place.",
    ),
    zh=Words(
        good="小数据：轮数少，rank 数为 2 的幂时最少。",
        bad="大数据归约：每一轮都交换整个缓冲区。",
        memory="不需要：到达的数据直接相加或放到位置上。",
    ),
)


@algorithm
def all_gather(n: int) -> Schedule:
    """Partners exchange the shares of their blocks, which double in every step."""
    q = power_below(n)
    return fold(Schedule(ALL_GATHER, q, q, lambda: gather_blocks(q)), n)


@algorithm
def all_reduce(n: int) -> Schedule:
    """Partners exchange and add their sums."""
    q = power_below(n)
    return fold(Schedule(ALL_REDUCE, q, 1, lambda: add_blocks(q)), n)


def gather_blocks(q: int) -> Iterator[Step]:
    """Each rank sends its whole block to its partner in the block beside it."""
    r = np.arange(q)[:, None]
    for distance in powers(q):
        yield copy_step(r - r % distance + np.arange(distance), src=r, dst=r ^ distance)


def add_blocks(q: int) -> Iterator[Step]:
    """Each rank and its partner in the block beside it add their sums."""
    r = np.arange(q)
    for distance in powers(q):
        yield reduce_step(0, src=r, dst=r ^ distance)


def power_below(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)


def powers(q: int) -> list[int]:
    """1, 2, 4, ... below q."""
    return [1 << k for k in range(q.bit_length() - 1)]
