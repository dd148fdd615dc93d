"""Proof that a schedule keeps its contract, in one pass over its transfers.

Where contributions are added up, every slot ends as a sum of contributions, each
counted some number of times. Give every contribution (and every slot that begins empty)
a random value, run the schedule on the values, and compare: a sum in which one is
missing, counted twice or out of place agrees with the right one only by chance. Values
are 61 random bits and sums are taken modulo a random prime above 2^61, so that chance
is below 2^-60. (If no contribution is counted 2^61 times or more; for a schedule built
to do that, it is below 2^-50.)

Where each chunk has one original there is nothing to add, and a value would mean no
more than "the original" or "something else": one byte a slot, and the answer is exact.

Chunks do not mix, so when the state outgrows its budget they are taken some at a time,
and the steps generated anew for each batch. When something is wrong, the exact
interpreter of `oracle.py` runs the chunk concerned and describes the fault.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import BadArgument, whole_number
from unisono.schedule.domains import ChunkState, PresenceState, ValueState
from unisono.schedule.oracle import explain_end, explain_rule
from unisono.schedule.protocol import ReadableSchedule
from unisono.units import html_table

STATE_BYTES = 512 << 20
"""How large the state may be before chunks are verified in several batches."""

MOST_SLOTS = 1 << 26
"""How many slots may be in one batch that cannot be divided."""

MOST_IN_ALL = 1 << 40
"""How many slots there may be: at one a nanosecond, a quarter of an hour."""


@dataclass(frozen=True)
class Proof:
    """What was proven, and by how much work."""

    schedule: ReadableSchedule
    steps: int
    transfers: int
    exact: bool
    seed: int
    seconds: float

    @property
    def doubt(self) -> str:
        """The chance that a wrong schedule passed."""
        return "none" if self.exact else "below 2^-60"

    def __repr__(self) -> str:
        """What it means, in one line."""
        return f"<Proof: {self.schedule.title}, chance of error: {self.doubt}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        facts = {
            "steps": f"{self.steps:,}",
            "transfers": f"{self.transfers:,}",
            "chance of error": self.doubt,
            "time": f"{self.seconds:.3g} s",
        }
        return html_table(f"verified: {self.schedule.title}", facts)

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"verified: {self.schedule.title}: {self.transfers:,} transfers in "
            f"{self.steps:,} steps, {self.seconds:.3g} s; chance of error: {self.doubt}"
        )


def verify(schedule: ReadableSchedule, *, seed: int | None = None) -> Proof:
    """Prove that `schedule` keeps its contract, or raise ScheduleError."""
    if isinstance(schedule, str):
        raise BadArgument(
            f"verify({schedule!r}): expected a schedule, as in "
            "unisono.schedule('all_reduce', 'ring', n=4).verify()"
        )
    began = time.perf_counter()
    seed = secrets.randbits(63) if seed is None else abs(whole_number("seed", seed))
    # A transfer that changes its chunk's name brings another original, which one byte
    # cannot tell; such schedules declare temporaries.
    exact = not schedule.collective.reduces and not schedule.num_temporaries
    steps = transfers = 0
    for lo, hi in batches(schedule, bytes_per_slot=1 if exact else 8):
        lot = (
            PresenceState(schedule, lo, hi)
            if exact
            else ValueState(schedule, lo, hi, seed)
        )
        steps, transfers = _run(schedule, lot)
        del lot  # before the next one takes as much memory
    return Proof(schedule, steps, transfers, exact, seed, time.perf_counter() - began)


def _run(schedule: ReadableSchedule, lot: ChunkState) -> tuple[int, int]:
    """Run all steps on one batch and check it; the number of steps and of transfers."""
    steps = transfers = 0
    for step in schedule:
        steps += 1
        transfers += len(step)
        broken = lot.run(step)
        if broken >= 0:
            raise explain_rule(schedule, steps, step, broken)
    wrong = lot.first_wrong()
    if wrong:
        raise explain_end(schedule, *wrong)
    return steps, transfers


def batches(
    schedule: ReadableSchedule, bytes_per_slot: int
) -> Iterator[tuple[int, int]]:
    """Ranges of chunks whose state fits the budget; one range where chunks may mix."""
    together = schedule.num_slots if schedule.num_temporaries else 1
    if schedule.n * schedule.num_slots > MOST_IN_ALL:
        raise BadArgument(
            f"{schedule.title}: {schedule.num_slots} chunks on {schedule.n} ranks are "
            "too many to verify"
        )
    if schedule.n * together > MOST_SLOTS:
        raise BadArgument(
            f"n = {schedule.n}: too many ranks to verify (at most {MOST_SLOTS} "
            "slots that depend on each other)"
        )
    size = max(together, STATE_BYTES // (bytes_per_slot * schedule.n))
    for lo in range(0, schedule.num_chunks, size):
        hi = min(lo + size, schedule.num_chunks)
        yield lo, schedule.num_slots if schedule.num_temporaries else hi
