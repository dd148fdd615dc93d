"""Tree: what a rank knows it passes on, so that those who know double in every step.

The k-nomial tree on rank 0: in the first step 0 sends to the ranks k^(h-1), 2k^(h-1),
... below n, and then each of these heads its own block in the same way, with a smaller
k-power. Blocks are consecutive ranks, so scatter sends each head what is for its whole
block. With radix 2 this is the binomial tree.

              rounds               span, in buffers
  broadcast   ⌈log2 n⌉             ⌈log2 n⌉; radix k: at most (k-1)⌈log_k n⌉ of both
  reduce      ⌈log2 n⌉             ⌈log2 n⌉
  scatter     ⌈log2 n⌉             (n-1)/n, the least possible
  gather      ⌈log2 n⌉             (n-1)/n, the least possible
  all_reduce  2⌈log2 n⌉            2⌈log2 n⌉

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step

ADVICE = Advice(
    en=Words(
        good=(
            "Small buffers from or to one rank: the number of ranks that have it "
            "doubles each round."
        ),
        bad=(
            "Large broadcasts and sums: whole buffers pass every level, and leaves "
            "are idle."
        ),
        memory=(
            "In scatter and gather inner ranks hold the rows of all ranks below them."
        ),
    ),
    zh=Words(
        good="从一个 rank 发出或汇到一个 rank 的小数据：每轮拥有数据的 rank 数加倍。",
        bad="大数据的广播和求和：整个缓冲区经过每一层，叶子空闲。",
        memory="scatter 和 gather 中，内部 rank 要暂存其下所有 rank 的行。",
    ),
)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def broadcast(n: int, radix: int = 2) -> Iterator[Step]:
    """Every head of a block sends the buffer to the heads of its smaller blocks."""
    for stride in strides(n, radix):
        head, place = (
            np.arange(0, n, stride * radix)[:, None],
            np.arange(1, min(radix, n)),
        )
        down = copy_step(0, src=head, dst=head + place * stride)
        yield down.where(down.dst < n)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def scatter(n: int, radix: int = 2) -> Iterator[Step]:
    """Every head sends the heads of the smaller blocks what is for their block."""
    c = np.arange(n)
    for stride in strides(n, radix):
        head, below = c - c % (stride * radix), c - c % stride
        yield copy_step(c, src=head, dst=below).where(head != below)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def reduce(n: int, radix: int = 2) -> Schedule:
    """The broadcast backwards: every head adds up what its block hands in."""
    return broadcast(n, radix=radix).mirror()


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def gather(n: int, radix: int = 2) -> Schedule:
    """The scatter backwards: every head collects its block."""
    return scatter(n, radix=radix).mirror()


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def all_reduce(n: int, radix: int = 2) -> Schedule:
    """The sum is made on the way up the tree and handed out on the way down."""
    return reduce(n, radix=radix).then(broadcast(n, radix=radix))


def strides(n: int, radix: int) -> list[int]:
    """The powers of `radix` below n, the largest first."""
    powers = [1]
    while powers[-1] * radix < n:
        powers.append(powers[-1] * radix)
    return powers[::-1] if n > 1 else []
