"""The command line: one file per verb, each a plain function of the same name.

Exit codes: 0 all is well, 1 a schedule was proven wrong, 2 the command was, 130 Ctrl-C.
Errors are one line; a traceback on screen is a bug of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from unisono.errors import MissingExtra, ScheduleError, UnisonoError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except ScheduleError as wrong:
        return _complain(wrong, 1)
    except (UnisonoError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, `head` perhaps, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _complain(error, 2)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    try:
        from unisono.cli.app import run
    except ModuleNotFoundError as missing:
        raise MissingExtra("cli", "the command line") from missing
    code = run(arguments)
    sys.stdout.flush()
    return code


def _complain(error: BaseException, code: int) -> int:
    sys.stdout.flush()
    message = " ".join(str(error).split())
    print(f"unisono: {message}", file=sys.stderr)
    return code
