"""Lowered programs carried out by hand: slowly, in any order, and watched.

`play` does what the native executor does with programs: ranks publish what others read
first, meet, run their actions piece by piece through the two halves of their windows,
wait at their exits, and then use their buffers for something else. Ranks take turns in
an order that a seed decides, and nothing but the programs' own waits holds any of them
back.

Every cell of memory (a piece of a chunk in a buffer, a place in half a window) keeps
who wrote and who read it, and every rank keeps how much it can know of the others: what
it has waited for, and what those had waited for before (a vector clock). Reading what
is not known to be written, and writing what is not known to be read, are faults even
where this once all went well. So one run in any order answers for all orders.

Codes are modelled, too: what `encode` makes of a value lies in windows and travels on
streams, and whoever reads it gets what `decode` makes of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from unisono.schedule.program import Action, Home, Lowered, Program, Source, Wait
from unisono.testing._watched import Cell, Clock, Key, Need, Rank, Stream, Word

Slot = tuple[int, int]
Values = Mapping[Slot, Sequence[Any]]
"""For (rank, chunk), a value for each piece."""

Combine = Callable[[Sequence[Any], bool], Any]
"""Reduces values, in their order; the flag tells whether this completes the sum."""


Change = Callable[[Any], Any]
"""Encodes a value, or decodes it."""


class ProgramFault(AssertionError):
    """Programs that can read what is not there, overwrite what is needed, or hang."""


@dataclass(frozen=True)
class Call:
    """One collective: its programs, what each rank holds, and where buffers lie.

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

    def apart(self, one: int, other: int) -> bool:
        """Whether two ranks are on different hosts."""
        return bool(self.hosts) and self.hosts[one] != self.hosts[other]


def play(
    calls: Sequence[Call],
    combine: Combine,
    *,
    seed: int = 0,
    encode: Change = lambda value: value,
    decode: Change = lambda code: code,
) -> list[Values]:
    """The outputs of the calls, made one after the other on one communicator.

    ProgramFault if any order of the ranks could lead to another result, or to none.
    """
    return _Machine(calls, combine, Random(seed), encode, decode).run()


class _Machine:
    def __init__(
        self,
        calls: Sequence[Call],
        combine: Combine,
        random: Random,
        encode: Change,
        decode: Change,
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
            pair: Stream(thread, random.random() < 0.5)
            for thread, pair in enumerate(sorted(pairs), self.n)
        }
        everybody = self.n + len(self.streams)
        self.ranks = [Rank([0] * everybody) for _ in range(everybody)]
        self.cells: dict[Key, Cell] = {}
        self.buffers: dict[tuple[int, int], list[Key]] = {}  # by call and rank
        self.taken: list[list[Any]] = [[] for _ in range(self.n)]
        self.outputs: list[dict[Slot, list[Any]]] = [{} for _ in calls]
        # By rank and half of its window: who reads what was put there last.
        self.window_readers: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self) -> list[Values]:
        """Let the ranks take turns until all are done."""
        running = {r: self._rank(r) for r in range(self.n)}
        running |= {s.thread: self._leaving(r, q) for (r, q), s in self.streams.items()}
        needs: dict[int, Need | None] = dict.fromkeys(running)
        while running:
            ready = [r for r in running if self._met(needs[r])]
            if not ready:
                raise ProgramFault(f"all ranks wait for ever: {needs}")
            r = self.random.choice(ready)
            self._learn(r, needs[r])
            try:
                needs[r] = next(running[r])
            except StopIteration:
                del running[r], needs[r]
        return list(self.outputs)

    # --- what a rank does

    def _rank(self, r: int) -> Iterator[Need | None]:
        generation = 1
        for number, call in enumerate(self.calls):
            self._fill(number, r)
            self.ranks[r].begun.append(list(self.ranks[r].clock))
            program = call.lowered.programs[r]
            done, free = 0, False
            # Whoever does not lend its input publishes it before the others have come.
            if not call.input_shared and self.random.random() < 0.5:
                yield from self._window_free(program, generation)
                done, free = program.lead[r], True
                for action in program.actions[:done]:
                    self._perform(number, r, action, generation, 0)
                self._report(r, (generation, done))
            self.ranks[r].arrivals.append(list(self.ranks[r].clock))
            for q in range(self.n):
                if not call.apart(r, q):
                    yield Need(q, arrival=number)
            for piece in range(call.pieces):
                if not free:
                    yield from self._window_free(program, generation)
                yield from self._generation(number, r, generation, piece, done)
                generation += 1
                done, free = 0, False
            for wait in program.exits:
                yield self._awaited(number, r, wait, generation - 1)
            self._reuse(number, r)

    def _generation(
        self, number: int, r: int, generation: int, piece: int, done: int
    ) -> Iterator[Need | None]:
        program = self.calls[number].lowered.programs[r]
        told = len(program.actions) - program.tail
        for count, action in enumerate(program.actions[done:], done + 1):
            for wait in action.waits:
                yield self._awaited(number, r, wait, generation)
            for source in action.sources:
                if source.home is Home.STREAM:
                    stream = self.streams[source.rank, r]
                    yield Need(stream=stream, sent=stream.taken + 1)
                    self._take(stream, r, source)
            self._perform(number, r, action, generation, piece)
            if count <= told:
                self._report(r, (generation, count))
            yield None
        self._report(r, (generation + 1, 0))

    def _window_free(self, program: Program, generation: int) -> Iterator[Need]:
        """Wait until this half's last content has been read by all who read it."""
        r, half = program.rank, generation % 2
        for q in self.window_readers.get((r, half), ()):
            yield self._awaited(0, r, Wait(q, 0), generation - 1)
        self.window_readers[r, half] = program.readers

    def _awaited(self, number: int, r: int, wait: Wait, generation: int) -> Need:
        """A rank's progress; for one on another host, that of what leaves for it."""
        apart = self.calls[number].apart(r, wait.rank)
        who = self.streams[r, wait.rank].thread if apart else wait.rank
        return Need(who, word=(generation, wait.count))

    def _leaving(self, r: int, q: int) -> Iterator[Need | None]:
        """What rank r sends to rank q, beside everything else that it does."""
        stream = self.streams[r, q]
        generation = 1
        for number, call in enumerate(self.calls):
            program = call.lowered.programs[r]
            messages = [m for m in program.messages if m.to == q]
            yield Need(r, begun=number)
            for piece in range(call.pieces):
                for count, message in enumerate(messages, 1):
                    if message.after:
                        yield Need(r, word=(generation, message.after))
                    key = self._key(number, message.source, generation, piece)
                    value = self._read(stream.thread, key)
                    clock = list(self.ranks[stream.thread].clock)
                    stream.sent.append((count - 1, value, clock))
                    if not stream.room:
                        yield Need(stream=stream, taken=len(stream.sent))
                    self._report(stream.thread, (generation, count))
                generation += 1
                self._report(stream.thread, (generation, 0))

    def _take(self, stream: Stream, r: int, source: Source) -> None:
        """The next message, which must be the one that is expected."""
        index, value, clock = stream.sent[stream.taken]
        if index != source.index:
            raise ProgramFault(
                f"rank {r} expects message {source.index} of rank {source.rank}, "
                f"which sends {index}"
            )
        stream.taken += 1
        self._know(r, clock)
        self.taken[r].append(value)

    def _perform(
        self, number: int, r: int, action: Action, generation: int, piece: int
    ) -> None:
        values, keys, code = self._taken(number, r, action, generation, piece)
        made = values[0] if len(values) == 1 else self.combine(values, action.completes)
        if action.code is not None:
            if len(values) > 1 or code is None:  # otherwise the code is handed on
                code = self.encode(made)
            into = self._place(number, r, Home.CODE, action.code)
            self._write(r, self._key(number, into, generation, piece), code)
            made = self.decode(code) if action.back else made
        if action.window is not None:
            into = self._place(number, r, Home.WINDOW, action.window)
            self._write(r, self._key(number, into, generation, piece), made)
        outputs = [] if action.output is None else [(r, action.output)]
        outputs += [(q, action.chunk) for q in action.delivers]
        for slot in outputs:
            into = Source(Home.OUTPUT, *slot)
            self._refuse_foreign(number, r, into)
            key = self._key(number, into, generation, piece)
            # What is there is not written again.
            if len(values) > 1 or keys != [key] or action.back:
                self._write(r, key, made)
            found = self.outputs[number].setdefault(slot, [])
            if len(found) == piece:
                found.append(made)
            found[piece] = made

    def _taken(
        self, number: int, r: int, action: Action, generation: int, piece: int
    ) -> tuple[list[Any], list[Key], Any]:
        """The values of the sources, where those here lie, and the last code read."""
        values: list[Any] = []
        keys: list[Key] = []
        code = None
        for source in action.sources:
            if source.home is Home.STREAM:
                found = self.taken[r].pop(0)
            else:
                self._refuse_foreign(number, r, source)
                keys.append(self._key(number, source, generation, piece))
                found = self._read(r, keys[-1])
            if self._is_code(number, source):
                code, found = found, self.decode(found)
            values.append(found)
        return values, keys, code

    def _is_code(self, number: int, source: Source) -> bool:
        coded = self.calls[number].lowered.noise is not None
        return source.home is Home.CODE or (coded and source.home is Home.STREAM)

    def _place(self, number: int, r: int, home: Home, index: int) -> Source:
        """A place of a rank's own window, which must have that many."""
        lowered = self.calls[number].lowered
        if index >= (lowered.codes if home is Home.CODE else lowered.places):
            raise ProgramFault(f"rank {r} has no place {index} ({home.name.lower()})")
        return Source(home, r, index)

    def _fill(self, number: int, r: int) -> None:
        """Put the input into its buffer."""
        for (rank, chunk), values in self.calls[number].inputs.items():
            if rank == r:
                for piece, value in enumerate(values):
                    self._write(r, (number, Home.INPUT, r, chunk, piece), value)

    def _reuse(self, number: int, r: int) -> None:
        """The call has returned: the caller writes to all its buffers."""
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
            raise ProgramFault(f"rank {r} reads {_told(key)}, which nobody has written")
        if clock[cell.writer] < cell.written:
            raise ProgramFault(
                f"rank {r} reads {_told(key)} while {cell.writer} may write it"
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
                    f"ranks {r} and {cell.writer} both write {_told(key)}"
                )
            for q, when in cell.readers.items():
                if clock[q] < when:
                    raise ProgramFault(
                        f"rank {r} writes {_told(key)} while {q} may read it"
                    )
        elif key[0] >= 0:
            self.buffers.setdefault((key[0], key[2]), []).append(key)
        self.cells[key] = Cell(value, r, clock[r])

    def _refuse_foreign(self, number: int, r: int, source: Source) -> None:
        """Others' buffers can be reached only where they are shared."""
        call = self.calls[number]
        shared = {
            Home.INPUT: call.input_shared,
            Home.OUTPUT: call.output_shared,
            Home.WINDOW: True,
            Home.CODE: True,
        }
        if source.rank != r and (not shared[source.home] or call.apart(r, source.rank)):
            raise ProgramFault(f"rank {r} cannot reach {source}")

    # --- waiting

    def _report(self, r: int, word: Word) -> None:
        rank = self.ranks[r]
        rank.words.append(word)
        rank.clocks.append(list(rank.clock))

    def _met(self, need: Need | None) -> bool:
        if need is None:
            return True
        if need.stream is not None:
            found = len(need.stream.sent), need.stream.taken
            return found[0] >= need.sent and found[1] >= need.taken
        rank = self.ranks[need.rank]
        if need.begun >= 0:
            return len(rank.begun) > need.begun
        if need.arrival >= 0:
            return len(rank.arrivals) > need.arrival
        return bool(rank.words) and rank.words[-1] >= need.word

    def _learn(self, r: int, need: Need | None) -> None:
        """Take over what the awaited rank knew when it said what was awaited."""
        if need is None or need.stream is not None:
            return
        other = self.ranks[need.rank]
        if need.begun >= 0:
            told = other.begun[need.begun]
        elif need.arrival >= 0:
            told = other.arrivals[need.arrival]
        else:
            told = other.clocks[bisect_left(other.words, need.word)]
        self._know(r, told)

    def _know(self, r: int, told: Clock) -> None:
        mine = self.ranks[r].clock
        self.ranks[r].clock = [max(a, b) for a, b in zip(mine, told, strict=True)]


def _told(key: Key) -> str:
    """A cell in words."""
    if key[0] < 0:
        what = "place" if key[0] == -1 else "code"
        return f"{what} {key[3]} of rank {key[1]}'s window"
    call, home, rank, chunk, piece = key
    where = Home(home).name.lower()
    return f"chunk {chunk} of rank {rank}'s {where} (call {call}, piece {piece})"
