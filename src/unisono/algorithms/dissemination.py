"""Dissemination: what a rank knows doubles in every step, for any n.

barrier: in step k every rank notifies the rank 2^k places on of all it knows. After
⌈log2 n⌉ steps every rank knows of all, n a power of two or not.

all_reduce has to count each contribution once, so knowledge may not overlap. The ranks
are halved again and again into groups that differ by at most one; going back up, each
rank of one group receives from one rank of its sister group, so all members of the
joint group hold the same sum, to the last bit. Where the sister is smaller by one, one
of its ranks sends twice. No rank sends or receives more than ⌈log2 n⌉ messages in all.

With `carry` no rank ever sends to two: windows of 2^k ranks are summed as in the
barrier, and the sums of the windows that make up n in binary are carried along in a
temporary. This has the fewest rounds of all for n other than 2^l, but every rank adds
in a different order, so ranks may differ in the last bit.

                        steps       rounds                 span
  barrier               ⌈log2 n⌉    ⌈log2 n⌉               none
  all_reduce            ⌈log2 n⌉    below 2⌈log2 n⌉        as many as rounds
  all_reduce, carry     ⌈log2 n⌉    ⌈log2 n⌉               ⌈log2 n⌉ + ones(n) - 2
  all_reduce, n = 2^l   l           l                      l

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International
Journal of Parallel Programming 17 (1988).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.recursive_doubling import power_below
from unisono.algorithms.registry import algorithm
from unisono.schedule import Step, copy_step, reduce_step, together

SUM, CARRY = 0, 1

ADVICE = Advice(
    en=Words(
        good="Barriers, and small buffers where n is not a power of two.",
        bad="Large buffers: whole buffers are sent in every step.",
        memory="None; with carry a second buffer for the sums that are carried along.",
    ),
    zh=Words(
        good="同步屏障；以及 n 不是 2 的幂时的小数据。",
        bad="大数据：每一步都发送整个缓冲区。",
        memory="不需要；使用 carry 时要另一个缓冲区来携带部分和。",
    ),
)


def carries(n: int, carry: bool) -> bool:
    """Whether there is anything to carry; with a power of two of ranks there is not."""
    return carry and power_below(n) != n


@algorithm
def barrier(n: int) -> Iterator[Step]:
    """Every rank notifies the rank 2^k places on of all ranks it knows."""
    r = np.arange(n)[:, None]
    known = 1
    while known < n:
        news = np.arange(min(known, n - known))
        yield copy_step((r - news) % n, src=r, dst=(r + known) % n)
        known *= 2


@algorithm(chunks=1, temporaries=lambda n, carry: int(carries(n, carry)))
def all_reduce(n: int, carry: bool = False) -> Iterator[Step]:
    """Groups join in pairs, or windows of ranks grow, until they hold all ranks."""
    yield from _windows(n) if carries(n, carry) else _groups(n)


def _groups(n: int) -> Iterator[Step]:
    levels = [[np.arange(n)]]
    while any(g.size > 1 for g in levels[-1]):
        levels.append([half for g in levels[-1] for half in np.array_split(g, 2)])
    spoken = np.zeros(n, dtype=np.int64)
    for groups in reversed(levels[1:]):
        meetings = []
        for one, other in zip(groups[::2], groups[1::2], strict=True):
            if not other.size:
                continue
            teller = other
            if one.size > other.size:  # the rank that has sent least sends twice
                teller = np.append(other, other[np.argmin(spoken[other])])
            meetings.append(reduce_step(SUM, src=teller, dst=one))
            meetings.append(reduce_step(SUM, src=one[: other.size], dst=other))
        step = together(meetings)
        spoken += np.bincount(step.src, minlength=n)
        yield step


def _windows(n: int) -> Iterator[Step]:
    """Rank r's sum covers r..r+2^k-1, and its carry the n mod 2^k ranks from r on."""
    r = np.arange(n)
    levels = (n - 1).bit_length()
    carrying = False
    for k in range(levels):
        ahead = (r + (1 << k)) % n
        if k == levels - 1 and carrying:
            yield reduce_step(CARRY, src=ahead, dst=r, into=SUM)
            return
        parts = [reduce_step(SUM, src=ahead, dst=r)]
        if n >> k & 1:
            parts.append(copy_step(SUM, src=r, dst=r, into=CARRY))
            if carrying:
                parts.append(reduce_step(CARRY, src=ahead, dst=r))
            carrying = True
        yield together(parts)
