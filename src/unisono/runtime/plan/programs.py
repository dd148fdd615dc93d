"""The program of one rank, as the native core lowers it from a verified schedule.

`schedule/lower.py` makes the programs of all ranks, which explanations, codecs and
tests read. A rank runs its own alone, and of many ranks the others' are most of the
work: native/lower makes that one, and the tests hold it equal to the one made there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unisono import _native
from unisono.errors import BadArgument
from unisono.schedule.collective import Holders, Ints
from unisono.schedule.program import Program
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Bools, Transfer
from unisono.schedule.versions import different_names, reads_nothing

Columns = tuple[Ints, Ints, Ints, Bools, Ints]
"""A step's src, dst, chunk, reduces and into."""
MOST_VALUES = 2**31 - 1
"""So many values and sources can be numbered in the native core."""


class RankProgram(NamedTuple):
    """One rank's program, and the ranks of other hosts that it sends to.

    Of all ranks: `places` is how many the window must have of the one that needs most,
    `depth` counts the steps, `longest` is the most actions of a program, and
    `canonical` is as in `Lowered`.
    """

    program: _native.Program
    places: int
    depth: int
    longest: int
    canonical: bool
    destinations: tuple[int, ...]


def rank_program(
    schedule: Schedule, rank: int, exposed: int = 0, hosts: Sequence[int] = ()
) -> RankProgram:
    """The program of a rank; `exposed` has bit 0 for shared inputs, bit 1 for outputs.

    `hosts` are the numbers of the ranks' hosts; none if there is but one.
    """
    before = _holders(schedule, schedule.collective.before)
    steps = [step.flat() for step in schedule]
    _refuse_too_many(schedule, before, steps)
    found = _native.lower(
        schedule.n,
        schedule.num_chunks,
        schedule.num_slots,
        before=before,
        after=_holders(schedule, schedule.collective.after),
        steps=steps,
        hosts=list(hosts) or [0] * schedule.n,
        input_shared=bool(exposed & 1),
        output_shared=bool(exposed & 2),
        rank=rank,
    )
    if found is None:
        raise different_names(schedule)
    if len(found) == 2:
        number, transfer = found
        row = (column[transfer].item() for column in steps[number])
        raise reads_nothing(schedule, number, Transfer(*row))
    program, places, depth, longest, canonical, to = found
    return RankProgram(program, places, depth, longest, canonical, tuple(to))


def _refuse_too_many(
    schedule: Schedule, before: Ints | None, steps: Sequence[Columns]
) -> None:
    """Raise BadArgument if indices of 32 bits cannot number all values and sources."""
    given = schedule.num_chunks * (schedule.n if before is None else 1)
    transfers = sum(columns[0].size for columns in steps)
    made = 2 * transfers  # a slot's own value may be a source, too
    if given + made > MOST_VALUES:
        raise BadArgument(
            f"{schedule.title}: its programs would have up to {given + made} values, "
            f"at most {MOST_VALUES} are supported; choose another algorithm, or fewer "
            "segments"
        )


def _holders(schedule: Schedule, place: Holders) -> Ints | None:
    """The rank that holds each chunk; None if all ranks do."""
    holder = schedule.contract.holder(place, np.arange(schedule.num_chunks))
    return None if holder is None else np.ascontiguousarray(holder, np.int64)


def tables(program: Program) -> _native.Program:
    """The same program as flat tables for the native core."""
    actions: list[tuple[int, ...]] = []
    sources: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    deliveries: list[int] = []
    for number, a in enumerate(program.actions, 1):
        starts = len(sources), len(waits)
        sources += [(int(s.home), s.rank, s.index) for s in a.sources]
        waits += [(w.rank, w.count) for w in a.waits]
        window = -1 if a.window is None else a.window
        output = -1 if a.output is None else a.output
        ends = len(sources), len(waits)
        delivered = len(deliveries), len(deliveries) + len(a.delivers)
        deliveries += a.delivers
        runs = starts[0], ends[0], starts[1], ends[1], *delivered
        coded = -1 if a.code is None else a.code, int(a.back)
        last = *runs, *coded, int(number in program.awaited)
        actions.append((a.chunk, window, output, int(a.completes), *last))
    return _native.Program(
        actions=_table(actions, 13),
        sources=_table(sources, 3),
        waits=_table(waits, 2),
        exits=_table([(w.rank, w.count) for w in program.exits], 2),
        lead=list(program.lead),
        readers=list(program.readers),
        deliveries=deliveries,
        messages=_table(
            [
                (m.to, m.chunk, int(m.source.home), m.source.index, m.after)
                for m in program.messages
            ],
            5,
        ),
    )


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(rows, dtype=np.int32).reshape(len(rows), columns)
