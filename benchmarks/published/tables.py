"""The published rows: read, checked, and split into two halves."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """One training step that was measured; `why_not` if no model has such a thing.

    `batch` are the sequences of a micro-batch, or 0 if that was not published; then
    `microbatches` are the sequences of a replica. `chunks` of a stage are 0 as well if
    they were not.
    """

    source: str
    model: str
    device: str
    ranks: int
    per_host: int
    strategy: str
    tp: int
    cp: int
    pp: int
    sequence: int
    batch: int
    microbatches: int
    chunks: int
    recompute: str
    gradient_bytes: int
    attention: str
    tokens_per_second: float
    why_not: str = ""

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def sequences(self) -> int:
        """Of all replicas, in a step."""
        return max(1, self.batch) * self.microbatches * self.dp

    @property
    def played(self) -> bool:
        """Whether it is played out pass by pass, and not one micro-batch of fsdp."""
        return self.pp > 1 or self.strategy != "fsdp"


@cache
def sources() -> dict[str, Any]:
    """What sources.toml says."""
    return tomllib.loads((HERE / "sources.toml").read_text("utf-8"))


def engine_of(source: str) -> str:
    """The library that made a source's calls."""
    return str(sources()["collectives"][source].get("engine", "nccl"))


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
        network_sums=one.get("network_sums", False),
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
        device = "a100-40gb" if "40gb" in row["source"] else row["device"]
        step = PublishedStep(
            row["source"],
            row["model"],
            device,
            int(row["ranks"]),
            int(row["per_host"]),
            row["strategy"],
            int(row["tp"]),
            int(row["cp"]),
            int(row["pp"]),
            int(row["sequence"]),
            int(row["batch"]),
            int(row["microbatches"]),
            int(row["chunks"]),
            row["recompute"],
            int(row["gradient_bytes"]),
            row["attention"],
            0.0,
            "8-bit products" if row["precision"] == "fp8" else "",
        )
        rate = _rate(step, float(row["value"]), row["unit"])
        found.append(replace(step, tokens_per_second=rate))
    return found


def _rate(step: PublishedStep, value: float, unit: str) -> float:
    """Tokens per second of all ranks."""
    model, sequence = shape(step.model, step.sequence), step.sequence
    needed = _operations(model, sequence)
    if unit == "tokens/s":
        return value
    if unit == "s":
        return step.sequences * sequence / value
    if unit == "TFLOP/s/GPU":
        return value * 1e12 * step.ranks / needed
    if unit == "TFLOP/s/GPU with recomputing":  # of all but the head
        return value * 1e12 * step.ranks / (4 / 3 * needed - model.head_flops)
    if unit == "TFLOP/s/GPU with the mask":
        return value * 1e12 * step.ranks / (3.0 * model.flops(sequence))
    raise ValueError(f"training.csv: unit {unit}: expected tokens/s, s or TFLOP/s/GPU")


def _operations(model: ModelShape, sequence: int) -> float:
    """Operations for a token as such tables count them: attention without its mask."""
    masked = 2.0 * sequence * model.query_width * model.layers
    return 3.0 * (model.flops(sequence) + masked)


def shape(name: str, sequence: int) -> ModelShape:
    """The shape of a model in the tables."""
    if name in MODELS:
        return MODELS[name]
    return gpt(name, **sources()["models"][name], positions=sequence, tied=True)


def judged_alone(source: str) -> bool:
    """Whether nothing is fitted to a source of training steps."""
    return bool(sources()["training"][source].get("judged_alone", False))


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
