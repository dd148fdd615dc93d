"""From a schedule to one program per rank, for ranks that can read each other's memory.

A transfer becomes a *pull*: the destination reads its own value and everything that is
due to it in that step, from wherever those values lie, in one pass, in rank order. So a
program is a list of actions of one form,

    wait for some ranks to have done so many actions;
    reduce these sources; write the result to the window, to the output, or to both

and a *publish* is the action whose only source is the rank's own input and whose result
goes to its window, where others read it.

Every value that a slot ever has is a *version* of it, with a home of its own. A version
that others read lies in a place of its own in its rank's window, so it is never
overwritten while somebody reads it, even where two ranks exchange a slot in one step.
Where inputs or outputs are themselves in shared memory, a version can stay there, and
nothing is copied; then whoever overwrites it waits for its readers first. There, too, a
value of which others only want a copy can be *delivered*: whoever has it writes it to
their outputs, and they need not come for it.

Programs do not depend on byte counts. An executor cuts the chunks into pieces and runs
the program on each piece in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.errors import UnsupportedWorld
from unisono.schedule.oracle import sound
from unisono.schedule.program import Action, Home, Lowered, Program, Source, Wait
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step


@dataclass(eq=False, slots=True)
class _Version:
    """One value of one slot, who reads it, and where it lives."""

    rank: int
    slot: int
    step: int  # -1 for what is there from the beginning
    sources: list[_Version]
    contributors: int
    chunk: int
    at_home: bool = False  # read by its own rank, into the same slot
    away: list[_Version] = field(default_factory=list)  # all others who read it
    next_step: int | None = None
    final: bool = False
    window: int | None = None
    output: bool = False
    delivers: list[_Version] = field(default_factory=list)
    delivered: bool = False  # to its slot, by the rank that made its only source
    action: int = -1

    @property
    def origin(self) -> _Version:
        """The input or the sum that this is a copy of."""
        return self.sources[0].origin if len(self.sources) == 1 else self

    @property
    def given(self) -> bool:
        """Whether it is the input, and not made by any step."""
        return self.step < 0

    def read_by(self, reader: _Version) -> None:
        """Note who reads it."""
        if (reader.rank, reader.slot) == (self.rank, self.slot):
            self.at_home = True
        else:
            self.away.append(reader)


def lower(
    schedule: Schedule, *, input_shared: bool = False, output_shared: bool = False
) -> Lowered:
    """The programs of `schedule`, for buffers that others can read, or cannot."""
    has_output = _has_output(schedule)
    versions = _versions(schedule, has_output)
    _settle(versions, has_output, input_shared, output_shared)
    if output_shared:
        _deliver(versions, schedule.n, input_shared)
    by_rank: list[list[_Version]] = [[] for _ in range(schedule.n)]
    for v in versions:
        by_rank[v.rank].append(v)
    for mine in by_rank:
        for place, v in enumerate(v for v in mine if v.window is not None):
            v.window = place
    acts = [_numbered(mine, schedule.n) for mine in by_rank]
    lead = tuple(sum(v.given and not v.delivers for v in mine) for mine in acts)
    sums = [v for v in versions if len(v.sources) > 1]
    return Lowered(
        tuple(
            _program(r, schedule.n, by_rank[r], acts[r], lead)
            for r in range(schedule.n)
        ),
        places=max(sum(v.window is not None for v in mine) for mine in by_rank),
        depth=max((v.step for v in versions), default=-1) + 1,
        canonical=all(
            len(v.sources) == schedule.n and all(s.given for s in v.sources)
            for v in sums
        ),
    )


def _has_output(schedule: Schedule) -> Callable[[int, int], bool]:
    """Whether a slot (rank, chunk) has a place in that rank's output."""
    chunks = np.arange(schedule.num_chunks)
    wanted = schedule.contract.holder(schedule.collective.after, chunks)
    owner = None if wanted is None else wanted.tolist()

    def has(rank: int, slot: int) -> bool:
        return slot < schedule.num_chunks and (owner is None or owner[slot] == rank)

    return has


def _versions(
    schedule: Schedule, has_output: Callable[[int, int], bool]
) -> list[_Version]:
    """Every value that every slot has, in the order of the steps."""
    chunks = np.arange(schedule.num_chunks)
    before = schedule.contract.holder(schedule.collective.before, chunks)
    now: dict[tuple[int, int], _Version] = {}
    for c in chunks.tolist():
        for r in range(schedule.n) if before is None else [int(before[c])]:
            now[r, c] = _Version(r, c, -1, [], 1, c)
    versions = list(now.values())
    for number, step in enumerate(sound(schedule)):
        made = [
            _made(schedule, number, *slot, now)
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
    found: dict[tuple[int, int], _Arriving] = defaultdict(list)
    for t in step:
        found[t.dst, t.into].append((t.src, t.chunk, t.reduces))
    return ((rank, slot, arriving) for (rank, slot), arriving in found.items())


def _is_there(
    rank: int, slot: int, arriving: _Arriving, now: dict[tuple[int, int], _Version]
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
    now: dict[tuple[int, int], _Version],
) -> _Version:
    """The version that a slot gets from what arrives and, perhaps, its own value."""
    operands = [(src, now[src, chunk]) for src, chunk, _ in arriving]
    if (rank, slot) in now and all(reduces for *_, reduces in arriving):
        operands.append((rank, now[rank, slot]))
    operands.sort(key=lambda pair: pair[0])
    sources = [v for _, v in operands]
    chunk = slot if slot < schedule.num_chunks else sources[0].chunk
    if any(v.chunk != chunk for v in sources):
        raise UnsupportedWorld(
            f"{schedule.title}: it adds chunks of different names, "
            "which need not have one size; such a schedule cannot be run",
            n=schedule.n,
        )
    count = sum(v.contributors for v in sources)
    made = _Version(rank, slot, step, sources, count, chunk)
    for v in sources:
        v.read_by(made)
    return made


def _settle(
    versions: Iterable[_Version],
    has_output: Callable[[int, int], bool],
    input_shared: bool,
    output_shared: bool,
) -> None:
    """Give every version its home: a place in a window, the output, or both."""
    for v in versions:
        outputs = has_output(v.rank, v.slot)
        # Where a slot is read and overwritten in one step, its old value must be kept
        # elsewhere: there is no order of the two that would do.
        exchanged = any(w.step == v.next_step for w in v.away)
        shared = input_shared if v.given else output_shared and outputs
        lent = bool(v.away) and shared and not exchanged
        homeless = v.at_home and not outputs and not v.given
        if homeless or (v.away and not lent):
            v.window = 0  # numbered when all is settled
        if not v.given:
            kept = v.at_home and v.window is None
            v.output = outputs and (v.final or lent or kept)


def _deliver(versions: Sequence[_Version], n: int, input_shared: bool) -> None:
    """Have copies brought by those who hold the original, where it spreads the work.

    Sums are brought even where it makes no difference, for they are in the cache.
    """
    slots: dict[tuple[int, int], list[_Version]] = defaultdict(list)
    for v in versions:
        slots[v.rank, v.slot].append(v)
    found = [v for v in versions if _deliverable(v, slots[v.rank, v.slot])]
    if not input_shared:
        found = [v for v in found if not v.sources[0].given]
    for v in _shared_out(found, n):
        (made,) = v.sources
        made.away.remove(v)
        made.delivers.append(v)
        v.delivered, v.output = True, False
        if not made.away and not made.at_home:
            made.window = None  # nobody comes for it


def _shared_out(copies: Sequence[_Version], n: int) -> Sequence[_Version]:
    """Which of the copies to bring, so that the busiest rank has least to do."""
    fetched = Counter(v.rank for v in copies)
    brought = Counter(v.sources[0].rank for v in copies)
    load = [0] * n
    some = []
    for v in copies:
        holder = v.sources[0].rank
        brings = load[holder] < load[v.rank]
        load[holder if brings else v.rank] += 1
        some += [v] if brings else []
    sums = all(len(v.sources[0].sources) > 1 for v in copies)
    ways: list[tuple[int, bool, Sequence[_Version]]] = [
        (max(fetched.values(), default=0), sums, ()),
        (max(brought.values(), default=0), not sums, copies),
        (max(load), True, some),
    ]
    return min(ways, key=lambda way: way[:2])[2]


def _deliverable(v: _Version, slot: Iterable[_Version]) -> bool:
    """Whether v only copies what another has, into a slot that nothing else reads."""
    if len(v.sources) != 1 or not v.output or v.window is not None or v.at_home:
        return False
    (made,) = v.sources
    return (
        (made.rank != v.rank and made.slot == v.slot)
        and not v.away
        and all(u is v or _read_by_nobody_but(made, u) for u in slot)
    )


def _read_by_nobody_but(reader: _Version, v: _Version) -> bool:
    return not v.at_home and all(w is reader for w in v.away)


def _numbered(mine: Iterable[_Version], n: int) -> list[_Version]:
    """What a rank makes, in its order; inputs are published before anything else.

    Within a step the ranks begin with different peers, so that they do not all read the
    same one.
    """

    def turn(v: _Version) -> tuple[int, bool, int, int]:
        peers = v.away if v.given else v.sources
        others = [(w.rank - v.rank) % n for w in peers if w.rank != v.rank]
        return v.step, bool(v.delivers), min(others, default=0), v.slot

    acts = [v for v in mine if v.window is not None or v.output or v.delivers]
    acts.sort(key=turn)
    for number, v in enumerate(acts):
        v.action = number
    return acts


def _program(
    rank: int,
    n: int,
    mine: Sequence[_Version],
    acts: Sequence[_Version],
    lead: tuple[int, ...],
) -> Program:
    lent: dict[int, list[_Version]] = defaultdict(list)
    for v in mine:
        if v.away and v.window is None:
            lent[v.slot].append(v)
    known: dict[int, int] = {}
    actions = [_action(v, n, lent[v.slot], known) for v in acts]
    # What is given and already the result must only be brought to the output.
    kept = [v for v in mine if v.given and v.final and v.action < 0]
    actions += [
        Action(v.chunk, (_source(v, v),), None, v.slot, (), completes=False)
        for v in kept
    ]
    windowed = [v for v in mine if v.window is not None]
    everything_lent = [v for some in lent.values() for v in some]
    return Program(
        rank,
        tuple(actions),
        tail=len(kept),
        lead=lead,
        readers=tuple(sorted({w.rank for v in windowed for w in v.away} - {rank})),
        exits=_merged(
            rank,
            [w for v in everything_lent for w in v.away]
            + [v.sources[0] for v in mine if v.delivered],
            {},
        ),
        lends_input=any(v.given for v in everything_lent),
        lends_output=any(not v.given for v in everything_lent),
    )


def _action(
    v: _Version, n: int, lent: Sequence[_Version], known: dict[int, int]
) -> Action:
    if v.given:
        output = v.slot if v.final else None
        own, brings = (_source(v, v),), tuple(w.rank for w in v.delivers)
        return Action(v.chunk, own, v.window, output, (), False, brings)
    awaited = [s for s in v.sources if s.action >= 0]
    if v.output:  # those who read what lies there now must have done so
        awaited += [w for u in lent if u.step < v.step for w in u.away]
    return Action(
        v.chunk,
        tuple(_source(s, v) for s in v.sources),
        v.window,
        v.slot if v.output else None,
        _merged(v.rank, awaited, known),
        completes=len(v.sources) > 1 and v.contributors == n,
        delivers=tuple(w.rank for w in v.delivers),
    )


def _source(v: _Version, reader: _Version) -> Source:
    """Where `reader` finds v; a rank reads its own input rather than its window."""
    at_home = (v.rank, v.slot) == (reader.rank, reader.slot)
    if v.window is not None and not (v.given and at_home):
        return Source(Home.WINDOW, v.rank, v.window)
    return Source(Home.INPUT if v.given else Home.OUTPUT, v.rank, v.slot)


def _merged(
    rank: int, awaited: Iterable[_Version], known: dict[int, int]
) -> tuple[Wait, ...]:
    """One wait per other rank, for the latest of what is awaited and not yet known."""
    latest: dict[int, int] = {}
    for v in awaited:
        if v.rank != rank and v.action >= known.get(v.rank, 0):
            latest[v.rank] = max(latest.get(v.rank, 0), v.action + 1)
    known.update(latest)
    return tuple(Wait(r, count) for r, count in sorted(latest.items()))
