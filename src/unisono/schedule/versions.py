"""Every value that every slot ever has: what lowering assigns storage to.

A *version* is one value of one slot (rank, chunk), made by a step out of other
versions, or given from the beginning. Readers are either the rank itself, other ranks
of its host, which can read its memory, or ranks of other hosts, to which it must be
sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.errors import ScheduleError, UnsupportedWorld
from unisono.schedule.oracle import checked_steps
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, Transfer


@dataclass(eq=False, slots=True)
class Version:
    """One value of one slot, its readers, and where it is stored."""

    rank: int
    slot: int
    step: int  # -1 for what is there from the beginning
    sources: list[Version]
    contributors: int
    chunk: int
    at_home: bool = False  # read by its own rank, into the same slot
    local_readers: list[Version] = field(default_factory=list)  # others on its host
    remote_readers: list[Version] = field(default_factory=list)  # on other hosts
    next_step: int | None = None
    final: bool = False
    window: int | None = None
    code: int | None = None  # where others find it as a code
    coded: bool = False  # others read it as a code, if they read it
    back: bool = False  # it holds the decoded value
    own_as_code: bool = False  # its own rank reads it so, too
    output: bool = False
    delivers: list[Version] = field(default_factory=list)
    delivered: bool = False  # to its slot, by the rank that made its only source
    action: int = -1
    messages: dict[int, int] = field(default_factory=dict)  # by rank: its last number

    @property
    def origin(self) -> Version:
        """The input or the sum that this is a copy of."""
        return self.sources[0].origin if len(self.sources) == 1 else self

    @property
    def in_window(self) -> bool:
        """Whether its rank's window has a place for it, or for its code."""
        return self.window is not None or self.code is not None

    @property
    def given(self) -> bool:
        """Whether it is the input, and not made by any step."""
        return self.step < 0

    def read_by(self, reader: Version, *, here: bool) -> None:
        """Record a reader, on the same host or on another."""
        if (reader.rank, reader.slot) == (self.rank, self.slot):
            self.at_home = True
        else:
            (self.local_readers if here else self.remote_readers).append(reader)


def has_output(schedule: Schedule) -> Callable[[int, int], bool]:
    """Whether a slot (rank, chunk) has a place in that rank's output."""
    chunks = np.arange(schedule.num_chunks)
    wanted = schedule.contract.holder(schedule.collective.after, chunks)
    owner = None if wanted is None else wanted.tolist()

    def has(rank: int, slot: int) -> bool:
        return slot < schedule.num_chunks and (owner is None or owner[slot] == rank)

    return has


def versions(
    schedule: Schedule, has_output: Callable[[int, int], bool], hosts: Sequence[int]
) -> list[Version]:
    """Every value that every slot has, in the order of the steps."""
    chunks = np.arange(schedule.num_chunks)
    before = schedule.contract.holder(schedule.collective.before, chunks)
    now: dict[tuple[int, int], Version] = {}
    for c in chunks.tolist():
        for r in range(schedule.n) if before is None else [int(before[c])]:
            now[r, c] = Version(r, c, -1, [], 1, c)
    versions = list(now.values())
    for number, step in enumerate(checked_steps(schedule)):
        for t in step:
            if (t.src, t.chunk) not in now:
                raise reads_nothing(schedule, number, t)
        made = [
            _made(schedule, number, *slot, now, hosts)
            for slot in _gathered(step)
            if not _is_there(*slot, now)
        ]
        for v in made:
            if (v.rank, v.slot) in now:
                now[v.rank, v.slot].next_step = number
            now[v.rank, v.slot] = v
        versions += made
    for v in now.values():
        v.final = has_output(v.rank, v.slot)
    return versions


_Arriving = list[tuple[int, int, bool]]


def _gathered(step: Step) -> Iterable[tuple[int, int, _Arriving]]:
    """Each slot (dst, into) of a step, and what arrives: (src, chunk, reduces)."""
    arriving_at: dict[tuple[int, int], _Arriving] = defaultdict(list)
    for t in step:
        arriving_at[t.dst, t.into].append((t.src, t.chunk, t.reduces))
    return ((rank, slot, arriving) for (rank, slot), arriving in arriving_at.items())


def _is_there(
    rank: int, slot: int, arriving: _Arriving, now: dict[tuple[int, int], Version]
) -> bool:
    """Whether what arrives is a copy of what the slot holds anyway."""
    if len(arriving) > 1 or (rank, slot) not in now:
        return False
    ((src, chunk, reduces),) = arriving
    return not reduces and now[src, chunk].origin is now[rank, slot].origin


def _made(
    schedule: Schedule,
    step: int,
    rank: int,
    slot: int,
    arriving: _Arriving,
    now: dict[tuple[int, int], Version],
    hosts: Sequence[int],
) -> Version:
    """The version that a slot gets from what arrives and, perhaps, its own value."""
    operands = [(src, now[src, chunk]) for src, chunk, _ in arriving]
    if (rank, slot) in now and all(reduces for *_, reduces in arriving):
        operands.append((rank, now[rank, slot]))
    operands.sort(key=lambda pair: pair[0])
    sources = [v for _, v in operands]
    chunk = slot if slot < schedule.num_chunks else sources[0].chunk
    if any(v.chunk != chunk for v in sources):
        raise different_names(schedule)
    count = sum(v.contributors for v in sources)
    made = Version(rank, slot, step, sources, count, chunk)
    for v in sources:
        v.read_by(made, here=hosts[v.rank] == hosts[rank])
    return made


def reads_nothing(schedule: Schedule, number: int, t: Transfer) -> ScheduleError:
    """Why a schedule cannot be run that reads a slot which has nothing.

    It can be proven nevertheless, if no result depends on what is read.
    """
    return ScheduleError(
        f"{schedule.title}, step {number + 1}: {t} reads nothing: rank {t.src} has no "
        f"chunk {t.chunk} yet",
        step=number + 1,
        rank=t.src,
        chunk=t.chunk,
    )


def different_names(schedule: Schedule) -> UnsupportedWorld:
    """Why a schedule cannot be run that adds chunks of different names."""
    return UnsupportedWorld(
        f"{schedule.title}: it adds chunks of different names, "
        "which need not have one size; such a schedule cannot be run",
        n=schedule.n,
    )
