"""Candidates: every algorithm, with its segments, radix and levels.

Names are the library's; parameters called `segments` and `radix` are tried with a few
values. Hierarchies are made for the placement: on several hosts the levels are the
hosts, on one they are a few ways to cut the ranks into equal groups. An all_reduce that
does not leave the same bits on all ranks is never a candidate. Of names with
the same steps, as most have on two ranks, the first is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from unisono.algorithms import library
from unisono.algorithms import schedule as make
from unisono.algorithms.choices import FLAT, ON_TWO_LEVELS
from unisono.algorithms.hierarchical import telling
from unisono.algorithms.registry import Algorithm, Param
from unisono.errors import UsageError
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.schedule import Schedule

TRIED: dict[str, tuple[int, ...]] = {"segments": (1, 2, 4, 8), "radix": (2, 3, 4, 8)}
MOST_SPLITS = 2
"""How many ways to cut the ranks of one host into groups are tried."""


def candidates(collective: str, hosts: tuple[int, ...]) -> list[str]:
    """The names of all that can be had for ranks on these hosts, each once."""
    n = len(hosts)
    names = dict.fromkeys([*FLAT[collective], *_plain(collective, n)])
    names |= dict.fromkeys(_stacked(collective, hosts))
    by_fingerprint: dict[object, str] = {}
    for name in names:
        made = _made(collective, name, n)
        if made is not None:
            by_fingerprint.setdefault(_fingerprint(made), name)
    return list(by_fingerprint.values())


def _plain(collective: str, n: int) -> Iterator[str]:
    for (what, name), algorithm in library().items():
        if what != collective or name == "hierarchical":
            continue
        for params in _variants(algorithm):
            if algorithm.supports(n, **{**algorithm.params, **params}):
                yield algorithm.spelled(**params)


def _variants(algorithm: Algorithm) -> Iterator[dict[str, Param]]:
    yield from algorithm.variants
    for key, values in TRIED.items():
        if key in algorithm.params:
            for value in values:
                yield {key: value}


def _stacked(collective: str, hosts: tuple[int, ...]) -> Iterator[str]:
    """Hierarchies: what crosses between groups crosses once."""
    cuts = (1,) if collective in ("all_to_all", "barrier") else TRIED["segments"]
    for where in _levels(hosts):
        for by in ON_TWO_LEVELS[collective]:
            for segments in cuts:
                more = "" if segments == 1 else f",segments={segments}"
                yield f"hierarchical:{where},by={by}{more}"


def _levels(hosts: tuple[int, ...]) -> list[str]:
    n, count = len(hosts), len(set(hosts))
    if count == n and n > 1:  # no two ranks share a host
        return []
    if count > 1:
        return [telling(hosts)]
    inner = [g for g in range(2, n) if n % g == 0]
    inner.sort(key=lambda g: abs(g * g - n))  # about as many groups as each has ranks
    return [f"levels={g}x{n // g}" for g in inner[:MOST_SPLITS]]


def _made(collective: str, name: str, n: int) -> Schedule | None:
    """The schedule, if there is one for n ranks that may be chosen unasked."""
    try:
        made = make(collective, name, n)
    except UsageError:
        return None
    adds = COLLECTIVES[collective].reduces
    return made if not adds or made.consistency().same_bits_on_all_ranks else None


def _fingerprint(schedule: Schedule) -> object:
    """What two schedules share only if they do the same."""
    digest = hashlib.blake2b(str(schedule.num_chunks).encode(), digest_size=16)
    for step in schedule:
        table = np.stack([a.astype(np.int64) for a in step.flat()])
        digest.update(np.ascontiguousarray(table[:, np.lexsort(table)]).tobytes())
        digest.update(b"|")
    return digest.digest()
