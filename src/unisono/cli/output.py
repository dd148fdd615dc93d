"""What the verbs share: numbers of ranks, JSON, and a little emphasis on terminals."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from unisono.errors import BadArgument, ScheduleError
from unisono.results import write_or_keep
from unisono.units import format_row

MOST_RANKS = 1 << 20
_QUIET = 0.5
"""The load per core above which measurements are disturbed."""
_GAP = 2
_BELOW = "    "
"""Before the columns of a table that are on lines below."""


def parse_ranks(text: str) -> list[int]:
    """The numbers that "5", "1..64", "2,4,13" or a mixture means."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*\.\.\s*([0-9]{1,18}))?\s*", part)
        if not match:
            raise BadArgument(
                f"-n {text}: expected numbers of ranks, as in 5, 1..64 or 2,4,13"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if low < 1 or high < low:
            raise BadArgument(
                f"-n {text}: a world has at least one rank, and ranges ascend"
            )
        if high > MOST_RANKS:
            raise BadArgument(f"-n {text}: at most {MOST_RANKS} ranks")
        numbers.extend(range(low, high + 1))
    return numbers


def parse_world(text: str) -> int:
    """The one number of ranks that `text` is."""
    world = _number("-n", text, "one number of ranks, as in 5", digits=18)
    if world > MOST_RANKS:
        raise BadArgument(f"-n {text}: at most {MOST_RANKS} ranks")
    return world


def parse_rank(text: str) -> int:
    """The one rank that `text` is; whether there is such a rank is seen later."""
    return _number("--root", text, "one rank, as in 3", digits=9)


def _number(option: str, text: str, expected: str, *, digits: int) -> int:
    if not re.fullmatch(rf"-?[0-9]{{1,{digits}}}", text):
        raise BadArgument(f"{option} {text}: expected {expected}")
    return int(text)


def counter_example(wrong: ScheduleError) -> dict[str, object]:
    """What is wrong with a schedule, as plain data."""
    return {
        "step": wrong.step,
        "rank": wrong.rank,
        "chunk": wrong.chunk,
        "missing": wrong.missing,
        "doubled": wrong.doubled,
    }


def seconds_of(option: str, text: str, *, zero: bool = True) -> float:
    """The seconds that an option was given."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf or not (seconds or zero):
        raise BadArgument(f"{option} {text}: expected seconds, as in 2.5")
    return seconds


def print_json(thing: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.encode(thing).decode() + "\n")


def refuse_unwritable(*paths: Path | None, makes_folders: bool = False) -> None:
    """Refuse files that cannot be written, before the work whose result they get.

    `makes_folders`: whoever writes them makes the folders that are missing.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise BadArgument(f"{path}: this is a folder; name a file in it")
        folder = path.parent
        if makes_folders:
            folder = next(one for one in path.absolute().parents if one.exists())
        if not folder.is_dir():
            raise BadArgument(f"{path}: there is no folder {folder}; make it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise BadArgument(f"{path}: cannot be written: no permission")


def refuse_no_folder(option: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written to, before work begins."""
    if folder is None:
        return
    whole = folder.absolute()
    there = next(one for one in (whole, *whole.parents) if os.path.lexists(one))
    if not there.is_dir():
        raise BadArgument(f"{option} {folder}: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise BadArgument(f"{option} {folder}: cannot be written to: no permission")


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named.

    If that fails, the text is written elsewhere, and the BadArgument says where.
    """
    write_or_keep(path, lambda file: file.write_text(text, encoding="utf-8"))


def load_warning() -> str:
    """That other processes use the cores that are to be measured; empty if not."""
    busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if busy <= _QUIET * cores:
        return ""
    return (
        f"# warning: other processes run here (load {busy:.1f} on {cores} cores): "
        "times are longer and vary"
    )


def print_picture(text: str) -> None:
    """The text of a picture, with changed cells bold where the terminal allows it."""
    if _colour():
        text = re.sub(r"\[[^\s\]]+\]", lambda m: f"\x1b[1m{m[0]}\x1b[0m", text)
        text = re.sub(
            r"(?m)^(step \S+ .*|start)$", lambda m: f"\x1b[36m{m[0]}\x1b[0m", text
        )
    print(text)


def _colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()


def columns() -> int | None:
    """The width of the terminal, or COLUMNS instead; None for a file or pipe.

    There COLUMNS means nothing: libraries that edit lines set it for all processes.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_text(text: object) -> None:
    """Print lines; those that are too wide are continued below, where words begin."""
    width = columns()
    lines = str(text).split("\n")
    print("\n".join(_folded(line, width) for line in lines), flush=True)


def _folded(line: str, width: int | None) -> str:
    if width is None or len(line) <= width:
        return line
    # Below the last column that begins in the left half, or a little to the right.
    begins = [m.end() for m in re.finditer(r"\S  +(?=\S)", line[: width // 2])]
    indent = len(line) - len(line.lstrip())
    below = begins[-1] if begins else min(indent + 2, width // 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * below,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_aligned(lines: Iterable[str], ruler: str) -> None:
    """Lines whose columns end where the words of `ruler` do, as bench has them.

    If these are too wide, all of them are cut behind the same columns.
    """
    width = columns() or len(ruler)
    cuts = [0]
    for begin, end in pairwise([0, *(m.end() for m in re.finditer(r"\S+", ruler))]):
        if end - cuts[-1] > width and begin > cuts[-1]:
            cuts.append(begin)
    for line in lines:
        parts = [line[a:b].rstrip() for a, b in pairwise([*cuts, max(len(line), 1)])]
        print("\n".join(filter(None, parts)) if len(cuts) > 1 else line, flush=True)


def print_row(cells: Iterable[str], widths: Sequence[int]) -> None:
    """One line of a table; negative widths align to the right.

    If the table is too wide, the columns that do not fit are on lines below.
    """
    row = list(cells)
    for part in _parts(widths, columns()):
        indent = "" if part.start == 0 else _BELOW
        text = format_row(row[part], widths[part])
        if text.strip() or part.start == 0:
            print(indent + text, flush=True)


def _parts(widths: Sequence[int], width: int | None) -> list[slice]:
    """Which columns are on the first line of each row, the second, and so on."""
    starts, used = [0], -_GAP
    for i, needed in enumerate(map(abs, widths)):
        if width is not None and i > starts[-1] and used + _GAP + needed > width:
            starts.append(i)
            used = len(_BELOW) - _GAP
        used += _GAP + needed
    return [slice(*ends) for ends in pairwise([*starts, len(widths)])]
