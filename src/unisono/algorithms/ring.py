"""Ring: every rank communicates only with its neighbours.

Follow the chunk, not the rank. Chunk c goes round the ring, and at hop h it moves from
rank c+h to rank c+h+1 (mod n). All n chunks move at once, one place apart, so every
link carries exactly one chunk in every step.

                  steps     sent by each rank
  reduce_scatter  n-1       (n-1)/n of a buffer, the least possible
  all_gather      n-1       (n-1)/n, the least possible
  all_reduce      2(n-1)    2(n-1)/n, the least possible
  all_to_all      n-1       (n-1)/2, since a chunk for the far side passes many hands

With `both`, chunks go the shorter way round, left and right at once: about half the
steps, over twice the links, and the same bytes (in all_to_all, half as many).

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69 (2009).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, at_once, copy_step, reduce_step

ADVICE = Advice(
    en=Words(
        good=(
            "Large buffers, any number of ranks: the fewest bytes, and only "
            "between neighbours."
        ),
        bad=(
            "Small buffers or many ranks: n-1 or 2(n-1) messages, one after the other. "
            "And all_to_all, where chunks pass many ranks."
        ),
        memory=(
            "None; in all_to_all a rank holds chunks of others that are on their way."
        ),
    ),
    zh=Words(
        good="大数据、任意 rank 数：字节最少，且只在相邻 rank 之间传输。",
        bad=(
            "小数据或 rank 很多：要依次发送 n-1 或 2(n-1) 条消息。"
            "all_to_all 也不适合：块要经过许多 rank。"
        ),
        memory="不需要；all_to_all 中要暂存路过的、属于别人的块。",
    ),
)


@algorithm
def reduce_scatter(n: int, both: bool = False) -> Iterator[Step]:
    """Chunk c leaves rank c+1, gathers every rank's share, and rests at rank c."""
    if both:
        yield from all_gather(n, both=True).mirror()
        return
    c = np.arange(n)
    for hop in range(1, n):
        yield reduce_step(c, src=(c + hop) % n, dst=(c + hop + 1) % n)


@algorithm
def all_gather(n: int, both: bool = False) -> Iterator[Step]:
    """Chunk c leaves rank c and drops a copy at every other rank."""
    right = (n - 1) - (n - 1) // 2 if both else n - 1
    yield from at_once(walk(n, +1, right), walk(n, -1, n - 1 - right))


@algorithm
def all_reduce(n: int, both: bool = False) -> Schedule:
    """The sums are made on the first lap and handed out on the second."""
    return reduce_scatter(n, both=both).then(all_gather(n, both=both))


@algorithm
def all_to_all(n: int, both: bool = False) -> Iterator[Step]:
    """The chunk from i to j goes from neighbour to neighbour."""
    right = n // 2 if both else n - 1
    yield from at_once(carry(n, +1, right), carry(n, -1, n - 1 - right))


def walk(n: int, direction: int, hops: int) -> Iterator[Step]:
    """Every rank's chunk goes `hops` places to the right (way +1) or left (way -1)."""
    c = np.arange(n)
    for hop in range(hops):
        yield copy_step(
            c, src=(c + direction * hop) % n, dst=(c + direction * (hop + 1)) % n
        )


def carry(n: int, direction: int, farthest: int) -> Iterator[Step]:
    """Every rank's chunks for the 1..farthest-th rank that way go there, hop by hop."""
    i = np.arange(n)[:, None]
    for hop in range(1, farthest + 1):
        distance = np.arange(hop, farthest + 1)  # those not yet there
        src, dst = (i + direction * (hop - 1)) % n, (i + direction * hop) % n
        yield copy_step(i * n + (i + direction * distance) % n, src, dst)
