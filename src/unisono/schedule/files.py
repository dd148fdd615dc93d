"""Schedules in files: JSON for people, npz for machines.

Both hold the contract and every transfer. A file is only data: reading one proves
nothing, so `load` verifies what it read unless verify=False.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unisono.errors import BadArgument
from unisono.schedule.collective import Ints, collective
from unisono.schedule.schedule import Schedule, from_steps
from unisono.schedule.step import Step

FORMAT = "unisono.schedule/1"

_MALFORMED = (
    msgspec.MsgspecError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _Head(msgspec.Struct, kw_only=True):
    """What both kinds of file hold besides the transfers."""

    format: str
    collective: str
    algorithm: str
    n: int
    num_chunks: int
    root: int = 0
    num_temporaries: int = 0
    phases: list[str] = []


class _Document(_Head, kw_only=True):
    """The JSON file; other keys, such as those of `explain --json`, are passed over."""

    steps: list[list[tuple[Any, ...]]]


def as_dict(schedule: Schedule) -> dict[str, object]:
    """The schedule as plain data: a list of steps, each a list of transfers.

    A transfer is [src, dst, chunk, "copy" or "reduce"], and has a fifth entry, the name
    it is delivered under, only where that is another.
    """
    steps = list(schedule)
    head: dict[str, object] = msgspec.to_builtins(_head(schedule, steps))
    return head | {"steps": [_rows(step) for step in steps]}


def _head(schedule: Schedule, steps: list[Step]) -> _Head:
    return _Head(
        format=FORMAT,
        collective=schedule.collective.name,
        algorithm=schedule.name,
        n=schedule.n,
        num_chunks=schedule.num_chunks,
        root=schedule.root,
        num_temporaries=schedule.num_temporaries,
        phases=[step.phase for step in steps],
    )


def _rows(step: Step) -> list[list[int | str]]:
    return [
        [t.src, t.dst, t.chunk, t.kind, *([t.into] if t.into != t.chunk else [])]
        for t in step
    ]


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the schedule to a .json or .npz file."""
    target = Path(path)
    if not target.parent.is_dir():
        raise BadArgument(f"{target}: there is no such folder")
    if target.suffix == ".json":
        target.write_bytes(
            msgspec.json.format(msgspec.json.encode(as_dict(schedule)), indent=0)
        )
    elif target.suffix == ".npz":
        _save_npz(schedule, target)
    else:
        raise BadArgument(f"{target}: a schedule is saved as .json or .npz")


def load(path: str | os.PathLike[str], *, verify: bool = True) -> Schedule:
    """Read a schedule from a .json or .npz file, and verify it."""
    source = Path(path)
    readers = {".json": _load_json, ".npz": _load_npz}
    if source.suffix not in readers:
        raise BadArgument(f"{source}: a schedule is read from .json or .npz")
    try:
        schedule = readers[source.suffix](source)
    except _MALFORMED as why:
        raise BadArgument(f"{source}: not a schedule: {why}") from why
    if verify:
        schedule.verify()
    return schedule


def _load_json(path: Path) -> Schedule:
    read = msgspec.json.decode(path.read_bytes(), type=_Document)
    return _schedule(read, [_step_of(rows) for rows in read.steps])


def _step_of(rows: list[tuple[Any, ...]]) -> Step:
    columns: list[list[int]] = [[], [], [], [], []]
    for row in rows:
        src, dst, chunk, kind, *into = row
        if kind not in ("copy", "reduce") or len(into) > 1:
            raise ValueError(f"transfer {list(row)}: expected [src, dst, chunk, kind]")
        values = (src, dst, chunk, into[0] if into else chunk, kind == "reduce")
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if any(type(value) is not int for value in values[:4]):
            raise ValueError(f"transfer {list(row)}: expected whole numbers")
    return _step(*(np.array(c, dtype=np.int64) for c in columns))


def _step(src: Ints, dst: Ints, chunk: Ints, into: Ints, reduces: Ints) -> Step:
    same = bool((into == chunk).all())
    return Step(src, dst, chunk, chunk if same else into, reduces.astype(bool))


def _schedule(head: _Head, steps: list[Step]) -> Schedule:
    if head.format != FORMAT:
        raise ValueError(f"format is {head.format!r}, expected {FORMAT!r}")
    if not all(text.isprintable() for text in (head.algorithm, *head.phases)):
        raise ValueError("names must be printable")
    named = zip(steps, head.phases, strict=False)
    labelled = [step.named(name) for step, name in named] + steps[len(head.phases) :]
    return from_steps(
        collective(head.collective),
        head.n,
        labelled,
        num_chunks=head.num_chunks,
        num_temporaries=head.num_temporaries,
        name=head.algorithm,
        root=head.root,
    )


def _save_npz(schedule: Schedule, path: Path) -> None:
    steps = list(schedule)
    flat = [step.flat() for step in steps]
    columns = {
        name: np.concatenate([row[k] for row in flat])
        if flat
        else np.empty(0, dtype=np.int64)
        for k, name in enumerate(("src", "dst", "chunk", "reduces", "into"))
    }
    lengths = np.array([len(step) for step in steps], dtype=np.int64)
    text = np.frombuffer(msgspec.json.encode(_head(schedule, steps)), dtype=np.uint8)
    np.savez_compressed(path, head=text, lengths=lengths, **columns)  # type: ignore[arg-type]


def _whole_numbers(data: Any, name: str) -> Ints:
    """One column of an npz file, if it is one of whole numbers or truth values."""
    column = data[name]
    if column.ndim != 1 or column.dtype.kind not in "iub" or column.dtype == np.uint64:
        raise ValueError(f"{name} is not a row of whole numbers")
    whole: Ints = column.astype(np.int64)
    return whole


def _load_npz(path: Path) -> Schedule:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        head = msgspec.json.decode(data["head"].tobytes(), type=_Head)
        lengths = _whole_numbers(data, "lengths")
        names = ("src", "dst", "chunk", "into", "reduces")
        columns = [_whole_numbers(data, name) for name in names]
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or any(c.size != lengths.sum() for c in columns):
        raise ValueError("its columns have different lengths")
    if not np.isin(columns[4], (0, 1)).all():
        raise ValueError("reduces is neither true nor false")
    parts = [np.split(c, ends[:-1]) if ends.size else [] for c in columns]
    steps = [_step(*row) for row in zip(*parts, strict=True)]
    return _schedule(head, steps)
