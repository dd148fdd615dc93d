"""PowerSGD: a matrix of gradients is sent as the product of two thin matrices.

    M (a × b)  ≈  P (a × r) · Qᵀ (r × b)         r(a+b) numbers instead of ab

One step of a power iteration, begun where the last one ended (Q is kept, and gradients
change slowly); each arrow is a plain all_reduce, since everything sent is linear in M:

    P = M Q   → sum   → orthogonal columns
    Q = Mᵀ P  → sum   → M ≈ P Qᵀ, the same on every rank

What every rank computes from sums must have the same bits everywhere, though ranks may
have other processors and other BLAS. So orthogonalising and the last product are made
of additions and multiplications in a fixed order. What a rank computes from its own M
alone may use any order.

Vogels, Karimireddy and Jaggi, "PowerSGD" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from unisono.codecs.randomk import numbers
from unisono.codecs.topk import Floats
from unisono.errors import BadArgument, whole_number

_TINY = 1e-30


@dataclass(frozen=True)
class PowerSGD:
    """Matrices are sent with this rank; `warmup` steps before that send them whole."""

    rank: int = 4
    warmup: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if whole_number("rank", self.rank) < 1:
            raise BadArgument(f"powersgd: rank = {self.rank}: expected 1 or more")
        if self.warmup < 0:
            raise BadArgument(f"powersgd: warmup = {self.warmup}: expected 0 or more")

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(a, b, r) of a tensor of this shape; None if it is smaller when whole."""
        if len(shape) < 2:
            return None
        a, b = shape[0], prod(shape[1:])
        r = min(self.rank, a, b)
        return (a, b, r) if r * (a + b) < a * b else None


def first_guess(b: int, r: int, seed: int) -> Floats:
    """A matrix (b × r) to begin with: in [-1, 1), the same on every rank."""
    drawn = (numbers(seed, b * r) >> np.uint64(40)).astype(np.float32)
    guess: Floats = drawn / np.float32(1 << 23) - np.float32(1)
    return guess.reshape(b, r)


def orthogonal(p: Floats) -> Floats:
    """The columns of p, each less its part along those before it, of length one.

    A column of which nothing is left becomes zero.
    """
    columns: list[NDArray[np.float64]] = []
    for column in p.T.astype(np.float64):
        before = _dot(column, column)
        for _ in range(2):  # once more, for what rounding has left
            for other in columns:
                column = column - _dot(other, column) * other
        left = _dot(column, column)
        lasting = left > max(before * 1e-12, _TINY) or not np.isfinite(left)
        columns.append(column / np.sqrt(left) if lasting else 0 * column)
    return np.stack(columns, 1).astype(np.float32)


def product(p: Floats, q: Floats) -> Floats:
    """P Qᵀ, column after column: the same bits on every machine."""
    total = np.multiply.outer(p[:, 0], q[:, 0])
    for i in range(1, p.shape[1]):
        total += np.multiply.outer(p[:, i], q[:, i])
    return total


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> np.float64:
    """Added up from the first to the last, which no library does in another order."""
    last: np.float64 = np.add.accumulate(x * y)[-1]
    return last
