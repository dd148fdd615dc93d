"""An interpreter of lowered programs that detects data races.

`play` does what the native executor does: ranks publish what others read first, wait
for each other, run their actions piece by piece through the two halves of their
windows, wait at their exits, and then overwrite their buffers. Ranks take turns in an
order drawn from a seed; only the programs' own waits hold a rank back.

Every memory cell (a piece of a chunk in a buffer, a slot in half a window) records its
writer and its readers, and every rank has a vector clock: what it has waited for, and
what those ranks had waited for before. Reading a cell without having waited for its
write, and writing one without having waited for its reads, is a fault even if this
order of turns gave the right result. So one run in any order is valid for all orders.

Codecs are modelled, too: windows and streams hold what `encode` makes of a value, and a
reader gets what `decode` makes of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from program_memory import (
    Clock,
    Condition,
    Key,
    MemoryCell,
    MessageStream,
    Progress,
    RankState,
)
from unisono.schedule.program import Action, Home, Lowered, Program, Source, Wait

Slot = tuple[int, int]
Values = Mapping[Slot, Sequence[Any]]
"""For (rank, chunk), a value for each piece."""

Combine = Callable[[Sequence[Any], bool], Any]
"""Reduces values, in their order; the flag tells whether this completes the sum."""


Transform = Callable[[Any], Any]
"""Encodes or decodes a value."""


class ProgramFault(AssertionError):
    """Programs that can read too early, write too early, or hang."""


@dataclass(frozen=True)
class Call:
    """One collective: its programs, the ranks' inputs, and where buffers are.

    `pieces` is the number of values of every chunk. `in_place` are the ranks whose
    output is their input. `hosts` are the numbers of the ranks' hosts.
    """

    lowered: Lowered
    inputs: Values
    pieces: int = 3
    in_place: frozenset[int] = frozenset()
    input_shared: bool = False
    output_shared: bool = False
    hosts: tuple[int, ...] = ()

    def on_different_hosts(self, one: int, other: int) -> bool:
        """Whether two ranks are on different hosts."""
        return bool(self.hosts) and self.hosts[one] != self.hosts[other]


def play(
    calls: Sequence[Call],
    combine: Combine,
    *,
    seed: int = 0,
    encode: Transform = lambda value: value,
    decode: Transform = lambda code: code,
) -> list[Values]:
    """The outputs of the calls, made one after the other on one communicator.

    ProgramFault if any order of the ranks could lead to another result, or to none.
    """
    return _Player(calls, combine, Random(seed), encode, decode).run()


class _Player:
    def __init__(
        self,
        calls: Sequence[Call],
        combine: Combine,
        random: Random,
        encode: Transform,
        decode: Transform,
    ) -> None:
        self.calls = calls
        self.combine = combine
        self.random = random
        self.encode = encode
        self.decode = decode
        self.n = len(calls[0].lowered.programs)
        pairs = {
            (p.rank, m.to)
            for c in calls
            for p in c.lowered.programs
            for m in p.messages
        }
        self.streams = {
            pair: MessageStream(thread, random.random() < 0.5)
            for thread, pair in enumerate(sorted(pairs), self.n)
        }
        num_threads = self.n + len(self.streams)
        self.ranks = [RankState([0] * num_threads) for _ in range(num_threads)]
        self.cells: dict[Key, MemoryCell] = {}
        self.buffers: dict[tuple[int, int], list[Key]] = {}  # by call and rank
        self.received: list[list[Any]] = [[] for _ in range(self.n)]
        self.outputs: list[dict[Slot, list[Any]]] = [{} for _ in calls]
        # By rank and half of its window: who reads what was put there last.
        self.window_readers: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self) -> list[Values]:
        """Let ranks and streams take turns until all are done."""
        running = {r: self._rank(r) for r in range(self.n)}
        running |= {s.thread: self._sending(r, q) for (r, q), s in self.streams.items()}
        conditions: dict[int, Condition | None] = dict.fromkeys(running)
        while running:
            ready = [r for r in running if self._holds(conditions[r])]
            if not ready:
                raise ProgramFault(f"all ranks wait for ever: {conditions}")
            r = self.random.choice(ready)
            self._learn(r, conditions[r])
            try:
                conditions[r] = next(running[r])
            except StopIteration:
                del running[r], conditions[r]
        return list(self.outputs)

    # --- ranks and streams

    def _rank(self, r: int) -> Iterator[Condition | None]:
        generation = 1
        for number, call in enumerate(self.calls):
            self._fill(number, r)
            self.ranks[r].started.append(list(self.ranks[r].clock))
            program = call.lowered.programs[r]
            done, free = 0, False
            # A rank that does not expose its input may publish it before others arrive.
            if not call.input_shared and self.random.random() < 0.5:
                yield from self._window_free(program, generation)
                done, free = program.lead[r], True
                for action in program.actions[:done]:
                    self._perform(number, r, action, generation, 0)
                self._publish(r, (generation, done))
            self.ranks[r].arrivals.append(list(self.ranks[r].clock))
            for q in range(self.n):
                if not call.on_different_hosts(r, q):
                    yield Condition(q, arrival=number)
            for piece in range(call.pieces):
                if not free:
                    yield from self._window_free(program, generation)
                yield from self._generation(number, r, generation, piece, done)
                generation += 1
                done, free = 0, False
            for wait in program.exits:
                yield self._progress_of(number, r, wait, generation - 1)
            self._reuse(number, r)

    def _generation(
        self, number: int, r: int, generation: int, piece: int, done: int
    ) -> Iterator[Condition | None]:
        program = self.calls[number].lowered.programs[r]
        for count, action in enumerate(program.actions[done:], done + 1):
            for wait in action.waits:
                yield self._progress_of(number, r, wait, generation)
            for source in action.sources:
                if source.home is Home.STREAM:
                    stream = self.streams[source.rank, r]
                    yield Condition(stream=stream, sent=stream.received + 1)
                    self._take(stream, r, source)
            self._perform(number, r, action, generation, piece)
            if count in program.awaited:
                self._publish(r, (generation, count))
            yield None
        self._publish(r, (generation + 1, 0))

    def _window_free(self, program: Program, generation: int) -> Iterator[Condition]:
        """Wait until this half's last content has been read by all its readers."""
        r, half = program.rank, generation % 2
        for q in self.window_readers.get((r, half), ()):
            yield self._progress_of(0, r, Wait(q, 0), generation - 1)
        self.window_readers[r, half] = program.readers

    def _progress_of(
        self, number: int, r: int, wait: Wait, generation: int
    ) -> Condition:
        """A rank's progress; for one on another host, that of the stream to it."""
        on_different_hosts = self.calls[number].on_different_hosts(r, wait.rank)
        who = self.streams[r, wait.rank].thread if on_different_hosts else wait.rank
        return Condition(who, progress=(generation, wait.count))

    def _sending(self, r: int, q: int) -> Iterator[Condition | None]:
        """What rank r sends to rank q, concurrently with its actions."""
        stream = self.streams[r, q]
        generation = 1
        for number, call in enumerate(self.calls):
            program = call.lowered.programs[r]
            messages = [m for m in program.messages if m.to == q]
            yield Condition(r, started=number)
            for piece in range(call.pieces):
                for count, message in enumerate(messages, 1):
                    if message.after:
                        yield Condition(r, progress=(generation, message.after))
                    key = self._key(number, message.source, generation, piece)
                    value = self._read(stream.thread, key)
                    clock = list(self.ranks[stream.thread].clock)
                    stream.sent.append((count - 1, value, clock))
                    if not stream.room:
                        yield Condition(stream=stream, received=len(stream.sent))
                    self._publish(stream.thread, (generation, count))
                generation += 1
                self._publish(stream.thread, (generation, 0))

    def _take(self, stream: MessageStream, r: int, source: Source) -> None:
        """Receive the next message, which must be the expected one."""
        index, value, clock = stream.sent[stream.received]
        if index != source.index:
            raise ProgramFault(
                f"rank {r} expects message {source.index} of rank {source.rank}, "
                f"which sends {index}"
            )
        stream.received += 1
        self._merge_clock(r, clock)
        self.received[r].append(value)

    def _perform(
        self, number: int, r: int, action: Action, generation: int, piece: int
    ) -> None:
        values, keys, code = self._sources(number, r, action, generation, piece)
        made = values[0] if len(values) == 1 else self.combine(values, action.completes)
        if action.code is not None:
            if len(values) > 1 or code is None:  # otherwise the code is handed on
                code = self.encode(made)
            into = self._slot(number, r, Home.CODE, action.code)
            self._write(r, self._key(number, into, generation, piece), code)
            made = self.decode(code) if action.back else made
        if action.window is not None:
            into = self._slot(number, r, Home.WINDOW, action.window)
            self._write(r, self._key(number, into, generation, piece), made)
        outputs = [] if action.output is None else [(r, action.output)]
        outputs += [(q, action.chunk) for q in action.delivers]
        for slot in outputs:
            into = Source(Home.OUTPUT, *slot)
            self._check_access(number, r, into)
            key = self._key(number, into, generation, piece)
            # A value that is already in place is not written again.
            if len(values) > 1 or keys != [key] or action.back:
                self._write(r, key, made)
            found = self.outputs[number].setdefault(slot, [])
            if len(found) == piece:
                found.append(made)
            found[piece] = made

    def _sources(
        self, number: int, r: int, action: Action, generation: int, piece: int
    ) -> tuple[list[Any], list[Key], Any]:
        """The sources' values, the keys of those in memory, and the last code read."""
        values: list[Any] = []
        keys: list[Key] = []
        code = None
        for source in action.sources:
            if source.home is Home.STREAM:
                found = self.received[r].pop(0)
            else:
                self._check_access(number, r, source)
                keys.append(self._key(number, source, generation, piece))
                found = self._read(r, keys[-1])
            if self._is_code(number, source):
                code, found = found, self.decode(found)
            values.append(found)
        return values, keys, code

    def _is_code(self, number: int, source: Source) -> bool:
        coded = self.calls[number].lowered.noise is not None
        return source.home is Home.CODE or (coded and source.home is Home.STREAM)

    def _slot(self, number: int, r: int, home: Home, index: int) -> Source:
        """A slot of a rank's own window, which must have that many."""
        lowered = self.calls[number].lowered
        if index >= (lowered.codes if home is Home.CODE else lowered.places):
            raise ProgramFault(f"rank {r} has no slot {index} ({home.name.lower()})")
        return Source(home, r, index)

    def _fill(self, number: int, r: int) -> None:
        """Write the input to its buffer."""
        for (rank, chunk), values in self.calls[number].inputs.items():
            if rank == r:
                for piece, value in enumerate(values):
                    self._write(r, (number, Home.INPUT, r, chunk, piece), value)

    def _reuse(self, number: int, r: int) -> None:
        """The call has returned: the caller overwrites all its buffers."""
        for key in self.buffers.pop((number, r), ()):
            self._write(r, key, None)

    # --- memory

    def _key(self, number: int, source: Source, generation: int, piece: int) -> Key:
        if source.home in (Home.WINDOW, Home.CODE):
            kind = -1 if source.home is Home.WINDOW else -2
            return kind, source.rank, generation % 2, source.index
        call, home = self.calls[number], source.home
        slot = source.rank, source.index
        if source.rank in call.in_place and slot in call.inputs:
            home = Home.INPUT
        return number, home, *slot, piece

    def _read(self, r: int, key: Key) -> Any:
        cell = self.cells.get(key)
        clock = self.ranks[r].clock
        if cell is None:
            raise ProgramFault(
                f"rank {r} reads {_describe(key)}, which nobody has written"
            )
        if clock[cell.writer] < cell.written:
            raise ProgramFault(
                f"rank {r} reads {_describe(key)} while {cell.writer} may write it"
            )
        clock[r] += 1
        cell.readers[r] = clock[r]
        return cell.value

    def _write(self, r: int, key: Key, value: Any) -> None:
        cell = self.cells.get(key)
        clock = self.ranks[r].clock
        clock[r] += 1
        if cell is not None:
            if clock[cell.writer] < cell.written:
                raise ProgramFault(
                    f"ranks {r} and {cell.writer} both write {_describe(key)}"
                )
            for q, when in cell.readers.items():
                if clock[q] < when:
                    raise ProgramFault(
                        f"rank {r} writes {_describe(key)} while {q} may read it"
                    )
        elif key[0] >= 0:
            self.buffers.setdefault((key[0], key[2]), []).append(key)
        self.cells[key] = MemoryCell(value, r, clock[r])

    def _check_access(self, number: int, r: int, source: Source) -> None:
        """Refuse access to another rank's buffer unless it is shared."""
        call = self.calls[number]
        shared = {
            Home.INPUT: call.input_shared,
            Home.OUTPUT: call.output_shared,
            Home.WINDOW: True,
            Home.CODE: True,
        }
        if source.rank != r and (
            not shared[source.home] or call.on_different_hosts(r, source.rank)
        ):
            raise ProgramFault(f"rank {r} cannot reach {source}")

    # --- waiting

    def _publish(self, r: int, progress: Progress) -> None:
        rank = self.ranks[r]
        rank.progress.append(progress)
        rank.clocks.append(list(rank.clock))

    def _holds(self, condition: Condition | None) -> bool:
        if condition is None:
            return True
        if condition.stream is not None:
            found = len(condition.stream.sent), condition.stream.received
            return found[0] >= condition.sent and found[1] >= condition.received
        rank = self.ranks[condition.rank]
        if condition.started >= 0:
            return len(rank.started) > condition.started
        if condition.arrival >= 0:
            return len(rank.arrivals) > condition.arrival
        return bool(rank.progress) and rank.progress[-1] >= condition.progress

    def _learn(self, r: int, condition: Condition | None) -> None:
        """Merge the awaited rank's clock as it was when it published its progress."""
        if condition is None or condition.stream is not None:
            return
        other = self.ranks[condition.rank]
        if condition.started >= 0:
            clock = other.started[condition.started]
        elif condition.arrival >= 0:
            clock = other.arrivals[condition.arrival]
        else:
            clock = other.clocks[bisect_left(other.progress, condition.progress)]
        self._merge_clock(r, clock)

    def _merge_clock(self, r: int, clock: Clock) -> None:
        mine = self.ranks[r].clock
        self.ranks[r].clock = [max(a, b) for a, b in zip(mine, clock, strict=True)]


def _describe(key: Key) -> str:
    """A readable name of a cell."""
    if key[0] < 0:
        what = "slot" if key[0] == -1 else "code"
        return f"{what} {key[3]} of rank {key[1]}'s window"
    call, home, rank, chunk, piece = key
    where = Home(home).name.lower()
    return f"chunk {chunk} of rank {rank}'s {where} (call {call}, piece {piece})"
