"""Do all ranks mean the same? Asked once, before anything is built on it.

A strategy is set up by every rank for itself: shapes, buckets, axes. If the ranks
differ there, the collectives of a later step would fail or, worse, fit by chance. So
they compare in words what they are about to do: one number each if they agree, and the
words themselves only if they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from unisono.errors import CollectiveMismatch
from unisono.runtime.communicator import Communicator


def agree(comm: Communicator, where: str, told: Sequence[str]) -> None:
    """Raise CollectiveMismatch on every rank if `told` is not the same on all."""
    text = "\n".join(told).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    mine = np.frombuffer(digest, dtype=np.int64)
    all_of_them = comm.all_gather(mine.copy())
    if (all_of_them == all_of_them[0]).all():
        return
    lists: list[list[str]] = comm.all_gather_object(list(told))
    other = next(r for r, said in enumerate(lists) if said != lists[0])
    one, another = _first_difference(lists[0], lists[other])
    raise CollectiveMismatch(
        f"{where}: the ranks differ: rank 0 has {one}, rank {other} has {another}; "
        "build the same on every rank",
        calls={0: one, other: another},
        seq=0,
    )


def _first_difference(one: list[str], other: list[str]) -> tuple[str, str]:
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            return mine, yours
    shorter = min(len(one), len(other))
    ends = [
        said[shorter] if len(said) > shorter else "no more" for said in (one, other)
    ]
    return ends[0], ends[1]
