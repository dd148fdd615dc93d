"""Circulant: doubling round a circle, in the fewest rounds and bytes for every n.

In all_gather every rank r sends the h consecutive chunks it has, its own first, to rank
r-h, and so has 2h; in the last step it sends only as many as are still missing. Nothing
needs n to be a power of two, and no chunk arrives twice. Backwards it is a
reduce_scatter.

                  rounds       span, in buffers
  all_gather      ⌈log2 n⌉     (n-1)/n, both the least possible
  reduce_scatter  ⌈log2 n⌉     (n-1)/n, both the least possible
  all_reduce      2⌈log2 n⌉    2(n-1)/n

Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8 (1997); Träff, "Optimal, non-pipelined
reduce-scatter and allreduce algorithms", arXiv 2410.14234 (2024).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step

ADVICE = Advice(
    en=Words(
        good=(
            "Any number of ranks, odd ones too: the fewest rounds for the fewest bytes."
        ),
        bad="Rings and tori: partners are far apart, and their messages share links.",
        memory="None: chunks arrive where they belong.",
    ),
    zh=Words(
        good="任意 rank 数，包括奇数：字节最少，且轮数也最少。",
        bad="环形和环面网络：通信对象相距远，消息会争用链路。",
        memory="不需要：块直接到达目的位置。",
    ),
)


@algorithm
def all_gather(n: int) -> Iterator[Step]:
    """Every rank sends what it has to the one that many places to its left."""
    r, have = np.arange(n)[:, None], 1
    while have < n:
        k = np.arange(min(have, n - have))
        yield copy_step((r + k) % n, src=r, dst=(r - have) % n)
        have += k.size


@algorithm
def reduce_scatter(n: int) -> Schedule:
    """The same backwards: what was handed out is now handed in, and added."""
    return all_gather(n).mirror()


@algorithm
def all_reduce(n: int) -> Schedule:
    """Hand in and add, then hand out."""
    return reduce_scatter(n).then(all_gather(n))
