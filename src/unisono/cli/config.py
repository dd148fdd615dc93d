"""`unisono config`: the saved options of `unisono run`, and what is in force.

Nothing is written but by `unisono config save`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Argument, Parameter

from unisono.cli import _saved
from unisono.cli import run as run_verb
from unisono.cli._run_options import VARIABLES, RunOptions
from unisono.cli._saved import FILE, SavedOptions
from unisono.cli.output import (
    print_json,
    print_row,
    print_text,
    refuse_unwritable,
    write_file,
)
from unisono.errors import BadArgument
from unisono.runtime.observe.recorder import MONITOR

_Words = Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)]
_REPLACE = "--replace"


def config(*words: _Words) -> int:
    """Show the options of unisono run that are in force here, and where each is from.

    An option that is typed comes first, then the environment, then the file
    unisono.toml in the current folder, then the default. The file is written by
    unisono config save, or by hand, and by nobody else. --json prints one JSON object,
    --config FILE reads another file, --no-config none.

    Example: unisono config

    Parameters
    ----------
    words
        Options of unisono run (see unisono run --help), as they would be typed there.
    """
    saved = SavedOptions()
    given = _parsed(words, saved)
    options: RunOptions = given.get("options", RunOptions())
    arguments = _saved.savable(run_verb.arguments())
    shown = {
        key: {
            "value": _value(options, argument),
            "from": saved.origins[argument.field_info.name],
        }
        for key, argument in arguments.items()
    }
    settings = _settings(options, saved)
    unused = {
        key: " ".join(saved.unused[argument.field_info.name])
        for key, argument in arguments.items()
        if argument.field_info.name in saved.unused
    }
    if given.get("json"):
        file = None if saved.file is None else str(saved.file)
        parts = {"options": shown, "settings": settings, "unused": unused}
        print_json({"file": file, **parts})
        return 0
    print(f"file: {saved.file or f'no {FILE} in this folder'}\n")
    _table("option", {f"--{key}": row for key, row in shown.items()})
    print()
    _table("variable", settings)
    if unused:
        left = ", ".join(f"--{key} {value}" for key, value in unused.items())
        print_text(f"\nin the file, but overruled or not applicable here: {left}")
    return 0


def save(*words: _Words) -> int:
    """Write options of unisono run to unisono.toml, for every run in this folder.

    They are checked as unisono run checks them. --config FILE writes another file,
    --replace one that is there already; --json prints one JSON object.

    Example: unisono config save -n 4 --log-dir logs

    Parameters
    ----------
    words
        Options of unisono run (see unisono run --help), as they would be typed there.
    """
    alone = SavedOptions(read=False)
    given = _parsed([word for word in words if word != _REPLACE], alone)
    options: RunOptions = given.get("options", RunOptions())
    path = given.get("config") or FILE
    kept = {
        key: _saved.as_saved(argument, getattr(options, argument.field_info.name))
        for key, argument in _saved.savable(run_verb.arguments()).items()
        if alone.origins[argument.field_info.name] == "option"
    }
    if alone.origins["node_rank"] == "option":
        raise BadArgument("--node-rank: not saved, for it differs from host to host")
    if not kept:
        raise BadArgument(
            "nothing to save: give options of unisono run, as in "
            "unisono config save -n 4 --log-dir logs"
        )
    if why := _saved.secret_among(options.env or []):
        raise BadArgument(why)
    options.plan()
    options.way()
    if os.path.lexists(path) and _REPLACE not in words:
        raise BadArgument(f"{path}: is there already; edit it, or give {_REPLACE}")
    refuse_unwritable(path)
    write_file(path, _saved.document(kept))
    if given.get("json"):
        print_json({"file": str(path), "run": kept})
    else:
        how = "" if path == FILE else f" --config {path}"
        print(f"wrote {path}: `unisono run{how}` takes these options from it")
    return 0


def _parsed(words: Sequence[str], saved: SavedOptions) -> dict[str, Any]:
    given = run_verb.parse(words, saved)
    script = given.get("module") or " ".join(given.get("command", ()))
    if script:
        raise BadArgument(
            f"{script}: not an option of unisono run; a script is not saved, it is "
            "named when it is run"
        )
    return given


def _value(options: RunOptions, argument: Argument) -> object:
    """The value in force, as a file would have it; None if there is none."""
    name = argument.field_info.name
    value = getattr(options, name)
    if value is None or value == "":
        value = os.environ.get(VARIABLES.get(name, "")) or None
    return None if value is None else _saved.as_saved(argument, value)


def _settings(options: RunOptions, saved: SavedOptions) -> dict[str, dict[str, object]]:
    """The variables of unisono that ranks would get, and where each is from."""
    by_options = options.plan().environment
    here = {name: value for name, value in os.environ.items() if name not in by_options}
    origins = {MONITOR: "default"}
    origins |= {variable: saved.origins[name] for name, variable in VARIABLES.items()}
    origins |= saved.variables | dict.fromkeys(here, "environment")
    return {
        name: {
            "value": "(is set)" if name == "UNISONO_SECRET" else value,
            "from": origins[name],
        }
        for name, value in sorted((here | by_options).items())
        if name.startswith("UNISONO_")
    }


def _table(head: str, rows: dict[str, dict[str, object]]) -> None:
    cells = [(head, "value", "from")]
    for name, row in rows.items():
        value = row["value"]
        if value is None or value is False:
            continue
        text = " ".join(value) if isinstance(value, list) else str(value)
        cells.append((name, "yes" if value is True else text, str(row["from"])))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row_cells in cells:
        print_row(row_cells, widths)


BELOW = (save,)
