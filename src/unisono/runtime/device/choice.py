"""The algorithm of a call on a device."""

from __future__ import annotations

from unisono.algorithms import library
from unisono.dtypes import DType
from unisono.runtime.plan.select import AlgorithmChoice, choose

DIRECT = "direct"


def algorithm_on_device(
    collective: str,
    nbytes: int,
    n: int,
    dtype: DType,
    *,
    named: str | None,
    reproducible: bool,
) -> AlgorithmChoice:
    """The named one; or direct, by which a rank reads what it needs and no more."""
    choice = choose(
        collective,
        nbytes,
        n,
        named=named,
        reproducible=reproducible,
        itemsize=dtype.itemsize,
    )
    if choice.by in ("caller", "variable") or (collective, DIRECT) not in library():
        return choice
    why = "on a device every rank can read the memory of all, so direct moves least"
    return AlgorithmChoice(DIRECT, why)
