"""How many bytes the bursts of a probe have, from host to host, and what they tell.

It is the part of the probe (`links.py`) that neither waits nor sends. What a burst is
expected to take follows from those before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from unisono.runtime.plan.predict import ALIKE, MODEL

SHORT = 64
FIRST = 16 << 10
LONGEST = 4 << 20
LONGER = 4
"""How often bursts are made longer: to `FIRST`, then by what was found before."""
GROWTH = 16
"""A burst has at most so many times the bytes of the one before, from `FIRST` on.

Networks that limit rates by a token bucket, as those of clouds, pass the first bytes
faster than those that follow.
"""
MUCH_LONGER = 8
"""So many times the time of an answer without bytes is worth more than one burst."""
LEAST_BYTES = 0.2
"""Of the time of a burst, its bytes take at least so much, unless it is a long time."""
REPEATS = 3

Pair = tuple[int, int]
Pairs = dict[Pair, float]


class Bursts:
    """Bursts from host to host: seconds per byte, and how long the next may be.

    Short ones have hardly a byte, so what longer ones take more is for their bytes. The
    next ones have as many bytes as fit in their time at the pace of the last ones. The
    pace is seconds per byte: what the burst took more than the short one, or a part of
    all it took, if that is more.
    """

    def __init__(self, short: Pairs) -> None:
        """Begin with the seconds of short bursts."""
        self.short: Pairs = {}
        self.sizes: dict[Pair, int] = {}
        self.paces: Pairs = {}
        self.rates: Pairs = {}
        self.begin(short)

    def begin(self, short: Pairs) -> None:
        """Take in short bursts of further pairs."""
        self.short |= short
        self.sizes |= dict.fromkeys(short, SHORT)

    def longer(self, each: float, pairs: Iterable[Pair]) -> tuple[dict[Pair, int], int]:
        """The bytes of the next burst of each pair, and how often it is made.

        All times it is made take `each` seconds together, as far as is known. It is
        made once if shorter bursts would take little more than latency. A pair is left
        out if its burst would not have twice as many bytes as its last one. None has
        more than `GROWTH` times as many, but for the first, which has `FIRST`.
        """
        idle = max(self.short.values())
        repeats = REPEATS if each >= REPEATS * MUCH_LONGER * idle else 1
        left = each / repeats - idle
        found = {
            pair: min(LONGEST, GROWTH * size, int(left / self.paces[pair]))
            if (size := self.sizes[pair]) > SHORT
            else FIRST
            for pair in pairs
        }
        sizes = {p: size for p, size in found.items() if size > 2 * self.sizes[p]}
        return sizes, repeats

    def add(self, sizes: Mapping[Pair, int], took: Pairs) -> None:
        """Take in longer bursts.

        What they take more than short ones may be mostly chance. So their bytes count
        at least with a part of the burst's time. On busy hosts that part may be far too
        long; then the geometric mean of the burst's time and the time that its bytes
        take on an ordinary network counts, if it is less than that part.
        """
        for pair, seconds in took.items():
            size, more = sizes[pair], seconds - self.short[pair]
            least = LEAST_BYTES * seconds
            usual = size * math.sqrt(seconds / size * MODEL.byte)
            self.rates[pair] = max(more, min(least, usual)) / (size - SHORT)
            self.sizes[pair], self.paces[pair] = size, max(more, least) / size

    def told(self) -> Pairs:
        """Seconds per byte, without those of short bursts between hosts known better.

        What 16 KiB take is hardly more than what none take, so of several pairs one
        seems to be fast by chance, and the fastest pair of a host is what counts.
        """
        long = {pair for pair in self.rates if self.sizes[pair] > FIRST}
        sending, receiving = {src for src, _ in long}, {dst for _, dst in long}
        return {
            (src, dst): rate
            for (src, dst), rate in self.rates.items()
            if (src, dst) in long or src not in sending or dst not in receiving
        }

    def differ(self) -> bool:
        """Whether some links seem to be faster than others."""
        rates = self.rates.values()
        return max(rates, default=0.0) > ALIKE * min(rates, default=0.0)


def grown(
    bursts: Bursts,
    num_shifts: int,
    left: Callable[[], float],
    exchanged: Callable[[dict[Pair, int] | None, int, float], Pairs],
) -> None:
    """Take in short bursts, and then ever longer ones while time is left.

    `left` tells how much. `exchanged` makes bursts of these bytes, or short ones, so
    many of each pair, which are expected to take so many seconds each.
    """
    short = exchanged(None, REPEATS, 0.0)
    bursts.begin(short)
    for more in range(LONGER, 0, -1):
        seconds = left()
        if seconds <= 0 and more < LONGER:
            break
        each = seconds / (min(more, 2) * num_shifts)  # the rest may be for longer ones
        sizes, repeats = bursts.longer(each, short)
        if sizes:
            bursts.add(sizes, exchanged(sizes, repeats, each / repeats))
