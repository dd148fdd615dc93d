"""The exact interpreter: which ranks contribute to which slot, and what is wrong.

A slot holds contributions to one chunk, as a Python integer with one bit per rank.
Adding two slots that share a bit counts that contribution twice, and nothing can take
it out again: the slot is *spoilt* until it is overwritten, and so is any sum that it
enters. The same holds for slots that begin empty. This is slow and simple, which makes
it the reference for the fast verifier in the tests, and the source of its messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from unisono.errors import ScheduleError
from unisono.schedule.protocol import ReadableSchedule
from unisono.schedule.step import Step, Transfer


@dataclass(frozen=True)
class Held:
    """What a slot holds: whose contributions, to which chunk; why it is wrong."""

    ranks: int = 0
    chunk: int = -1
    spoilt: str = ""
    step: int = 0
    doubled: int = 0


EMPTY = Held()


class Ledger:
    """The slots of all ranks, for all chunks or for the one in `only`."""

    def __init__(self, schedule: ReadableSchedule, only: int | None = None) -> None:
        """Fill in what the contract gives before the first step."""
        self.schedule = schedule
        self.only = only
        self.steps_done = 0
        self.held: dict[tuple[int, int], Held] = {}
        self.written: dict[tuple[int, int], int] = {}
        for chunk, ranks in self._places(before=True):
            for rank in ranks:
                self.held[rank, chunk] = Held(1 << rank, chunk)

    def _places(self, *, before: bool) -> Iterator[tuple[int, Iterable[int]]]:
        """Each chunk, and the ranks that hold it before, or must hold it after."""
        contract = self.schedule.contract
        place = contract.collective.before if before else contract.collective.after
        chunks = range(contract.num_chunks) if self.only is None else [self.only]
        holder = contract.holder(place, np.asarray(chunks))
        for i, chunk in enumerate(chunks):
            yield chunk, range(contract.n) if holder is None else [int(holder[i])]

    def at(self, rank: int, chunk: int) -> Held:
        """What `rank` holds of `chunk` now."""
        return self.held.get((rank, chunk), EMPTY)

    def run(self, step: Step) -> None:
        """Carry out one step, all reads before any write."""
        self.steps_done += 1
        if self.only is not None:
            step = step.where(step.chunk == self.only)
        moves = [(t, self._read(t)) for t in step]
        copied = set()
        for t, value in moves:
            if not t.reduces:
                if (t.dst, t.into) in copied:
                    raise self._breach(t, SECOND_COPY)
                copied.add((t.dst, t.into))
                self.held[t.dst, t.into] = value
        for t, value in moves:
            if t.reduces:
                self.held[t.dst, t.into] = self._sum(self.at(t.dst, t.into), value, t)
        self.written.update({(t.dst, t.into): self.steps_done for t, _ in moves})

    def _read(self, t: Transfer) -> Held:
        broken = broken_rule(self.schedule, t)
        if broken:
            raise self._breach(t, broken)
        value = self.at(t.src, t.chunk)
        if value is EMPTY:
            why = f"rank {t.src} sends chunk {t.chunk}, which it does not have"
            return Held(spoilt=why, step=self.steps_done)
        return value

    def _sum(self, own: Held, got: Held, t: Transfer) -> Held:
        both = own.ranks | got.ranks
        if own is EMPTY:
            why = f"rank {t.dst} adds to chunk {t.into}, of which it has nothing"
            own = Held(spoilt=why, step=self.steps_done)
        for part in (own, got):
            if part.spoilt:
                return Held(both, part.chunk, part.spoilt, part.step, part.doubled)
        if own.chunk != got.chunk:
            why = f"rank {t.dst} adds chunk {got.chunk} to chunk {own.chunk}"
            return Held(both, own.chunk, why, self.steps_done)
        twice = own.ranks & got.ranks
        why = (
            f"rank {t.dst} already counts {_some(twice)} in chunk {own.chunk}"
            if twice
            else ""
        )
        return Held(both, own.chunk, why, self.steps_done, twice)

    def _breach(self, t: Transfer, what: str) -> ScheduleError:
        where = _where(self.schedule, self.steps_done)
        return ScheduleError(
            f"{where}: {t} {what}", step=self.steps_done, rank=t.dst, chunk=t.chunk
        )

    def check(self) -> None:
        """Raise ScheduleError for the first slot that does not fulfil the contract."""
        for chunk, ranks in self._places(before=False):
            for rank in ranks:
                self.check_slot(rank, chunk)

    def check_slot(self, rank: int, chunk: int) -> None:
        """Raise ScheduleError if this slot does not fulfil the contract."""
        contract = self.schedule.contract
        origin = contract.holder(contract.collective.before, np.array([chunk]))
        due = (1 << contract.n) - 1 if origin is None else 1 << int(origin[0])
        held = self.at(rank, chunk)
        if held.spoilt:
            where = _where(self.schedule, held.step)
            raise ScheduleError(
                f"{where}: {held.spoilt}; rank {rank} ends with a wrong chunk {chunk}",
                step=held.step,
                rank=rank,
                chunk=chunk,
                doubled=_members(held.doubled),
            )
        if held.ranks != due or held.chunk != chunk:
            raise ScheduleError(
                f"{_where(self.schedule)}: {self._lack(rank, chunk, held, due)}",
                step=self.written.get((rank, chunk)),
                rank=rank,
                chunk=chunk,
                missing=_members(due & ~held.ranks),
            )

    def _lack(self, rank: int, chunk: int, held: Held, due: int) -> str:
        last = self.written.get((rank, chunk))
        when = "never written" if last is None else f"last written in step {last}"
        if held is not EMPTY and held.chunk != chunk:
            return f"rank {rank} holds chunk {held.chunk} for chunk {chunk} ({when})"
        if not self.schedule.collective.reduces:
            origin = _some(due)
            return f"rank {rank} never receives chunk {chunk}, which begins at {origin}"
        return f"rank {rank} lacks {_some(due & ~held.ranks)} in chunk {chunk} ({when})"


SECOND_COPY = "is a second copy into one slot"


def broken_rule(schedule: ReadableSchedule, t: Transfer) -> str:
    """Which rule of transfers `t` breaks, in words; nothing if it keeps them all."""
    n, slots = schedule.n, schedule.num_slots
    if not (0 <= t.src < n and 0 <= t.dst < n):
        return f"is outside the ranks 0..{n - 1}"
    if not (0 <= t.chunk < slots and 0 <= t.into < slots):
        return f"is outside the chunks 0..{slots - 1}"
    if t.chunk != t.into and not schedule.num_temporaries:
        return "changes its name, but the algorithm declares no temporaries"
    return (
        "has the same source and destination"
        if (t.src, t.chunk) == (t.dst, t.into)
        else ""
    )


def first_invalid(schedule: ReadableSchedule, step: Step) -> int:
    """The index of the first transfer that breaks one of those rules, or -1."""
    n, slots = schedule.n, schedule.num_slots
    src, dst, chunk, _, into = step.flat()
    bad = (src < 0) | (src >= n) | (dst < 0) | (dst >= n)
    bad |= (chunk < 0) | (chunk >= slots) | (into < 0) | (into >= slots)
    bad |= (src == dst) & (chunk == into)
    if not schedule.num_temporaries:
        bad |= chunk != into
    return int(np.argmax(bad)) if bad.any() else -1


def checked_steps(schedule: ReadableSchedule) -> Iterator[Step]:
    """The steps, as long as every transfer is between ranks and chunks that there are.

    For readers that use them as indices, where -1 would silently be the last.
    """
    for number, step in enumerate(schedule, start=1):
        broken = first_invalid(schedule, step)
        if broken >= 0:
            raise explain_rule(schedule, number, step, broken)
        yield step


def check_exactly(schedule: ReadableSchedule) -> None:
    """Run the whole schedule on a ledger; return if it is right, raise if it is not."""
    ledger = Ledger(schedule)
    for step in schedule:
        ledger.run(step)
    ledger.check()


def explain_rule(
    schedule: ReadableSchedule, number: int, step: Step, index: int
) -> ScheduleError:
    """The error for transfer `index` of step `number`, which breaks a rule."""
    src, dst, chunk, mask, into = (a[index].item() for a in step.flat())
    bad = Transfer(src, dst, chunk, mask, into)
    what = broken_rule(schedule, bad) or SECOND_COPY
    message = f"{_where(schedule, number)}: {bad} {what}"
    return ScheduleError(message, step=number, rank=dst, chunk=chunk)


def explain_end(schedule: ReadableSchedule, rank: int, chunk: int) -> ScheduleError:
    """The counter-example for a slot that the fast verifier found to end wrong."""
    ledger = Ledger(schedule, None if schedule.num_temporaries else chunk)
    for step in schedule:
        ledger.run(step)
    try:
        ledger.check_slot(rank, chunk)
    except ScheduleError as error:
        return error
    return ScheduleError(
        f"{_where(schedule)}: chunk {chunk} of rank {rank} was wrong in one run and "
        "right in another; the algorithm must give the same steps each time",
        rank=rank,
        chunk=chunk,
    )


def _where(schedule: ReadableSchedule, step: int | None = None) -> str:
    return f"{schedule.title}, {'end' if step is None else f'step {step}'}"


def _members(bits: int) -> list[int]:
    """The positions of the bits that are set."""
    return [r for r in range(bits.bit_length()) if bits >> r & 1]


def _some(bits: int) -> str:
    """Up to six ranks by number, as in "ranks 1, 2, 5"."""
    ranks = _members(bits)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"ranks {', '.join(map(str, ranks[:6]))}{rest}"
