"""The command line: one file per verb, each a plain function of the same name.

Exit codes: 0 success, 1 the answer is no (a schedule was proven wrong, a model does not
fit into the memory), 2 the command was invalid, 70 a bug of unisono, 130 Ctrl-C. Errors
are one line; a traceback on screen is a bug of unisono.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from unisono.cli import _ascii
from unisono.errors import MissingExtra, ScheduleError, UnisonoError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _prepare_output()
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except ScheduleError as wrong:
        return _complain(wrong, 1)
    except (UnisonoError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, `head` perhaps, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _complain(error, 2)
    except (MemoryError, OverflowError) as error:
        return _complain(f"too large for this machine: {error}", 2)
    except KeyboardInterrupt:
        return 130
    except Exception as bug:
        if os.environ.get("UNISONO_DEBUG"):
            raise
        message = f"{type(bug).__name__}: {bug}"
        hint = "this is a bug of unisono; UNISONO_DEBUG=1 shows where"
        return _complain(f"internal error, {message} ({hint})", 70)


def _prepare_output() -> None:
    """A terminal that lacks our signs shows plain letters; a closed one, nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ascii.NAME)


def _run(arguments: list[str]) -> int:
    try:
        from unisono.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name not in ("cyclopts", "rich"):
            raise
        raise MissingExtra("cli", "the command line") from missing
    code = run(arguments)
    sys.stdout.flush()
    return code


def _complain(error: object, code: int) -> int:
    sys.stdout.flush()
    message = " ".join(str(error).split())
    print(f"unisono: {message}", file=sys.stderr)
    return code
