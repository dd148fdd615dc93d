"""Errors on the rows that were not fitted on, for each source and for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import isclose
from statistics import median

import numpy as np

from benchmarks.published.fitting import (
    BEFORE,
    calibrated,
    fitted_device,
    predicted,
    tokens_per_second,
)
from benchmarks.published.tables import (
    PublishedCall,
    PublishedStep,
    by_source,
    calls,
    fabric,
    halves,
    steps,
)
from unisono.simulate.engines import Calibration
from unisono.simulate.kernels import Device
from unisono.tune.fit import fit
from unisono.tune.measured import MOST_LINES

AIMS = {"collectives": (0.10, 0.25), "training": (0.08, 0.20)}
"""Median and ninth decile of the errors that are asked for."""


@dataclass(frozen=True)
class Judged:
    """A source: how many rows were fitted on, and the errors of the others.

    `unseen` are the errors of all its rows with constants from other sources alone.
    """

    source: str
    fitted: int
    errors: tuple[float, ...]
    unseen: tuple[float, ...] = ()
    left_out: int = 0
    why: str = ""


def summary(errors: Iterable[float]) -> tuple[float, float]:
    """The median and the ninth decile; not a number if there are none."""
    values = np.asarray(list(errors), dtype=np.float64)
    if not values.size:
        return float("nan"), float("nan")
    return float(np.median(values)), float(np.quantile(values, 0.9))


def usual(found: Sequence[Calibration]) -> Calibration:
    """The median of each constant, among those that measurements have moved."""
    columns = zip(*(astuple(one) for one in found), strict=True)
    made = []
    for column, before in zip(columns, astuple(BEFORE), strict=True):
        moved = [x for x in column if not isclose(x, before)]
        made.append(median(moved or [before]))
    return Calibration(*made)


def judged_collectives() -> tuple[list[Judged], dict[str, Calibration]]:
    """All sources of collectives, and what was fitted to each."""
    sources = {
        name: sorted(rows, key=lambda r: (r.collective, r.nbytes))
        for name, rows in by_source(calls()).items()
    }
    found = {
        name: calibrated(first)
        for name, rows in sources.items()
        if (first := halves(rows)[0])
    }
    several = {name: fabric(name).hosts > 1 for name in sources}
    judged = []
    for name, rows in sources.items():
        others = [
            one
            for other, one in found.items()
            if other != name and several[other] == several[name]
        ]
        elsewhere = usual(others)
        first, second = halves(rows)
        given = found.get(name, elsewhere)
        errors = _call_errors(second, given)
        judged.append(Judged(name, len(first), errors, _call_errors(rows, elsewhere)))
    return judged, found


def judged_lines() -> list[float]:
    """Errors of `unisono fit` alone: lines through one half of a source's all_reduces.

    Sources with less than six rows to fit on are left out.
    """
    errors = []
    for rows in by_source(calls()).values():
        reduced = [r for r in rows if r.collective == "all_reduce"]
        first, second = halves(sorted(reduced, key=lambda r: r.nbytes))
        if len(first) >= 6:
            sizes, times = [r.nbytes for r in first], [r.seconds for r in first]
            found = fit(sizes, times, most=MOST_LINES)
            errors += [abs(found.at(r.nbytes) / r.seconds - 1) for r in second]
    return errors


def _call_errors(
    rows: Sequence[PublishedCall], given: Calibration
) -> tuple[float, ...]:
    return tuple(abs(predicted(row, given) / row.seconds - 1) for row in rows)


def judged_training() -> tuple[list[Judged], dict[str, Device]]:
    """All sources of training steps, and what was fitted to each device."""
    every = steps()
    first: dict[str, list[PublishedStep]] = {}
    parts = {}
    for name, rows in by_source(every).items():
        known = [row for row in rows if not row.why_not]
        parts[name] = halves(known)
        for row in parts[name][0]:
            first.setdefault(row.device, []).append(row)
    found = {name: fitted_device(name, rows) for name, rows in first.items()}
    judged = []
    for name, rows in by_source(every).items():
        why = ", ".join(sorted({row.why_not for row in rows if row.why_not}))
        left = sum(bool(row.why_not) for row in rows)
        fit, held = parts[name]
        errors = tuple(
            abs(tokens_per_second(row, found[row.device]) / row.tokens_per_second - 1)
            for row in held
        )
        judged.append(Judged(name, len(fit), errors, left_out=left, why=why))
    return judged, found
