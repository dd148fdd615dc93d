"""Torus: rings along every dimension, all of them busy in both directions.

Ranks are the points of a D-dimensional torus; rank r is its coordinates read as one
number, the last changing fastest. The data is cut in 2D parts. Each part is gathered by
rings along one dimension after the other; the parts begin with different dimensions,
and half of them go the other way, so in every step each of a rank's 2D links carries
one part.

                  steps              over each link, out of every rank
  all_gather      sum of (side-1)    (n-1)/n ÷ 2D
  reduce_scatter  sum of (side-1)    (n-1)/n ÷ 2D
  all_reduce      twice that         2(n-1)/n ÷ 2D

for equal sides. `shape` gives the sides, as in 4x4x4; without it the torus is flat and
as square as n allows, and for a prime n it is a ring.

Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
interconnects", ICS 2010; Sack and Gropp, "Collective algorithms for multiported torus
networks", ACM TOPC 1 (2015).
"""

import math
from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.errors import BadArgument, UnsupportedWorld
from unisono.schedule import Schedule, Step, at_once, copy_step
from unisono.schedule.collective import Ints

ADVICE = Advice(
    en=Words(
        good=(
            "Machines that are wired as a torus, large buffers: all links are busy "
            "both ways."
        ),
        bad="Other networks, and small buffers: a step is several messages.",
        memory="None: sums are made in the buffer itself.",
    ),
    zh=Words(
        good="按环面布线的机器、大数据：所有链路双向都忙碌。",
        bad="其他网络，以及小数据：一步要发多条消息。",
        memory="不需要：直接在缓冲区内求和。",
    ),
)


def _parts(n: int, shape: str) -> int:
    return n * 2 * len(sides(n, shape))


@algorithm(chunks=_parts)
def all_gather(n: int, shape: str = "") -> Iterator[Step]:
    """Every part goes round the rings of one dimension after the other."""
    lengths = sides(n, shape)
    dims = len(lengths)
    runs = []
    for part in range(2 * dims):
        order = [(part // 2 + i) % dims for i in range(dims)]
        runs.append(_rounds(lengths, order, +1 if part % 2 == 0 else -1, part))
    yield from at_once(*runs)


@algorithm
def reduce_scatter(n: int, shape: str = "") -> Schedule:
    """The same backwards."""
    return all_gather(n, shape=shape).mirror()


@algorithm
def all_reduce(n: int, shape: str = "") -> Schedule:
    """Add along all dimensions, then hand out."""
    return reduce_scatter(n, shape=shape).then(all_gather(n, shape=shape))


def _rounds(
    lengths: list[int], order: list[int], direction: int, part: int
) -> Iterator[Step]:
    """One part of every rank's share goes round the dimensions in the given order."""
    n, parts = math.prod(lengths), 2 * len(lengths)
    owner = np.arange(n)
    home = np.array(np.unravel_index(owner, lengths))[:, :, None]
    reached = np.zeros((len(lengths), 1, 1), dtype=np.int64)  # offsets that have it
    for dim in order:
        here = home + reached
        for hop in range(lengths[dim] - 1):
            src, dst = here.copy(), here.copy()
            src[dim] += direction * hop
            dst[dim] += direction * (hop + 1)
            chunk = (owner * parts + part)[:, None]
            yield copy_step(chunk, _rank(src, lengths), _rank(dst, lengths))
        along = np.zeros((len(lengths), 1, lengths[dim]), dtype=np.int64)
        along[dim] = np.arange(lengths[dim])
        reached = (reached[..., None] + along[:, :, None, :]).reshape(
            len(lengths), 1, -1
        )


def _rank(point: Ints, lengths: list[int]) -> Ints:
    """The rank at each point, coordinates wrapping round."""
    wrapped = point % np.array(lengths)[:, None, None]
    rank: Ints = np.ravel_multi_index(tuple(wrapped), tuple(lengths))
    return rank


def sides(n: int, shape: str) -> list[int]:
    """The sides of the torus of n ranks, from `shape`."""
    if not shape:
        short = next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
        return [short, n // short] if short > 1 else [n]
    try:
        sides = [int(side) for side in shape.split("x")]
    except ValueError:
        raise BadArgument(
            f"torus: shape {shape!r}: expected sides as in 4x4x4"
        ) from None
    if min(sides) < 1:
        raise BadArgument(f"torus: shape {shape!r}: sides must be at least 1")
    if math.prod(sides) != n:
        raise UnsupportedWorld(
            f"torus: shape {shape} has {math.prod(sides)} ranks, got {n} (leave the "
            "shape out for the most square one)",
            n=n,
        )
    return sides
