"""Direct: every chunk goes straight to where it is wanted.

Every rank sends to every other, but only the chunk that the other needs, so no byte is
sent in vain. One step (two for all_reduce) for those with many ports; with one port it
is n-1 messages each. Sums are taken in rank order, so their bits do not depend on the
size.

                  rounds    span, in buffers
  reduce_scatter  n-1       (n-1)/n of a buffer, the least possible
  all_gather      n-1       (n-1)/n
  all_reduce      2(n-1)    2(n-1)/n
  all_to_all      n-1       (n-1)/n
  gather          n-1       (n-1)/n
  scatter         n-1       (n-1)/n
  barrier         n-1       none

With `rotate` the messages are put in order, one per step: in step h rank r sends to
r+h. Then no two ranks ever send to the same one, at the price of sums in rotated order.
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step, reduce_step, together

ADVICE = Advice(
    en=Words(
        good=(
            "Ranks that share memory, or a few ranks on a switch; sums are made in "
            "rank order."
        ),
        bad=(
            "Many ranks on a network: each has n-1 messages, and those to one rank "
            "collide."
        ),
        memory="None: chunks go straight to where they are wanted.",
    ),
    zh=Words(
        good="共享内存的 rank，或交换机上的少量 rank；按 rank 顺序求和。",
        bad="网络上的大量 rank：每个要发 n-1 条消息，发往同一 rank 的消息会拥塞。",
        memory="不需要：块直接送到需要它的 rank。",
    ),
)


@algorithm
def reduce_scatter(n: int, rotate: bool = False) -> Iterator[Step]:
    """Chunk c of every rank goes to rank c, which adds."""
    r = np.arange(n)
    hops = (reduce_step((r + h) % n, src=r, dst=(r + h) % n) for h in range(1, n))
    yield from hops if rotate else [together(hops)]


@algorithm
def all_gather(n: int, rotate: bool = False) -> Iterator[Step]:
    """Chunk c of rank c goes to every other rank."""
    r = np.arange(n)
    hops = (copy_step(r, src=r, dst=(r + h) % n) for h in range(1, n))
    yield from hops if rotate else [together(hops)]


@algorithm
def all_reduce(n: int, rotate: bool = False) -> Schedule:
    """Every rank adds up its own chunk, then sends it to all."""
    return reduce_scatter(n, rotate=rotate).then(all_gather(n, rotate=rotate))


@algorithm
def all_to_all(n: int, rotate: bool = False) -> Iterator[Step]:
    """The chunk from i to j goes from i to j."""
    i = np.arange(n)
    hops = (copy_step(i * n + (i + h) % n, src=i, dst=(i + h) % n) for h in range(1, n))
    yield from hops if rotate else [together(hops)]


@algorithm
def scatter(n: int, rotate: bool = False) -> Iterator[Step]:
    """The root sends every rank its chunk."""
    sends = (copy_step(c, src=0, dst=c) for c in range(1, n))
    yield from sends if rotate else [together(sends)]


@algorithm
def gather(n: int, rotate: bool = False) -> Schedule:
    """Every rank sends its chunk to the root."""
    return scatter(n, rotate=rotate).mirror()


@algorithm
def barrier(n: int, rotate: bool = False) -> Iterator[Step]:
    """Every rank notifies every other."""
    r = np.arange(n)
    hops = (copy_step(r, src=r, dst=(r + h) % n) for h in range(1, n))
    yield from hops if rotate else [together(hops)]
