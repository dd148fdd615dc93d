"""The published rows: read, checked, and split into two halves."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from unisono.models import MODELS, ModelShape, gpt
from unisono.schedule.collective import collective
from unisono.simulate.engines import Fabric
from unisono.simulate.result import bus_factor

HERE = Path(__file__).parent
ROUNDED = 0.25
"""Bandwidths below so many GB/s have two digits or less: too few to be judged by."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class PublishedCall:
    """One call of a collective that was measured."""

    source: str
    collective: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PublishedStep:
    """One training step that was measured; `why_not` if `train` has no such thing."""

    source: str
    model: str
    device: str
    ranks: int
    per_host: int
    tp: int
    sequence: int
    batch: int
    microbatches: int
    recompute: str
    gradient_bytes: int
    tokens_per_second: float
    why_not: str = ""


@cache
def sources() -> dict[str, Any]:
    """What sources.toml says."""
    return tomllib.loads((HERE / "sources.toml").read_text("utf-8"))


@cache
def fabric(source: str) -> Fabric:
    """The machine of a source, with line rates."""
    one = sources()["collectives"][source]
    return Fabric(
        one["hosts"],
        one["per_host"],
        one["inside"] * 1e9,
        one.get("across", 0) * 1e9,
        sums=one.get("sums", False),
    )


def calls(file: Path = HERE / "collectives.csv") -> list[PublishedCall]:
    """The rows of collectives.csv as times; rows with too few digits are left out."""
    found = []
    for row in _rows(file):
        nbytes, value = int(row["nbytes"]), float(row["value"])
        seconds = value * 1e-6
        if row["unit"] == "busbw GB/s":
            if value < ROUNDED:
                continue
            ranks = fabric(row["source"]).ranks
            factor = bus_factor(collective(row["collective"]), ranks)
            seconds = nbytes * factor / (value * 1e9)
        elif row["unit"] != "us":
            raise ValueError(f"{file}: unit {row['unit']}: expected us or busbw GB/s")
        found.append(PublishedCall(row["source"], row["collective"], nbytes, seconds))
    return found


def steps(file: Path = HERE / "training.csv") -> list[PublishedStep]:
    """The rows of training.csv as tokens per second."""
    found = []
    for row in _rows(file):
        ranks, sequence = int(row["ranks"]), int(row["sequence"])
        rate = float(row["value"])
        if row["unit"] == "TFLOP/s/GPU":
            rate *= 1e12 * ranks / _operations(shape(row["model"], sequence), sequence)
        elif row["unit"] != "tokens/s":
            raise ValueError(f"{file}: unit {row['unit']}: expected tokens/s")
        device = "a100-40gb" if "40gb" in row["source"] else row["device"]
        found.append(
            PublishedStep(
                row["source"],
                row["model"],
                device,
                ranks,
                int(row["per_host"]),
                int(row["tp"]),
                sequence,
                int(row["batch"]),
                int(row["microbatches"]),
                row["recompute"],
                int(row["gradient_bytes"]),
                rate,
                _why_not(row),
            )
        )
    return found


def _why_not(row: dict[str, str]) -> str:
    if row["pp"] != "1":
        return "pipelines"
    return "8-bit products" if row["precision"] == "fp8" else ""


def _operations(model: ModelShape, sequence: int) -> float:
    """Operations for a token as such tables count them: attention without its mask."""
    masked = 2.0 * sequence * model.hidden * model.layers
    return 3.0 * (model.flops(sequence) + masked)


def shape(name: str, sequence: int) -> ModelShape:
    """The shape of a model in the tables."""
    if name in MODELS:
        return MODELS[name]
    return gpt(name, **sources()["models"][name], positions=sequence, tied=True)


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every second row to fit on, and the others to judge by; few are all judged."""
    if len(rows) < 3:
        return [], list(rows)
    return list(rows[::2]), list(rows[1::2])


def by_source(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each source, in the order in which they were published."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)  # type: ignore[attr-defined]
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
