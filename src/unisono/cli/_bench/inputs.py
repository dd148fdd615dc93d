"""Inputs whose reduction is exact in any order, so that wrong elements can be counted.

Rank r's array repeats its own table of random integers. They are so small that every
partial sum of the ranks is an integer which the type holds exactly; then the order of
additions does not matter, and one differing element is one wrong element. Where a type
cannot hold even a one from every rank, ranks alternate, element by element, and the
others have zero.

The length of the table is prime: a block of data at a wrong position, or shifted by an
element, is detected, because no block length in use is a multiple of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.cli._bench.cases import REDUCING, Case
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.reductions import reduce

PERIOD = 16_381
_LARGEST = 1 << 20
_EXPONENTS = 6
_EXACT_BITS = {
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e5m2": 3,
}

Array = NDArray[Any]
Piece = tuple[tuple[int, ...], int, int]
"""A run of a result: the ranks reduced in it, where in their arrays, how long."""


def fill(array: Array, case: Case, rank: int) -> None:
    """Write the rank's input."""
    table = _table(case.dtype, case.op, case.n, rank)
    for at in range(0, len(array), PERIOD):
        part = array[at : at + PERIOD]
        part[...] = table[: len(part)]


def wrong(result: Array, case: Case, rank: int) -> int:
    """How many elements of the rank's result differ from what they should be."""
    count = at = 0
    for ranks, start, length in pieces(case, rank):
        expected = np.roll(_reduced(case, ranks), -(start % PERIOD))
        for here in range(at, at + length, PERIOD):
            part = result[here : min(here + PERIOD, at + length)]
            count += int(np.count_nonzero(part != expected[: len(part)]))
        at += length
    return count


def pieces(case: Case, rank: int) -> list[Piece]:
    """Of what the rank's result consists, from its beginning to its end."""
    n, k = case.n, case.count
    everyone = tuple(range(n))
    one_by_one: list[Piece] = [((r,), 0, k) for r in everyone]
    root, at_root = (case.root,), rank == case.root
    parts: dict[str, list[Piece]] = {
        "all_reduce": [(everyone, 0, k)],
        "reduce": [(everyone, 0, k)] if at_root else [],
        "reduce_scatter": [(everyone, rank * k, k)],
        "all_gather": one_by_one,
        "gather": one_by_one if at_root else [],
        "all_to_all": [((r,), rank * k, k) for r in everyone],
        "broadcast": [(root, 0, k)],
        "scatter": [(root, rank * k, k)],
        "send_recv": [(((rank - 1) % n,), 0, k)],
        "barrier": [],
    }
    return parts[case.collective]


def _reduced(case: Case, ranks: tuple[int, ...]) -> Array:
    tables = [_table(case.dtype, case.op, case.n, r) for r in ranks]
    if case.collective not in REDUCING:
        return tables[0]
    return reduce(np.empty_like(tables[0]), tables, case.op, by="numpy")


@lru_cache(maxsize=64)
def _table(dtype: str, op: str, n: int, rank: int) -> Array:
    """The numbers that the rank's array repeats."""
    adds_up = op in ("sum", "mean", "prod")
    most = _EXPONENTS if op == "prod" and dtype != "bool" else _most(dtype)
    numbers = _numbers(rank, n if adds_up else 1, most)
    if op == "prod" and dtype != "bool":
        numbers = 1 << numbers
    if DTYPES[dtype].kind == "c" and op != "prod":
        return np.asarray(numbers + 1j * numbers[::-1]).astype(dtype)
    return numbers.astype(numpy_dtype(dtype))


def _most(dtype: str) -> int:
    """The largest whole number below which the type holds every one, within reason."""
    kind = DTYPES[dtype].kind
    if kind == "b":
        return 1
    if kind in "iu":
        return min(_LARGEST, int(np.iinfo(dtype).max))
    return min(_LARGEST, 1 << _EXACT_BITS.get(dtype, 24))


def _numbers(rank: int, n: int, most: int) -> NDArray[np.int64]:
    """Random numbers from 0 up, such that n ranks together reach at most `most`."""
    turns = -(-n // most)
    together = -(-n // turns)
    own = np.random.default_rng(rank + 1).integers(0, most // together + 1, PERIOD)
    turn = np.random.default_rng(0).integers(0, turns, PERIOD)
    return np.where((rank + turn) % turns == 0, own, 0)
