"""The saved options of `unisono run`: the file unisono.toml in the current folder.

    [run]
    ranks = 4
    log-dir = "logs"
    env = ["OMP_NUM_THREADS=2"]

A key is the long name of an option. What it says holds as if it were typed before all
other options: an option that is typed comes first, then the environment, then the file.
The options themselves are those of `RunOptions`; there is no other list of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from cyclopts import App, Argument, ArgumentCollection, Token

from unisono.cli._hosts import FOR_HOSTS
from unisono.cli._run_options import VARIABLES, RunOptions
from unisono.cli._spellings import our_spelling
from unisono.errors import BadArgument, unknown

FILE = Path("unisono.toml")
HEAD = (
    "# Options of `unisono run` in this folder; those that are typed come first.\n"
    "# `unisono config` shows what is in force.\n"
)
_TABLE = "run"
_NOT_SAVED = {"node_rank": "it differs from host to host"}
_ONE_OF = ({"n", "np"}, {"hosts", "hostfile", "nnodes"})
"""Of these one is given; if it is typed, the others of the file do not hold."""
_SECRETS = re.compile(r"UNISONO_SECRET(_FD)?")


class SavedOptions:
    """Completes the options of a command line by those of a file; cyclopts calls it.

    Afterwards `file` is the file that was read, `origins` says of each option (by the
    name of its field) where its value is from, `variables` the same of each that `env`
    has, and `unused` are options of the file that do not hold. With `read` false no
    file is read.
    """

    def __init__(
        self, tell: Callable[[str], object] = str, *, read: bool = True
    ) -> None:
        self.file: Path | None = None
        self.origins: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.unused: dict[str, list[str]] = {}
        self._tell = tell
        self._read = read

    def __call__(
        self, app: App, commands: Sequence[str], arguments: ArgumentCollection
    ) -> None:
        """Append what the file says to arguments that were not given."""
        typed = {a.field_info.name for a in arguments if a.tokens}
        self.origins = {
            field.name: _origin(field.name, typed) for field in fields(RunOptions)
        }
        named = [
            token.value
            for argument in arguments
            if argument.field_info.name == "config"
            for token in argument.tokens
        ]
        if "no_config" in typed:
            if named:
                raise BadArgument("--config and --no-config: give one of them")
            return
        if not self._read:
            return
        path = Path(named[0]) if named else FILE
        text = _text(path, named=bool(named))
        if text is None:
            return
        self.file = path
        saved = parse(text, path, arguments)
        for name in _not_in_force(self.origins, saved):
            self.unused[name] = saved.pop(name)
        for argument in arguments:
            self._fill(argument, saved)
        self._tell(f"options from {path}: {self._words(arguments) or 'none'}")

    def _fill(self, argument: Argument, saved: Mapping[str, list[str]]) -> None:
        name = argument.field_info.name
        values = saved.get(name, [])
        if name == "env":
            values = self._unset(values, [token.value for token in argument.tokens])
        for value in values:
            argument.tokens.append(
                Token(
                    keyword=option_of(argument),
                    value=value,
                    source=str(self.file),
                    index=len(argument.tokens) if name == "env" else 0,
                )
            )
        if values and self.origins[name] == "default":
            self.origins[name] = "file"

    def _unset(self, values: Iterable[str], typed: Iterable[str]) -> list[str]:
        """The variables of the file that are not typed; those set here keep that."""
        self.variables = {variable_of(text): "option" for text in typed}
        left = []
        for text in values:
            variable = variable_of(text)
            if self.variables.get(variable) == "option":
                continue
            is_set = variable in os.environ
            self.variables[variable] = "environment" if is_set else "file"
            left.append(variable if is_set else text)
        return left

    def _words(self, arguments: ArgumentCollection) -> str:
        """The options that were taken; of variables the names, for logs are read."""
        words = []
        for argument in arguments:
            option = option_of(argument)
            for token in argument.tokens:
                if token.source != str(self.file):
                    continue
                if argument.hint is bool:
                    words.append(option if token.value == "true" else f"{option}=false")
                    continue
                in_env = argument.field_info.name == "env"
                value = variable_of(token.value) if in_env else token.value
                words.append(f"{option} {shlex.quote(value)}")
        return " ".join(words)


def _origin(name: str, typed: set[str]) -> str:
    if name in typed:
        return "option"
    return "environment" if os.environ.get(VARIABLES.get(name, "")) else "default"


def variable_of(text: str) -> str:
    """The name in NAME or NAME=value."""
    return text.partition("=")[0]


def _not_in_force(
    origins: Mapping[str, str], saved: Mapping[str, list[str]]
) -> list[str]:
    """Options of the file that others overrule, or that do not apply beside them."""
    typed = {name for name, origin in origins.items() if origin == "option"}
    out = {name for name, origin in origins.items() if origin != "default"} - {"env"}
    for group in _ONE_OF:
        if group & typed:
            out |= group
    if not {"hosts", "hostfile"} & (typed | (set(saved) - out)):
        out |= set(FOR_HOSTS)
    return [name for name in saved if name in out]


def option_of(argument: Argument) -> str:
    """The long name of an option, with its dashes."""
    return next((n for n in argument.names if n.startswith("--")), argument.name)


def savable(arguments: Iterable[Argument]) -> dict[str, Argument]:
    """The options that a file may have, by their keys."""
    names = {field.name for field in fields(RunOptions)} - set(_NOT_SAVED)
    return {
        option_of(argument)[2:]: argument
        for argument in arguments
        if argument.field_info.name in names
    }


def _text(path: Path, *, named: bool) -> str | None:
    """What is in the file; None if it need not be there and is not."""
    if not named and not os.path.lexists(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadArgument(f"{path}: this is no file; {_OTHERWISE}")
            if not named:
                _refuse_foreign(path, found)
            return file.read().decode()
    except OSError as why:
        hint = "unisono config save writes one" if named else _OTHERWISE
        raise BadArgument(f"{path}: cannot be read: {why.strerror}; {hint}") from why
    except UnicodeDecodeError as why:
        raise BadArgument(f"{path}: cannot be read: not UTF-8 ({why.reason})") from why


_OTHERWISE = "--no-config runs without it"


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    """Raise BadArgument if others may have written what would run as this user."""
    wrong = ""
    if found.st_uid not in (0, os.geteuid()):
        wrong = f"it belongs to user {found.st_uid}"
    elif found.st_mode & stat.S_IWOTH:
        wrong = f"everybody can write to it (mode {stat.S_IMODE(found.st_mode):o})"
    if wrong:
        raise BadArgument(
            f"{path}: not read without being named, for {wrong}; look at it, then "
            f"give --config {path}, or --no-config"
        )


def parse(text: str, path: Path, arguments: Iterable[Argument]) -> dict[str, list[str]]:
    """The options in a file: by name of the field, as they would be typed."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as why:
        raise BadArgument(f"{path}: not a TOML file: {why}") from why
    known = savable(arguments)
    for key in document:
        if key != _TABLE:
            raise _wrong(path, text, key, _not_a_table(key, known))
    table = document.get(_TABLE, {})
    if not isinstance(table, dict):
        raise _wrong(path, text, _TABLE, f"expected a table, [{_TABLE}]")
    found = {}
    for key, value in table.items():
        argument = known.get(key)
        if argument is None:
            raise _wrong(path, text, key, _not_an_option(key, known))
        words = _as_typed(argument, value)
        if words is None:
            expected = f"{key} = {_shown(value)}: expected {_expected(argument)}"
            raise _wrong(path, text, key, expected)
        if argument.field_info.name == "env" and (secret := secret_among(words)):
            raise _wrong(path, text, key, secret)
        found[argument.field_info.name] = words
    return found


def secret_among(variables: Iterable[str]) -> str:
    """That a variable is not for this file, in words; empty if none is so."""
    for name in map(variable_of, variables):
        if _SECRETS.fullmatch(name):
            return (
                f"{name}: a secret is not saved here; keep it in the environment, or "
                "in a file of its own (unisono secret --file)"
            )
    return ""


def _wrong(path: Path, text: str, key: str, message: str) -> BadArgument:
    """The error for a key, with the line that it is on."""
    pattern = rf"^\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]"
    found = re.search(pattern, text, re.MULTILINE)
    line = f":{text.count(chr(10), 0, found.end()) + 1}" if found else ""
    return BadArgument(f"{path}{line}: {message}")


def _not_a_table(key: str, known: Mapping[str, Argument]) -> str:
    if key in known:
        return f"{key}: expected below a line [{_TABLE}]"
    return str(unknown("table", key, [_TABLE]))


def _not_an_option(key: str, known: Mapping[str, Argument]) -> str:
    """What is wrong with a key: another spelling, not for files, or unknown."""
    try:
        option = our_spelling(("-" if len(key) == 1 else "--") + key)
    except BadArgument as instead:
        return str(instead)
    for right, argument in known.items():
        if option in argument.names:
            return f"{key}: spelled {right} in this file"
    field = option.lstrip("-").replace("-", "_")
    if field in _NOT_SAVED:
        return f"{key}: not for a file, for {_NOT_SAVED[field]}"
    return str(unknown("option", key, known))


def _kinds(argument: Argument) -> set[object]:
    kinds = get_args(argument.hint) if NoneType in get_args(argument.hint) else ()
    return {get_origin(kind) or kind for kind in kinds or (argument.hint,)}


def _is_number(argument: Argument) -> bool:
    """Whether it is a number, though options have it as text; it is checked later."""
    return bool(argument.parameter.metavar)


def _expected(argument: Argument) -> str:
    kinds = _kinds(argument)
    if bool in kinds:
        return "true or false"
    if list in kinds:
        return 'a list of strings, as in ["A=1", "B=2"]'
    if int in kinds:
        return "a whole number"
    return "a number" if _is_number(argument) else "a string"


def _as_typed(argument: Argument, value: object) -> list[str] | None:
    """A value of a file as words of a command line; None if its type is another."""
    kinds = _kinds(argument)
    if isinstance(value, bool):
        return [str(value).lower()] if bool in kinds else None
    if isinstance(value, list):
        right = list in kinds and all(isinstance(one, str) for one in value)
        return value if right else None
    if isinstance(value, int | float):
        fits = _is_number(argument) or (int in kinds and isinstance(value, int))
        return [str(value)] if fits else None
    text = not kinds & {bool, int, list} and argument.parameter.metavar != "SECONDS"
    return [value] if text and isinstance(value, str) else None


def as_saved(argument: Argument, value: Any) -> bool | int | float | str | list[str]:
    """The value of an option as a file has it."""
    if isinstance(value, bool | int | list):
        return value
    for number in (int, float) if _is_number(argument) else ():
        with suppress(ValueError):  # -n has words, too
            return number(value)
    return str(value)


def document(options: Mapping[str, object]) -> str:
    """The text of a file with these options."""
    lines = [f"{key} = {_shown(value)}" for key, value in options.items()]
    return f"{HEAD}[{_TABLE}]\n" + "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    """A value as TOML has it: JSON's, for what an option can be."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
