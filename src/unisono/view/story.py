"""A schedule as plain data for an animated page, all of it derived.

The page itself computes nothing. Which contributions a transfer has, what a step does
in words, when a message is sent and arrives on a topology and over which nodes: all
that is computed here, by the same ledger that draws the text and the same simulator
that `unisono simulate` uses. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from unisono.errors import BadArgument
from unisono.schedule.message_order import as_simulated
from unisono.schedule.oracle import Ledger
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, Transfer
from unisono.simulate import CodecModel, Result, simulate
from unisono.simulate.candidates import fitted
from unisono.simulate.messages import chunk_bytes
from unisono.topology import Topology, parse
from unisono.units import format_bytes, format_seconds, parse_bytes
from unisono.view.captions import caption, opening
from unisono.view.facts import facts, promise
from unisono.view.frames import MAX_RANKS, row_names
from unisono.view.layout import hosts, links, place, route, tree_of
from unisono.view.named import as_schedule

SIZE = 1 << 20
"""The size of a rank's buffer by default."""

MOST_MOVES = 20_000
EVERYWHERE, NOWHERE = -1, -2

Move = tuple[int, int, int, int, int, int, int]
"""src, dst, chunk, into, whether it adds, what it carries, which message (-1: none)."""

Message = tuple[int, int, int, float, float, float]
"""step, src, dst, bytes, leaves, arrives."""


@dataclass(frozen=True)
class StoryChunk:
    """A chunk or temporary: its bytes, who holds it before and after, what it must."""

    name: str
    nbytes: float
    before: int
    after: int
    goal: int


@dataclass(frozen=True)
class StoryStep:
    """One step: its sentence, its transfers, how many results are in place after."""

    phase: str
    caption: str
    moves: list[Move]
    done: int


@dataclass(frozen=True)
class TopologyMap:
    """A topology as it is drawn; routes are lists of nodes, by "src>dst".

    `hosts` is the host of each rank, if several share one; empty if none do.
    """

    name: str
    labels: list[str]
    places: list[tuple[float, float]]
    hosts: list[int]
    links: list[tuple[int, int]]
    routes: dict[str, list[int]]


@dataclass(frozen=True)
class Story:
    """All that a page shows of one schedule."""

    title: str
    collective: str
    algorithm: str
    meaning: str
    about: str
    opening: str
    promise: str
    n: int
    reduces: bool
    nbytes: int
    size: str
    rows: list[StoryChunk]
    beats: list[StoryStep]
    due: int
    facts: list[tuple[str, str]]
    map: TopologyMap
    messages: list[Message]
    time: float
    bound: float
    times: str


def one_or_two(
    what: Schedule | str,
    algorithm: str,
    n: int,
    root: int,
    beside: Schedule | str | None,
    topology: Topology | str,
) -> list[Schedule]:
    """What a page shows; names of algorithms are completed from the topology.

    `beside` is another schedule, or the name of another algorithm for the same call.
    """
    first = as_schedule(what, _completed(algorithm, topology), n, root)
    if beside is None:
        return [first]
    if isinstance(beside, str):
        other = _completed(beside, topology)
        beside = as_schedule(first.collective.name, other, first.n, first.root)
    return [first, as_schedule(beside, "", 0, 0)]


def _completed(algorithm: str, topology: Topology | str) -> str:
    if not topology:
        return algorithm
    where = parse(topology) if isinstance(topology, str) else topology
    return fitted(algorithm, where)


def tell(
    schedule: Schedule,
    topology: Topology | str = "",
    nbytes: int | str = SIZE,
    *,
    codec: CodecModel | None = None,
) -> Story:
    """The story of a schedule on a topology: proven, costed, and timed.

    Without a topology every rank has a link of its own to every other. Raises
    ScheduleError if the schedule is wrong, BadArgument if it is too large to be shown
    step by step.
    """
    _refuse_if_large(schedule)
    where = topology or f"full:{schedule.n}"
    where = parse(where) if isinstance(where, str) else where
    size = parse_bytes(nbytes) if isinstance(nbytes, str) else nbytes
    sentences = facts(schedule)
    result = simulate(schedule, where, size, codec=codec)
    messages, index = _messages(result)
    carriers = _Carriers(schedule, index, streams=where.streams)
    rows = _rows(schedule, size)
    due = sum(schedule.n if r.after == EVERYWHERE else r.after >= 0 for r in rows)
    return Story(
        title=schedule.title,
        collective=schedule.collective.name,
        algorithm=schedule.name,
        meaning=schedule.collective.meaning,
        about=schedule.about,
        opening=opening(schedule),
        promise=promise(schedule),
        n=schedule.n,
        reduces=schedule.collective.reduces,
        nbytes=size,
        size=format_bytes(size),
        rows=rows,
        beats=_beats(schedule, rows, carriers, due),
        due=due,
        facts=sentences,
        map=topology_map(where, {(m[1], m[2]) for m in messages}, schedule.root),
        messages=messages,
        time=_micro(result.time),
        bound=_micro(result.bound),
        times=_times(result),
    )


def _refuse_if_large(schedule: Schedule) -> None:
    if schedule.n > MAX_RANKS:
        raise BadArgument(
            f"{schedule.title}: a page shows up to {MAX_RANKS} ranks step by step; for "
            "more, --svg sums up the phases"
        )
    count = 0
    for step in schedule:
        count += len(step)
        if count > MOST_MOVES:
            raise BadArgument(
                f"{schedule.title}: more than {MOST_MOVES:,} transfers are too many "
                "for a page; fewer ranks or segments, or --svg"
            )


def _times(result: Result) -> str:
    """Where the times come from, in one sentence."""
    return (
        f"Times are simulated: {format_bytes(result.nbytes)} a rank on "
        f"{result.topology.name} take {format_seconds(result.time)}; nothing can "
        f"take less than {format_seconds(result.bound)} there."
    )


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 4)


MessagesByPair = dict[tuple[int, int, int], list[int]]
"""The numbers of the messages from rank to rank in a step, by step, src and dst."""


def _messages(result: Result) -> tuple[list[Message], MessagesByPair]:
    """Every message with its times; and where each is."""
    line = result.timeline
    assert line is not None  # closed forms have none, and we ask for no closed form
    columns = (line.step, line.src, line.dst, line.nbytes, line.start, line.end)
    messages: list[Message] = []
    index: MessagesByPair = {}
    for step, src, dst, nbytes, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        index.setdefault((step, src, dst), []).append(len(messages))
        messages.append((step, src, dst, round(nbytes, 2), _micro(start), _micro(end)))
    return messages, index


class _Carriers:
    """Which message each transfer travels in; steps come one after the other.

    A pair has one message a step, or, with the streams of a topology, one for each
    transfer that copies and one for all that add, in the order in which they are sent.
    """

    def __init__(
        self, schedule: Schedule, index: MessagesByPair, *, streams: bool
    ) -> None:
        self._index = index
        self._sent = as_simulated(schedule.n, schedule.num_slots, streams=streams)

    def of(self, step: Step, number: int) -> dict[Transfer, int]:
        """The messages of the next step, which has this number; -1: none."""
        taken: Counter[tuple[int, int]] = Counter()
        sums: dict[tuple[int, int], int] = {}
        found = {}
        arrays = (array.tolist() for array in self._sent(step))
        for each in zip(*arrays, strict=True):
            transfer = Transfer(*each)
            pair = transfer.src, transfer.dst
            if transfer.reduces and pair in sums:
                found[transfer] = sums[pair]
                continue
            numbers = self._index.get((number, *pair), [-1])
            message = numbers[min(taken[pair], len(numbers) - 1)]
            taken[pair] += 1
            if transfer.reduces:
                sums[pair] = message
            found[transfer] = message
        return found


def _rows(schedule: Schedule, nbytes: int) -> list[StoryChunk]:
    contract, what = schedule.contract, schedule.collective
    chunks = np.arange(schedule.num_chunks)
    before = contract.holder(what.before, chunks)
    after = contract.holder(what.after, chunks)
    sizes = chunk_bytes(schedule, nbytes)
    rows = []
    for row, name in enumerate(row_names(schedule)):
        if row >= schedule.num_chunks:
            rows.append(StoryChunk(name, float(sizes[row]), NOWHERE, NOWHERE, 0))
            continue
        begins = EVERYWHERE if before is None else int(before[row])
        ends = EVERYWHERE if after is None else int(after[row])
        goal = (1 << schedule.n) - 1 if what.reduces else 1 << begins
        rows.append(StoryChunk(name, float(sizes[row]), begins, ends, goal))
    return rows


def _beats(
    schedule: Schedule,
    rows: list[StoryChunk],
    carriers: _Carriers,
    due: int,
) -> list[StoryStep]:
    ledger = Ledger(schedule)
    return [
        _beat(schedule, rows, ledger, number, step, carriers, due)
        for number, step in enumerate(schedule, start=1)
    ]


def _beat(
    schedule: Schedule,
    rows: list[StoryChunk],
    ledger: Ledger,
    number: int,
    step: Step,
    carriers: _Carriers,
    due: int,
) -> StoryStep:
    carrying = carriers.of(step, number)
    # who is copied to, then adds
    transfers = sorted(step, key=lambda transfer: transfer.reduces)
    carried = [ledger.at(t.src, t.chunk).ranks for t in transfers]
    ledger.run(step)
    changed = {(t.dst, t.into) for t in transfers}
    sums = [ledger.at(*cell).ranks.bit_count() for cell in changed]
    done = _done(schedule, rows, ledger)
    whole = (1 << schedule.n) - 1
    finished = all(bits == whole for bits in carried)
    moves = [
        _move(t, bits, carrying[t]) for t, bits in zip(transfers, carried, strict=True)
    ]
    text = caption(schedule, transfers, sums, finished, (done, due))
    return StoryStep(step.phase, text, moves, done)


def _move(t: Transfer, bits: int, message: int) -> Move:
    return t.src, t.dst, t.chunk, t.into, int(t.reduces), bits, message


def _done(schedule: Schedule, rows: list[StoryChunk], ledger: Ledger) -> int:
    """How many of the cells that the contract asks for are as it asks."""
    done = 0
    for number, row in enumerate(rows):
        ranks = range(schedule.n) if row.after == EVERYWHERE else [row.after]
        if row.after != NOWHERE:
            done += sum(ledger.at(r, number).ranks == row.goal for r in ranks)
    return done


def topology_map(
    topology: Topology, used: Collection[tuple[int, int]], root: int
) -> TopologyMap:
    """How a topology is drawn, and the routes of these pairs of ranks."""
    wiring = topology.wiring
    pairs = sorted(used)
    places = place(topology, pairs, root)
    edges = sorted({(min(pair), max(pair)) for pair in pairs})
    return TopologyMap(
        name=topology.name,
        labels=[wiring.label(node) for node in range(wiring.num_nodes)],
        places=[(round(x, 4), round(y, 4)) for x, y in places.tolist()],
        hosts=hosts(wiring),
        links=links(wiring) if tree_of(wiring, pairs, root) is None else edges,
        routes={f"{a}>{b}": route(wiring, a, b) for a, b in pairs},
    )
