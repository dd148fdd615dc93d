"""PAT, parallel aggregated trees: one binomial tree per chunk, far links first.

Every chunk c is broadcast by a binomial tree rooted at rank c, and all n trees are the
same but turned. In each step all trees use the same distance, from the largest power of
two down, so everything that a rank has to pass on goes to one neighbour in one message:
one chunk over the farthest distance, many only over the nearest. Circulant does it the
other way round. `aggregate` bounds how many chunks one message may hold, 0 meaning any
number.

                  rounds                        span, in buffers
  all_gather      ⌈log2 n⌉ fully aggregated     (n-1)/n, both the least possible
  reduce_scatter  ⌈log2 n⌉                      (n-1)/n
  all_reduce      2⌈log2 n⌉                     2(n-1)/n

Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv 2506.20252 (2025).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step

ADVICE = Advice(
    en=Words(
        good=(
            "Small and medium buffers among many ranks, where far links are slow: "
            "few bytes go far."
        ),
        bad=(
            "Large buffers on a switch: the messages to the nearest ranks are the "
            "longest."
        ),
        memory="None; aggregate= bounds how many chunks one message has.",
    ),
    zh=Words(
        good="rank 很多的中小数据，且远距离链路慢：传得远的字节少。",
        bad="交换机上的大数据：发给最近 rank 的消息最长。",
        memory="不需要；aggregate= 限制一条消息中的块数。",
    ),
)


@algorithm(least={"aggregate": 0})
def all_gather(n: int, aggregate: int = 0) -> Iterator[Step]:
    """In every tree, those who have the chunk pass it on by the step's distance."""
    c = np.arange(n)[:, None]
    for power in reversed(range((n - 1).bit_length())):
        distance = 1 << power
        offset = np.arange(
            0, n - distance, 2 * distance
        )  # who has it, seen from the root
        cuts = range(aggregate, offset.size, aggregate) if aggregate else ()
        for some in np.split(offset, list(cuts)):
            yield copy_step(c, src=(c + some) % n, dst=(c + some + distance) % n)


@algorithm(least={"aggregate": 0})
def reduce_scatter(n: int, aggregate: int = 0) -> Schedule:
    """The trees backwards: near links first, every rank adding as it passes on."""
    return all_gather(n, aggregate=aggregate).mirror()


@algorithm(least={"aggregate": 0})
def all_reduce(n: int, aggregate: int = 0) -> Schedule:
    """Up all the trees, then down."""
    return reduce_scatter(n, aggregate=aggregate).then(
        all_gather(n, aggregate=aggregate)
    )
