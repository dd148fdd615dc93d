"""Schedules by names, as the command line takes them."""

from __future__ import annotations

from unisono.algorithms.library import schedule as named_schedule
from unisono.errors import BadArgument
from unisono.schedule.schedule import Schedule


def as_schedule(what: Schedule | str, algorithm: str, n: int, root: int) -> Schedule:
    """A schedule as it is, or that of a collective and an algorithm by their names."""
    if isinstance(what, str):
        return named_schedule(what, algorithm, n, root=root)
    if isinstance(what, Schedule):
        return what
    raise BadArgument(
        f"{type(what).__name__}: expected a schedule, or names as in "
        "'all_reduce', 'ring', 4"
    )
