"""The table that `unisono tune` makes: read by rank 0, agreed by all, used by `select`.

A table belongs to a machine and a version. It has worlds (numbers of ranks, placed on
hosts), and for each collective in them the fastest algorithm at each size, with its
time. Only rank 0 reads a file. Whether there is one is part of the rendezvous messages;
the table itself is sent only if there is one. So all ranks have the same table, or
none, and starting without a table costs nothing.

A table that does not fit is refused as a whole, with one warning: another machine on
any rank, another version, a file that others can write, unknown names. Then all choose
as without a table.

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
"""A larger file is not a tuned table."""
MOST_AGREED = 64 << 10
"""The most bytes that rank 0 broadcasts; worlds that do not fit are left out."""

_LOG = logging.getLogger("unisono")


class TunedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest algorithm at one size, valid up to another; times in seconds."""

    nbytes: int
    upto: int
    algorithm: str
    predicted: float
    measured: float
    runner_up: str = ""
    runner_up_predicted: float = 0.0
    runner_up_measured: float = 0.0


class TunedCollective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one collective, by size; `itemsize` is 0 without a reduction."""

    collective: str
    itemsize: int
    rows: tuple[TunedRow, ...]


class TunedLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear fit for a class of links and a range of sizes.

    The errors are half the width of a 95 % confidence interval.
    """

    kind: str
    from_bytes: int
    upto_bytes: int
    latency: float
    latency_error: float
    byte: float
    byte_error: float


class TunedWorld(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of ranks, their placement and machines, and the measurements there."""

    n: int
    placement: str
    machines: tuple[str, ...]
    choices: tuple[TunedCollective, ...]
    links: tuple[TunedLink, ...] = ()
    added_byte: float = 0.0
    added_byte_error: float = 0.0
    when: str = ""


class TunedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file: worlds whose rank 0 is on this machine."""

    unisono: str
    machine: str
    worlds: tuple[TunedWorld, ...]


class Tuned:
    """A table with an index by call, for the selector."""

    def __init__(self, worlds: Sequence[TunedWorld], origin: str = "") -> None:
        """`origin` is its file, for `explain`."""
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
    ) -> TunedRow | None:
        """The row for a call, or None.

        For reductions only rows measured with elements of the same size count.
        """
        if not COLLECTIVES[collective].reduces:
            itemsize = 0
        key = n, placement_of(n, hosts), collective, itemsize
        rows = self._rows.get(key)
        if not rows:
            return None
        return rows[min(bisect_left(self._ends[key], nbytes), len(rows) - 1)]


def placement_of(n: int, hosts: Sequence[int] | None) -> str:
    """A placement as text: "0x4", or "0x2.1x2" on two hosts."""
    return written(numbered(hosts)) if hosts else f"0x{n}" if n > 1 else "0"


@cache
def machine() -> str:
    """A description of this machine: equal ones are taken for the same kind."""
    from unisono.topology.detect import model  # imported only with a table

    cores = os.cpu_count() or 1
    kind = model() or "unknown processor"
    return f"{kind}, {cores} core{'s' if cores > 1 else ''}, {platform.machine()}"


def default_path() -> Path:
    """The default path of this machine's table."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    digest = hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-")[:40].strip("-")
    return Path(home) / "unisono" / "tuned" / f"{name}-{digest}.json"


def path() -> Path | None:
    """The file to read, whether it exists or not; None if UNISONO_TUNED=0."""
    value = os.environ.get(VARIABLE, "")
    if value == "0":
        return None
    return Path(value) if value else default_path()


def is_there() -> bool:
    """Whether there is a file to read; cheap if there is none."""
    value = os.environ.get(VARIABLE, "")
    if value:
        return value != "0"
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not os.path.isdir(os.path.join(home, "unisono", "tuned")):
        return False
    return default_path().exists()


def read(where: Path) -> TunedTable:
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
        found = msgspec.json.decode(data, type=TunedTable)
    except msgspec.MsgspecError as why:
        raise BadArgument(f"{where}: not a tuned table: {why}") from why
    _check(found, str(where))
    return found


def _refuse_if_not_ours(where: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise BadArgument(f"{where}: not a plain file")
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
        raise BadArgument(
            f"{where}: other users can write it; expected a file that only this user "
            "may write (chmod 600)"
        )


def _check(table: TunedTable, where: str) -> None:
    """Raise BadArgument if anything in the table is invalid."""
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


def _check_row(where: str, n: int, collective: str, row: TunedRow) -> None:
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
    """Refuse algorithms in files: a table must not cause code to run."""
    if ".py" in name:  # an algorithm in a file, which would be run
        raise BadArgument("only algorithms that are installed can be in a table")
    make_schedule(collective, name, n)


def refusal(table: TunedTable, mine: str, version: str) -> str:
    """Why a table is not for this machine or version; "" if it is."""
    if table.unisono != version:
        return f"it was made by unisono {table.unisono}, this is {version}"
    if table.machine != mine:
        return f"it was made on another machine ({table.machine}), this is {mine}"
    return ""


def load(where: Path) -> TunedTable:
    """The table in a file; BadArgument if it is of another machine or version."""
    table = read(where)
    why = refusal(table, machine(), unisono.__version__)
    if why:
        raise BadArgument(f"{where}: {why}; `unisono tune` makes a new one")
    return table


def tuned_here() -> Tuned | None:
    """The table that rank 0 would use on this machine now."""
    where = path()
    if where is None or not is_there():
        return None
    return Tuned(load(where).worlds, str(where))


@cache
def warn_unused(what: str) -> None:
    """Warn once why the table is not used."""
    _LOG.warning("the tuned table is not used: %s", what)
