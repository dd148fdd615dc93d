"""Files with results: what cannot be written where it was wanted is kept elsewhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from unisono.errors import BadArgument


def write_or_keep(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a file.

    If that fails, it writes one among the temporary files, and BadArgument says where.
    """
    try:
        write(path)
    except OSError as why:
        problem = f"{path}: cannot be written: {why.strerror or why}"
        raise BadArgument(f"{problem}; {_kept(path, write)}") from why


def _kept(path: Path, write: Callable[[Path], object]) -> str:
    stem, dot, suffixes = path.name.partition(".")
    try:
        number, name = tempfile.mkstemp(dot + suffixes, f"unisono-{stem}-")
        os.close(number)
        write(Path(name))
    except OSError as why:
        where = tempfile.gettempdir()
        return f"nor could it be kept in {where}: {why.strerror or why}"
    return f"the result is in {name}"
