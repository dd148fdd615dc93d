"""`unisono secret`: a new secret for a job on several hosts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from unisono.cli.output import print_json
from unisono.errors import BadArgument


def secret(*, file: Path | None = None, json: bool = False) -> int:
    """Make the secret by which the ranks of one job authenticate each other.

    `unisono run` makes one by itself; elsewhere, before the job is started:
    export UNISONO_SECRET=$(unisono secret). With a file, the ranks are given its name
    in UNISONO_SECRET_FILE.

    Example: unisono secret --file ~/.unisono-secret

    Parameters
    ----------
    file
        Write it to a new file that only you may read, instead of printing it.
    json
        Print a JSON object.
    """
    made = secrets.token_hex(32)
    if file is not None:
        _write(file, made)
    if json:
        print_json({"file": str(file)} if file is not None else {"secret": made})
    elif file is None:
        print(made)
    return 0


def _write(file: Path, text: str) -> None:
    """Write a new file: the creator of an existing one could read it."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as why:
        raise BadArgument(f"{file}: cannot be made: {why.strerror}") from why
    with open(descriptor, "w") as opened:
        opened.write(text + "\n")
