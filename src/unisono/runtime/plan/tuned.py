"""What `unisono tune` has found out: read by rank 0, agreed by all, asked by `select`.

A table belongs to a machine and to a version. In it are worlds (so many ranks, placed
so), and for each collective in them the algorithm that won at each size, with what it
took. Only rank 0 reads a file. Whether there is one travels with what ranks tell each
other anyway when they meet; the table itself only if there is one. So all ranks hold
the same, or none, and starting without a table costs nothing.

Whatever does not fit is refused as a whole and said aloud once: another machine on any
rank, another version, a file that others can write, names that nobody bears. Then all
choose as if there were no table.

    UNISONO_TUNED=FILE   that file;  =0   none;  otherwise ~/.config/unisono/tuned/
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import re
import stat
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

import unisono
from unisono.algorithms import schedule as make_schedule
from unisono.errors import BadArgument, UsageError
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.placement import numbered, parse_hosts, written

VARIABLE = "UNISONO_TUNED"
MOST_BYTES = 4 << 20
"""A larger file is not one of ours."""
MOST_AGREED = 64 << 10
"""What rank 0 tells the others at most: worlds larger than this one stay at home."""

_LOG = logging.getLogger("unisono")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who won at one size, and for which sizes that holds; times in seconds."""

    nbytes: int
    upto: int
    algorithm: str
    predicted: float
    measured: float
    runner_up: str = ""
    runner_up_predicted: float = 0.0
    runner_up_measured: float = 0.0


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one collective, by size; `itemsize` is 0 where nothing is added."""

    collective: str
    itemsize: int
    rows: tuple[Row, ...]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was fitted for a class of links: a straight line for a range of sizes.

    The errors are half the width of an interval that holds the value 95 times in 100.
    """

    kind: str
    from_bytes: int
    upto_bytes: int
    latency: float
    latency_error: float
    byte: float
    byte_error: float


class TunedWorld(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many ranks, placed so, on these machines; and what was found there."""

    n: int
    placement: str
    machines: tuple[str, ...]
    choices: tuple[Part, ...]
    links: tuple[Link, ...] = ()
    added_byte: float = 0.0
    added_byte_error: float = 0.0
    when: str = ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: what is known of worlds whose rank 0 is on this machine."""

    unisono: str
    machine: str
    worlds: tuple[TunedWorld, ...]


class Tuned:
    """A table as the selector asks it."""

    def __init__(self, worlds: Sequence[TunedWorld], origin: str = "") -> None:
        """`origin` tells where it comes from, for `explain`."""
        self.worlds = tuple(worlds)
        self.origin = origin
        self._rows = {
            (w.n, w.placement, part.collective, part.itemsize): part.rows
            for w in worlds
            for part in w.choices
        }
        self._ends = {
            key: [row.upto for row in rows] for key, rows in self._rows.items()
        }

    def row(
        self,
        collective: str,
        nbytes: int,
        n: int,
        hosts: Sequence[int] | None,
        itemsize: int,
    ) -> Row | None:
        """What is known of a call; None if nothing is.

        Where elements are added up, only what was measured with elements of their size
        counts.
        """
        if not COLLECTIVES[collective].reduces:
            itemsize = 0
        key = n, placement_of(n, hosts), collective, itemsize
        rows = self._rows.get(key)
        if not rows:
            return None
        return rows[min(bisect_left(self._ends[key], nbytes), len(rows) - 1)]


def placement_of(n: int, hosts: Sequence[int] | None) -> str:
    """A placement as it is written in tables: "0x4", or "0x2.1x2" on two hosts."""
    return written(numbered(hosts)) if hosts else f"0x{n}" if n > 1 else "0"


@cache
def machine() -> str:
    """This machine in words that two have in common only if they are alike."""
    from unisono.topology.detect import model  # no start pays for it without a table

    cores = os.cpu_count() or 1
    kind = model() or "unknown processor"
    return f"{kind}, {cores} core{'s' if cores > 1 else ''}, {platform.machine()}"


def default_path() -> Path:
    """Where the table of this machine is kept."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    digest = hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-")[:40].strip("-")
    return Path(home) / "unisono" / "tuned" / f"{name}-{digest}.json"


def path() -> Path | None:
    """The file to read, whether it is there or not; None if none is wanted."""
    told = os.environ.get(VARIABLE, "")
    if told == "0":
        return None
    return Path(told) if told else default_path()


def is_there() -> bool:
    """Whether this process has a file to read: all it costs if there is none."""
    told = os.environ.get(VARIABLE, "")
    if told:
        return told != "0"
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not os.path.isdir(os.path.join(home, "unisono", "tuned")):
        return False
    return default_path().exists()


def read(where: Path) -> Table:
    """The table in a file; BadArgument says what is wrong with it."""
    try:
        with where.open("rb") as file:
            about = os.fstat(file.fileno())
            _refuse_if_not_ours(where, about)
            data = file.read(MOST_BYTES + 1)
    except OSError as why:
        raise BadArgument(f"{where}: cannot be read: {why.strerror}") from why
    if len(data) > MOST_BYTES:
        raise BadArgument(f"{where}: more than {MOST_BYTES} bytes: not a tuned table")
    try:
        found = msgspec.json.decode(data, type=Table)
    except msgspec.MsgspecError as why:
        raise BadArgument(f"{where}: not a tuned table: {why}") from why
    _check(found, str(where))
    return found


def _refuse_if_not_ours(where: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise BadArgument(f"{where}: not a plain file")
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
        raise BadArgument(
            f"{where}: somebody else could have written it; expected a file of this "
            "user that nobody else may write (chmod 600)"
        )


def _check(table: Table, where: str) -> None:
    """Refuse what cannot be asked, before anybody asks."""
    for world in table.worlds:
        try:
            parse_hosts(world.placement, world.n)
        except UsageError as why:
            raise BadArgument(f"{where}: {why}") from why
        for part in world.choices:
            if part.collective not in COLLECTIVES:
                raise BadArgument(f"{where}: no collective {part.collective!r}")
            ends = [row.upto for row in part.rows]
            if not ends or sorted(set(ends)) != ends or ends[0] < 0:
                raise BadArgument(f"{where}: {part.collective}: sizes do not ascend")
            for row in part.rows:
                _check_row(where, world.n, part.collective, row)


def _check_row(where: str, n: int, collective: str, row: Row) -> None:
    times = row.predicted, row.measured, row.runner_up_predicted, row.runner_up_measured
    if not all(0 <= t < math.inf for t in times):
        raise BadArgument(f"{where}: {collective}: {times} are not all times")
    for name in filter(None, (row.algorithm, row.runner_up)):
        try:
            _check_name(collective, name, n)
        except UsageError as why:
            raise BadArgument(f"{where}: {collective} by {name!r}: {why}") from why


@cache
def _check_name(collective: str, name: str, n: int) -> None:
    """Only algorithms that are installed: a table must not bring code of its own."""
    if ".py" in name:  # how a user names a file, which would then be run
        raise BadArgument("only algorithms that are installed can be in a table")
    make_schedule(collective, name, n)


def refusal(table: Table, mine: str, version: str) -> str:
    """Why a table is not for this machine or version; "" if it is."""
    if table.unisono != version:
        return f"it was made by unisono {table.unisono}, and this is {version}"
    if table.machine != mine:
        return f"it was made on another machine ({table.machine}), this is {mine}"
    return ""


def load(where: Path) -> Table:
    """The table in a file, if it is of this machine and version; else BadArgument."""
    table = read(where)
    why = refusal(table, machine(), unisono.__version__)
    if why:
        raise BadArgument(f"{where}: {why}; `unisono tune` makes a new one")
    return table


def tuned_here() -> Tuned | None:
    """What rank 0 would use, if it started on this machine now."""
    where = path()
    if where is None or not is_there():
        return None
    return Tuned(load(where).worlds, str(where))


@cache
def warn_unused(what: str) -> None:
    """Say once why the table is not used."""
    _LOG.warning("the tuned table is not used: %s", what)
