"""What a picture of a schedule shows: the contents of all slots after each step.

Rank is a column and chunk a row. A cell shows the contributions in it, so that a
partial sum is visible. Both the text and the SVG are drawn from these frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import BadArgument
from unisono.schedule.collective import ALL_TO_ALL
from unisono.schedule.oracle import Ledger
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, Transfer

MAX_STEPWISE = 8
"""Up to how many ranks every step is drawn, with every contribution."""

MAX_RANKS = 16
"""Up to how many ranks all cells are drawn; beyond, phases are summed up."""

MAX_ROWS = 64
MAX_FRAMES = 128
MAX_SUMMARY = 1024
"""Up to how many ranks there is a picture at all."""


@dataclass(frozen=True)
class SlotView:
    """What one rank holds of one chunk: bits of the ranks whose contribution is in."""

    ranks: int
    changed: bool
    spoilt: bool


@dataclass(frozen=True)
class StepFrame:
    """The state after one step (number 0: before the first), and what led to it."""

    number: int
    phase: str
    transfers: tuple[Transfer, ...]
    rows: tuple[tuple[SlotView, ...], ...]


def is_stepwise(schedule: Schedule) -> bool:
    """Whether each step is drawn, rather than groups of steps."""
    return schedule.n <= MAX_STEPWISE and is_small(schedule)


def is_small(schedule: Schedule) -> bool:
    """Whether cells are drawn, rather than a summary of each phase."""
    return (
        schedule.n <= MAX_RANKS
        and schedule.num_slots <= MAX_ROWS
        and schedule.num_steps <= MAX_FRAMES
    )


def refuse_if_huge(n: int) -> None:
    """Raise BadArgument for more ranks than any picture can show."""
    if n > MAX_SUMMARY:
        raise BadArgument(
            f"{n} ranks cannot be shown step by step: at most {MAX_SUMMARY} (`unisono "
            "verify` goes further)"
        )


def frames(schedule: Schedule) -> Iterator[StepFrame]:
    """The state before the first step and after each, with the cells that changed."""
    ledger = Ledger(schedule)
    yield _frame(schedule, ledger, 0, None)
    for number, step in enumerate(schedule, start=1):
        ledger.run(step)
        yield _frame(schedule, ledger, number, step)


def _frame(
    schedule: Schedule, ledger: Ledger, number: int, step: Step | None
) -> StepFrame:
    transfers = () if step is None else tuple(step)
    changed = {(t.dst, t.into) for t in transfers}
    rows = []
    for chunk in range(schedule.num_slots):
        held = [ledger.at(rank, chunk) for rank in range(schedule.n)]
        rows.append(
            tuple(
                SlotView(h.ranks, (rank, chunk) in changed, bool(h.spoilt))
                for rank, h in enumerate(held)
            )
        )
    return StepFrame(number, step.phase if step else "", transfers, tuple(rows))


def row_names(schedule: Schedule) -> list[str]:
    """What each row is called: a chunk, in all_to_all its way, or a temporary."""
    n, chunks = schedule.n, schedule.num_chunks
    temporaries = [f"temporary {t}" for t in range(schedule.num_temporaries)]
    if schedule.collective is not ALL_TO_ALL:
        return [f"chunk {c}" for c in range(chunks)] + temporaries
    pieces = chunks // (n * n)
    names = []
    for chunk in range(chunks):
        pair, piece = divmod(chunk, pieces)
        suffix = f" .{piece}" if pieces > 1 else ""
        names.append(f"{pair // n} to {pair % n}{suffix}")
    return names + temporaries


def letter(rank: int) -> str:
    """The letter that stands for a rank's contribution."""
    return chr(ord("a") + rank)
