"""Naive: every rank sends whole buffers to every rank concerned, at once.

No cleverness, and the yardstick for all of it. One step, but the busiest rank has n-1
messages to send or to receive.

                rounds    span, in buffers
  all_reduce    n-1       n-1; every rank adds all n, in rank order
  broadcast     n-1       n-1
  reduce        n-1       n-1
  scatter       n-1       (n-1)/n, the least possible
  gather        n-1       (n-1)/n, the least possible
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step, reduce_step

ADVICE = Advice(
    en=Words(
        good=(
            "A few bytes among ranks that share memory: one step; sums are made in "
            "rank order."
        ),
        bad="Large buffers or many ranks: whole buffers go to everyone.",
        memory="None: what arrives is added at once.",
    ),
    zh=Words(
        good="共享内存的 rank 之间的少量字节：只需一步；按 rank 顺序求和。",
        bad="大数据或 rank 很多：整个缓冲区发给每个 rank。",
        memory="不需要：到达的数据立即相加。",
    ),
)


@algorithm(chunks=1)
def all_reduce(n: int) -> Iterator[Step]:
    """Every rank sends its buffer to every other, and all add them up in rank order."""
    src, dst = np.divmod(np.arange(n * n), n)
    yield reduce_step(0, src, dst).where(src != dst)


@algorithm
def broadcast(n: int) -> Iterator[Step]:
    """The root sends its buffer to every other rank."""
    yield copy_step(0, src=0, dst=np.arange(1, n))


@algorithm
def reduce(n: int) -> Schedule:
    """Every other rank sends its buffer to the root, which adds them up."""
    return broadcast(n).mirror()


@algorithm
def scatter(n: int) -> Iterator[Step]:
    """The root sends every other rank its share."""
    c = np.arange(1, n)
    yield copy_step(c, src=0, dst=c)


@algorithm
def gather(n: int) -> Schedule:
    """Every other rank sends its share to the root."""
    return scatter(n).mirror()
