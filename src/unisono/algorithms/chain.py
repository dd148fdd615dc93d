"""Chain: rank r hands everything to rank r+1, in segments, like buckets to a fire.

Slow for one message, since it passes n-1 hands; but cut into m segments the chain fills
up, every link is busy all the time, and a long message costs little more than one hop.

              rounds       span, in buffers
  broadcast   n-2+m        (n-2+m)/m buffers, towards 1 as m grows
  reduce      n-2+m        (n-2+m)/m
  all_reduce  2(n-2+m)     2(n-2+m)/m

The best m is the square root of (n-2) times the message's time over one hop's latency.
"""

from collections.abc import Iterator

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, copy_step
from unisono.schedule.collective import BROADCAST

ADVICE = Advice(
    en=Words(
        good=(
            "Large broadcasts and reductions where only neighbours have fast "
            "links; many segments."
        ),
        bad="Small messages: each passes n-1 ranks, one after the other.",
        memory="None: segments are passed on from the buffer itself.",
    ),
    zh=Words(
        good="只有相邻 rank 之间链路快时的大数据广播和归约；段数宜多。",
        bad="小消息：要依次经过 n-1 个 rank。",
        memory="不需要：各段直接从缓冲区转发。",
    ),
)


@algorithm(least={"segments": 1})
def broadcast(n: int, segments: int = 4) -> Schedule:
    """Each segment goes from rank to rank, one step behind the segment before it."""
    return hand_on(n).split(segments)


@algorithm(least={"segments": 1})
def reduce(n: int, segments: int = 4) -> Schedule:
    """The broadcast backwards: each rank adds its own and hands the sum on."""
    return broadcast(n, segments=segments).mirror()


@algorithm(least={"segments": 1})
def all_reduce(n: int, segments: int = 4) -> Schedule:
    """Down the chain to rank 0 and back up."""
    return reduce(n, segments=segments).then(broadcast(n, segments=segments))


def hand_on(n: int) -> Schedule:
    """The chain with one segment."""
    return Schedule(BROADCAST, n, 1, lambda: _links(n))


def _links(n: int) -> Iterator[Step]:
    for r in range(n - 1):
        yield copy_step(0, src=r, dst=r + 1)
