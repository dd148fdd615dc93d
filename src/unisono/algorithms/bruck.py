"""Bruck: all_to_all in few rounds, by carrying chunks for others.

A chunk from i to j has the distance d = j-i (mod n) to go. Write d in radix r: in step
k every chunk whose k-th digit is v moves v·r^k places on, together with all others that
do. Chunks take detours through other hands, so more bytes travel; but a step is only
r-1 messages, and there are as many steps as digits.

              rounds                    span, in buffers
  radix 2     ⌈log2 n⌉                  about half of log2 n
  radix r     at most (r-1)⌈log_r n⌉    at most (r-1)/r·⌈log_r n⌉
  radix n     n-1                       (n-1)/n: direct

Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8 (1997).
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Step, copy_step

ADVICE = Advice(
    en=Words(
        good="Small buffers among many ranks: few messages, each with many chunks.",
        bad=(
            "Large buffers: a chunk travels by way of others, so more bytes are "
            "sent than with direct."
        ),
        memory="A rank holds chunks of others that are on their way.",
    ),
    zh=Words(
        good="小数据、rank 很多：消息少，每条消息带许多块。",
        bad="大数据：块要经其他 rank 转发，发送的字节比 direct 多。",
        memory="每个 rank 要暂存路过的、属于别人的块。",
    ),
)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def all_to_all(n: int, radix: int = 2) -> Iterator[Step]:
    """In step k each chunk moves by the k-th digit of the distance it has to go."""
    i, distance = np.arange(n)[:, None], np.arange(n)
    chunk = i * n + (i + distance) % n
    stride = 1
    while stride < n:
        done, moves = distance % stride, distance // stride % radix
        src = (i + done) % n
        yield copy_step(chunk, src, (src + moves * stride) % n).where(
            np.broadcast_to(moves > 0, (n, n))
        )
        stride *= radix
