"""Rabenseifner: recursive halving to add up, recursive doubling to hand out.

For n = 2^l this is halving and doubling. For other n the fold is done by half exchange:
the two ranks of a pair swap halves and each adds one, so the adding is shared, and then
one of them hands its half over; that costs a round more than folding whole buffers and
half a buffer less of adding. q is the power of two below n.

                             rounds     span                    work
  all_reduce, n = 2^l        2l         2(n-1)/n                (n-1)/n
    early=1                  2l - 1     2(n-1)/n                1
    early=e, with d = l-e    l + d      2(1-2^-d) + e·2^-d      (1-2^-d) + e·2^-d
  all_reduce, other n        2l + 3     4 - 2/q                 3/2 - 1/q
  reduce, n = 2^l            2l         2(n-1)/n                (n-1)/n

`early` stops halving that many levels early and exchanges whole sums on those instead:
the first one saves a round and costs no bytes.

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from unisono.algorithms import tree
from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.butterfly import settle
from unisono.algorithms.recursive_doubling import power_below
from unisono.algorithms.registry import algorithm
from unisono.schedule import Step, copy_step, embed, phase, reduce_step, together
from unisono.schedule.transform import fold_pairs

ADVICE = Advice(
    en=Words(
        good=(
            "Large reductions: the fewest bytes for powers of two, and little to "
            "add for others."
        ),
        bad="Small buffers: recursive doubling needs half the rounds.",
        memory="None: sums are made in the buffer itself.",
    ),
    zh=Words(
        good="大数据归约：rank 数为 2 的幂时字节最少，其他 rank 数时加法也少。",
        bad="小数据：递归倍增只需一半的轮数。",
        memory="不需要：直接在缓冲区内求和。",
    ),
)


@algorithm(
    chunks=lambda n, early: power_below(n), also=[{"early": 1}], least={"early": 0}
)
def all_reduce(n: int, early: int = 0) -> Iterator[Step]:
    """Halve while adding, exchange what remains, then double."""
    q = power_below(n)
    levels = q.bit_length() - 1
    down = list(settle([2] * levels))[: max(0, levels - early)]
    yield from half_exchange(n)
    yield from phase("reduce_scatter", on_pairs(n, down))
    yield from phase("exchange", on_pairs(n, whole_sums(q, levels - len(down))))
    up = [s.backwards(swap_kinds=True) for s in reversed(down)]
    yield from phase("all_gather", on_pairs(n, up))
    core, extra, _ = fold_pairs(q, n)
    yield copy_step(np.arange(q)[:, None], src=core, dst=extra).named("fold out")


@algorithm(chunks=lambda n: power_below(n))
def reduce(n: int) -> Iterator[Step]:
    """Halve while adding, then gather the shares along a binomial tree."""
    q = power_below(n)
    yield from half_exchange(n)
    yield from phase("reduce_scatter", on_pairs(n, settle([2] * (q.bit_length() - 1))))
    yield from phase("gather", on_pairs(n, tree.gather(q)))


def on_pairs(n: int, steps: Iterable[Step]) -> Iterator[Step]:
    """The steps of a power of two of ranks, run by those that stay in."""
    q = power_below(n)
    _, _, stays = fold_pairs(q, n)
    return embed(steps, np.arange(q), lambda _, rank: stays[rank])


def half_exchange(n: int) -> Iterator[Step]:
    """Each pair swaps halves and adds them; then one hands its half to the other."""
    q = power_below(n)
    core, extra, _ = fold_pairs(q, n)
    low, high = np.split(np.arange(q)[:, None], [(q + 1) // 2])
    swap = reduce_step(low, src=extra, dst=core), reduce_step(high, src=core, dst=extra)
    yield together(swap).named("fold in")
    yield copy_step(high, src=extra, dst=core).named("fold in")


def whole_sums(q: int, levels: int) -> Iterator[Step]:
    """Recursive doubling on the shares that `levels` halvings were spared."""
    r = np.arange(q)[:, None]
    share = r - r % (1 << levels) + np.arange(1 << levels)
    for level in range(levels):
        yield reduce_step(share, src=r, dst=r ^ (1 << level))
