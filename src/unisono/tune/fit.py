"""Latency and seconds per byte from measured times: straight lines, piece by piece.

A link does not have one speed. Small messages fit in a cache line, large ones do not
fit in the caches, and a transport changes its protocol in between. So the sizes are
divided into at most three ranges, each with its own line: time = latency + byte * size.

An error of a tenth counts the same for 5 µs and for 5 ms, so residuals are relative to
the measured time. All ways to divide the sizes are tried; Schwarz's criterion decides
whether a further range improves the fit enough for its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument

Floats = NDArray[np.float64]

MOST_PIECES = 3
FEWEST_SIZES = 3
"""How many sizes a piece has at least: two would always fit."""
SURE = 1.96
"""So many standard errors either way hold the true value 95 times in 100."""
_EXACT = 1e-4
"""Nothing is measured better than to this part; closer fits are not rewarded."""


@dataclass(frozen=True)
class FitSegment:
    """The line for sizes up to `upto`: seconds, seconds per byte, and how sure."""

    lower: int
    upto: int
    latency: float
    byte: float
    latency_error: float
    byte_error: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that more bytes are moved at; infinite if they cost none."""
        return 1 / self.byte if self.byte else math.inf


@dataclass(frozen=True)
class Fit:
    """Lines for ascending ranges of sizes; the last holds for all above, too."""

    pieces: tuple[FitSegment, ...]
    error: float
    """The typical residual, as a part of the time."""

    def at(self, nbytes: float) -> float:
        """Seconds for a message of so many bytes."""
        for piece in self.pieces:
            if nbytes <= piece.upto:
                return piece.latency + piece.byte * nbytes
        last = self.pieces[-1]
        return last.latency + last.byte * nbytes


def fit(
    sizes: Sequence[int], seconds: Sequence[float], *, most: int = MOST_PIECES
) -> Fit:
    """The lines that measured times follow, at most `most` of them.

    A size may have several times.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise BadArgument(
            f"fit: {x.size} sizes, {y.size} times; expected equal numbers"
        )
    if not (np.isfinite(y).all() and (y > 0).all() and (x >= 0).all()):
        raise BadArgument("fit: expected times above 0, and sizes not below")
    distinct = np.unique(x)
    if distinct.size < 2:
        raise BadArgument(f"fit: {distinct.size} sizes; a line needs two at least")
    most = max(1, min(most, distinct.size // FEWEST_SIZES))
    fits: list[tuple[float, Fit]] = []
    for count in range(1, most + 1):
        for cuts in combinations(range(1, distinct.size), count - 1):
            edges = [0, *cuts, distinct.size]
            if count > 1 and min(np.diff(edges)) < FEWEST_SIZES:
                continue
            fits.append(_cut(x, y, distinct, edges))
    return min(fits, key=lambda pair: pair[0])[1]


def _cut(
    x: Floats, y: Floats, distinct: Floats, edges: Sequence[int]
) -> tuple[float, Fit]:
    """The fit with these cuts, and how much it is worth: less is better."""
    pieces, squares = [], 0.0
    for low, high in pairwise(edges):
        inside = (x >= distinct[low]) & (x <= distinct[high - 1])
        piece, left = _line(x[inside], y[inside])
        pieces.append(piece)
        squares += left
    count = len(pieces)
    spread = max(squares / x.size, _EXACT**2)
    worth = x.size * math.log(spread) + (3 * count - 1) * math.log(x.size)
    return worth, Fit(tuple(pieces), math.sqrt(squares / x.size))


def _line(x: Floats, y: Floats) -> tuple[FitSegment, float]:
    """The line with the least squares of relative residuals, and those squares.

    A latency or a cost per byte below zero is noise: it is zero then, and the other is
    fitted alone.
    """
    table = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    used = [0, 1]
    values = np.linalg.lstsq(table, np.ones_like(y), rcond=None)[0]
    if values.min() < 0:
        used = [1 - int(values.argmin())]
        kept = table[:, used[0]]
        values = np.zeros(2)
        values[used[0]] = max(0.0, float(kept.sum() / (kept @ kept)))
    squares = float(np.square(table @ values - 1).sum())
    errors = np.zeros(2)
    free = x.size - len(used)
    if free > 0:
        some = table[:, used]
        scale = np.linalg.norm(some, axis=0)  # of very different magnitude
        inverse = np.linalg.pinv((some / scale).T @ (some / scale))
        errors[used] = SURE * np.sqrt(np.diag(inverse) * squares / free) / scale
    fields = (float(v) for v in (*values, *errors))
    return FitSegment(int(x.min()), int(x.max()), *fields), squares
