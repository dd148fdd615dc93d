"""Top-k: the k largest elements are sent, each with its index; the rest is kept.

    x          | .1  -7  .2   3  .0  -.4  9  .1 |       k = 3
    sent       (1, -7) (3, 3) (6, 9)                    8 bytes each
    residual   | .1   0  .2   0  .0  -.4  0  .1 |       added to the next gradient

What is left out is never more than (1 - k/count) of the squared norm, so with error
feedback (`feedback`) nothing is lost. Every rank selects its own elements; the sum of
the selections has up to n·k elements (`runtime.compress.sparse` computes it).

NaN counts as larger than anything, so it is sent first.

Lin et al., "Deep gradient compression" (2018): momentum correction and warm-up. Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory" (2018): the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument, whole_number

Floats = NDArray[np.float32]
Places = NDArray[np.int64]
PAIR_BYTES = 8
"""A place of 32 bits and a value of 32 bits."""
FIRST_DENSITY = 0.25
"""Where warm-up begins: a quarter of the elements."""
_ORDER = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class TopK:
    """Send the share `density` of the elements, or `k` of them if that is given.

    `momentum`: what adds up here are velocities, not gradients (momentum correction);
    the optimizer then has none of its own. `warmup`: in so many steps the density goes
    down from a quarter to the density given.
    """

    density: float = 0.01
    k: int = 0
    momentum: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check_choice("topk", self.density, self.k)
        if not 0 <= self.momentum < 1:
            raise BadArgument(
                f"topk: momentum = {self.momentum}: expected at least 0, less than 1"
            )
        if self.warmup < 0:
            raise BadArgument(f"topk: warmup = {self.warmup}: expected 0 or more steps")

    def count(self, elements: int, step: int | None = None) -> int:
        """How many of so many elements are sent, in this step."""
        k = chosen("topk", self.k, self.density, elements)
        first = FIRST_DENSITY * elements
        if step is not None and step < self.warmup and k < first:
            less: float = (k / first) ** (step / self.warmup)
            return ceil(first * less)
        return k


def check_choice(where: str, density: float, k: int) -> None:
    """Raise if so many cannot be chosen from anything."""
    if not 0 < density <= 1:
        raise BadArgument(
            f"{where}: density = {density}: expected more than 0, and 1 at most; "
            "1 % is 0.01"
        )
    if whole_number("k", k) < 0:
        raise BadArgument(f"{where}: k = {k}: expected 1 or more elements")


def chosen(where: str, k: int, density: float, elements: int) -> int:
    """k, if it is given and there are so many; or the share, one element at least."""
    if not k:  # 0.07 * 100 is a little more than 7
        return ceil(round(density * elements, 6))
    if k > elements:
        raise BadArgument(
            f"{where}: k = {k}, but there are {elements} elements; choose fewer, or "
            f"give a density, as in {where}:0.01"
        )
    return k


def largest(x: Floats, k: int) -> Places:
    """The places of the k largest, in ascending order; of equals, the first ones."""
    # Floats without their sign are in the order of their bits, and NaN comes last.
    size = x.view(np.uint32) & _ORDER
    if k >= x.size:
        return np.arange(x.size)
    if k == 0:
        return np.empty(0, np.int64)
    least = np.partition(size, x.size - k)[x.size - k]
    above = np.flatnonzero(size > least)
    equal = np.flatnonzero(size == least)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def packed(places: Places, values: Floats) -> NDArray[np.uint64]:
    """Places and values as one number of 64 bits for each pair."""
    bits = values.view(np.uint32).astype(np.uint64)
    return (places.astype(np.uint64) << np.uint64(32)) | bits


def unpacked(pairs: NDArray[np.uint64]) -> tuple[Places, Floats]:
    """The places and the values again."""
    values = (pairs & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    return (pairs >> np.uint64(32)).astype(np.int64), values
