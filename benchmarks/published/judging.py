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
    engine_of,
    fabric,
    halves,
    judged_alone,
    steps,
)
from unisono.simulate.engines import Calibration
from unisono.simulate.kernels import Device
from unisono.tune.fit import fit
from unisono.tune.measured import MOST_LINES

AIMS = {"collectives": (0.10, 0.25), "training": (0.08, 0.20)}
"""Median and ninth decile of the errors that are asked for."""


@dataclass(frozen=True)
class Point:
    """One row: what was measured, seconds or tokens per second, what, how large."""

    what: str
    nbytes: int
    published: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """A part of what was published."""
        return abs(self.predicted / self.published - 1)


@dataclass(frozen=True)
class Judged:
    """A source: how many rows were fitted on, and the errors of the others.

    `unseen` are the errors of all its rows with constants from other sources alone.
    `points` are all its rows: published, predicted, and whether it was fitted on.
    """

    source: str
    fitted: int
    errors: tuple[float, ...]
    unseen: tuple[float, ...] = ()
    left_out: int = 0
    why: str = ""
    points: tuple[Point, ...] = ()


def summary(errors: Iterable[float]) -> tuple[float, float]:
    """The median and the ninth decile; not a number if there are none."""
    values = np.asarray(list(errors), dtype=np.float64)
    if not values.size:
        return float("nan"), float("nan")
    return float(np.median(values)), float(np.quantile(values, 0.9))


def kind_of(source: str) -> tuple[str, bool]:
    """What sources have in common: the library, and whether there are several hosts."""
    return engine_of(source), fabric(source).hosts > 1


def usual(found: Sequence[Calibration]) -> Calibration:
    """The median of each constant, among those that measurements have moved."""
    columns = zip(*(astuple(one) for one in found or [BEFORE]), strict=True)
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
    judged = []
    for name, rows in sources.items():
        others = [found[o] for o in found if o != name and kind_of(o) == kind_of(name)]
        elsewhere = usual(others)
        first, second = halves(rows)
        given = found.get(name, elsewhere)
        points = tuple(
            _call(row, given, fitted)
            for some, fitted in ((first, True), (second, False))
            for row in some
        )
        errors = tuple(point.error for point in points if not point.fitted)
        unseen = tuple(_call(row, elsewhere, False).error for row in rows if others)
        judged.append(Judged(name, len(first), errors, unseen, points=points))
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


def _call(row: PublishedCall, given: Calibration, fitted: bool) -> Point:
    return Point(row.collective, row.nbytes, row.seconds, predicted(row, given), fitted)


def judged_training() -> tuple[list[Judged], dict[str, Device]]:
    """All sources of training steps, and what was fitted to each device."""
    every = steps()
    first: dict[str, list[PublishedStep]] = {}
    parts = {}
    for name, rows in by_source(every).items():
        known = [row for row in rows if not row.why_not]
        parts[name] = ([], known) if judged_alone(name) else halves(known)
        for row in parts[name][0]:
            first.setdefault(row.device, []).append(row)
    found = {name: fitted_device(name, rows) for name, rows in first.items()}
    judged = []
    for name, rows in by_source(every).items():
        why = ", ".join(sorted({row.why_not for row in rows if row.why_not}))
        left = sum(bool(row.why_not) for row in rows)
        fit, held = parts[name]
        points = tuple(
            _step(row, found[row.device], fitted)
            for some, fitted in ((fit, True), (held, False))
            for row in some
        )
        errors = tuple(point.error for point in points if not point.fitted)
        judged.append(
            Judged(name, len(fit), errors, left_out=left, why=why, points=points)
        )
    return judged, found


def _step(row: PublishedStep, device: Device, fitted: bool) -> Point:
    what = f"{row.model}, {row.ranks} {row.device}, {row.sequence} tokens"
    rate = tokens_per_second(row, device)
    return Point(what, 0, row.tokens_per_second, rate, fitted)
