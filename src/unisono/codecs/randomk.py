"""Random-k: elements selected at random, the same on all ranks; no indices are sent.

All ranks draw with one seed, and any all_reduce can sum the selected elements, as a
shorter tensor. The selection is stratified: one element in each of k runs.

    x        |  .   .   .   | .   .   .  | .   .   .  |      k = 3
    drawn         1               2        0                 by hash(seed, run)

So every element has the same probability (runs differ by one element at most), indices
are in ascending order, and k numbers are drawn instead of a permutation of all
elements. The numbers are arithmetic on 64 bits, the same on every machine and in every
version.

Wangni et al., "Gradient sparsification" (2018); Steele, Lea and Flood, "Fast splittable
pseudorandom number generators" (2014), for the mixing of bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.codecs.topk import Places, check_choice, chosen
from unisono.errors import BadArgument

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class RandomK:
    """Send the share `density` of the elements, or `k` of them if that is given.

    `seed` chooses which. Error feedback adds its own steps to it; callers without
    must give another one in each call.
    """

    density: float = 0.01
    k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check_choice("randomk", self.density, self.k)
        if self.seed < 0:
            raise BadArgument(f"randomk: seed = {self.seed}: expected 0 or more")

    def count(self, elements: int) -> int:
        """How many of so many elements are sent."""
        return chosen("randomk", self.k, self.density, elements)


def numbers(seed: int, count: int) -> NDArray[np.uint64]:
    """So many numbers of 64 bits, the same wherever they are drawn."""
    first = np.uint64((seed * _GOLDEN + _GOLDEN) & 0xFFFFFFFFFFFFFFFF)
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mixed(z ^ _mixed(np.full(1, first)))


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def drawn(elements: int, k: int, seed: int) -> Places:
    """Which k of so many elements are sent, in ascending order."""
    if k == 0:
        return np.empty(0, np.int64)
    bounds = np.arange(k + 1, dtype=np.int64) * elements // k
    sizes = np.diff(bounds).astype(np.uint64)
    return bounds[:-1] + (numbers(seed, k) % sizes).astype(np.int64)
