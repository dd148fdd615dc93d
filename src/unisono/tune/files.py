"""The table on disk: JSON, private to this user, replaced atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

import unisono
from unisono.errors import BadArgument
from unisono.results import write_or_keep
from unisono.runtime.plan.tuned import (
    TunedTable,
    TunedWorld,
    default_path,
    machine,
    path,
    read,
)


def destination() -> Path:
    """The path of a new table: where it would be read from.

    A file that the user has named and that is no table is left alone, and refused here:
    before anything is measured.
    """
    file = path() or default_path()
    if file.exists() and file != default_path():
        read(file)
    return file


def save(world: TunedWorld, where: Path | None = None) -> Path:
    """Put a world into this machine's table, in the place of what was known of it.

    A table of another version or machine is replaced: it would not be used. One that
    cannot be written is kept elsewhere, and BadArgument says where.
    """
    file = where or destination()
    others: list[TunedWorld] = []
    if file.exists():
        others = _others(file, world)
    worlds = sorted([*others, world], key=lambda w: (w.n, w.placement))
    table = TunedTable(unisono.__version__, machine(), tuple(worlds))
    text = msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"
    write_or_keep(file, lambda there: _write(there, text))
    return file


def _others(file: Path, world: TunedWorld) -> list[TunedWorld]:
    try:
        known = read(file)
    except BadArgument:
        if file != default_path():
            raise
        return []  # our own file, damaged: it could not be used either
    if (known.unisono, known.machine) != (unisono.__version__, machine()):
        return []
    this = world.n, world.placement
    return [w for w in known.worlds if (w.n, w.placement) != this]


def _write(file: Path, text: bytes) -> None:
    """Replace the file atomically: a concurrent reader finds the old one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(number, "wb") as made:  # mkstemp makes it 0600
            made.write(text)
            made.flush()
            os.fsync(made.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
