"""Which algorithm a call gets, if its caller does not say.

The choice is a pure function of what all ranks know alike: the collective, its bytes,
and how many ranks share how many cores. So all ranks always choose the same. Inside one
host every rank can read every other's memory at once, and the fewest passes over memory
win: all at once while it is small, then everybody its share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from unisono.algorithms import schedule as make_schedule
from unisono.errors import BadArgument, NotOffered
from unisono.schedule.collective import COLLECTIVES
from unisono.units import format_bytes

VARIABLE = "UNISONO_ALGORITHM"


@dataclass(frozen=True)
class Choice:
    """An algorithm, why it was chosen, and the one that would be next."""

    algorithm: str
    why: str
    runner_up: str = ""


ALL_AT_ONCE = {2: 16 << 10, 3: 8 << 10, 4: 8 << 10}
"""For few ranks: up to how many bytes each rank had better reduce everything itself."""
SHARED_OUT_FROM = 32 << 10
"""From how many bytes on the ranks share the work of the root."""


_RUNNER_UP = {"gather": "tree", "scatter": "tree", "barrier": "dissemination"}


def choose(
    collective: str, nbytes: int, n: int, *, named: str | None, reproducible: bool
) -> Choice:
    """The algorithm for a call of `nbytes` in all (of one rank's whole buffer)."""
    if named:
        return Choice(named, "the caller named it")
    told = os.environ.get(VARIABLE, "")
    if told and not reproducible:
        found = _told(told, collective)
        if found:
            return Choice(found, f"{VARIABLE}={told}")
    limit = ALL_AT_ONCE.get(n, 4 << 10 if n <= 8 else 1 << 10)
    size = format_bytes(nbytes)
    if collective == "all_reduce":
        if nbytes <= limit:
            why = f"{size}, at most {format_bytes(limit)}: one step costs least"
            return Choice("naive", why, "direct")
        why = f"{size}, above {format_bytes(limit)}: every rank adds its share"
        return Choice("direct", why, "ring")
    if collective == "reduce" and nbytes >= SHARED_OUT_FROM:
        return Choice("direct+direct", f"{size}: every rank adds its share", "naive")
    if collective == "broadcast" and n <= 3 and nbytes >= SHARED_OUT_FROM:
        why = f"{size} among {n}: the root brings a part, the others come for the rest"
        return Choice("direct+direct", why, "naive")
    if collective in ("reduce", "broadcast"):
        return Choice("naive", "each rank reads the others' memory itself", "tree")
    runner_up = _RUNNER_UP.get(collective, "ring")
    return Choice("direct", "each rank reads what it needs where it lies", runner_up)


def _told(variable: str, collective: str) -> str:
    """The algorithm that the variable names for a collective, if it does.

    "ring" is meant for every collective that ring has; "all_reduce=ring;reduce=tree"
    for those.
    """
    for part in filter(None, (p.strip() for p in variable.split(";"))):
        name, equals, algorithm = part.partition("=")
        if equals and name in COLLECTIVES:
            if name == collective:
                return algorithm
        elif _offered(part, collective):
            return part
    return ""


@lru_cache(maxsize=256)
def _offered(algorithm: str, collective: str) -> bool:
    """Whether a collective has it; BadArgument if none does."""
    for name in (collective, *COLLECTIVES):
        try:
            make_schedule(name, algorithm, 2)
        except NotOffered:
            continue
        return name == collective
    raise BadArgument(
        f"{VARIABLE}={algorithm}: no collective has such an algorithm; "
        "see unisono algorithms"
    )
