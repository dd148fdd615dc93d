"""Which candidates are raced: those of the one list that differ in what they do.

The list is that of `algorithms/choices.py`. An all_reduce that does not leave the same
bits on all ranks is never raced. Of names with the same steps, as most have on two
ranks, the first is kept.
"""

from __future__ import annotations

import hashlib

import numpy as np

from unisono.algorithms import choices
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.schedule import Schedule


def candidates(collective: str, hosts: tuple[int, ...]) -> list[str]:
    """The names of all that are raced by ranks on these hosts, each once.

    Those in files are not: a table must not cause code of a file to run.
    """
    by_fingerprint: dict[object, str] = {}
    for name in choices.candidates(collective, hosts):
        made = choices.can_be_made(collective, name, len(hosts))
        if made is not None and _same_bits(made):
            by_fingerprint.setdefault(_fingerprint(made), name)
    return list(by_fingerprint.values())


def _same_bits(made: Schedule) -> bool:
    """Whether it may be chosen unasked."""
    adds = COLLECTIVES[made.collective.name].reduces
    return not adds or made.consistency().same_bits_on_all_ranks


def _fingerprint(schedule: Schedule) -> object:
    """What two schedules share only if they do the same."""
    digest = hashlib.blake2b(str(schedule.num_chunks).encode(), digest_size=16)
    for step in schedule:
        table = np.stack([a.astype(np.int64) for a in step.flat()])
        digest.update(np.ascontiguousarray(table[:, np.lexsort(table)]).tobytes())
        digest.update(b"|")
    return digest.digest()
