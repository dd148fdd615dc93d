"""`unisono run`: a script as n ranks on this host, or on others by ssh.

Options before the script are those of `unisono run`, and all arguments after it are
those of the script. A parser that sorts options by name cannot find this border. So the
verb takes all its arguments unparsed, finds the border itself, and passes both parts
on, with `--`, which ends options, in between.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TextIO

from cyclopts import App, ArgumentCollection, Parameter

from unisono.cli import _hosts
from unisono.cli._help import PARAMETER, with_whole_paragraphs
from unisono.cli._run_options import RunOptions
from unisono.cli._saved import SavedOptions
from unisono.cli._spellings import our_spelling
from unisono.cli.output import print_json, refuse_no_folder
from unisono.errors import BadArgument
from unisono.launch.environment import restart_variables
from unisono.launch.local import launch
from unisono.launch.outcome import Outcome
from unisono.launch.output import RankOutput
from unisono.launch.remote import launch_on_hosts
from unisono.launch.restarts import with_restarts

_DEFAULTS = RunOptions()
_PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz")

run = App(
    name="run",
    help="Run a script as so many ranks, on this host or on others.",
    help_flags=(),
    version_flags=(),
    end_of_options_delimiter="\0",  # none: no word contains it
)


@run.default
def carry_out(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Find the border, then read."""
    result = _reader(SavedOptions(_tell))(_words(words))
    return result if isinstance(result, int) else 0


def parse(words: Sequence[str], saved: SavedOptions) -> dict[str, Any]:
    """What `run` would be called with; options that are not given may be missing."""
    _, bound, _ = _reader(saved).parse_args(_words(words))
    return bound.arguments


def _reader(saved: SavedOptions | None = None) -> App:
    reader = App(
        name="unisono",
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        default_parameter=PARAMETER,
        config=saved,
    )
    reader.command(with_whole_paragraphs(_run), name="run")
    return reader


@cache
def arguments() -> ArgumentCollection:
    """Its options and arguments, as they are defined."""
    return _reader()["run"].assemble_argument_collection()


def _words(words: Sequence[str]) -> list[str]:
    ours, theirs = _split(words)
    return ["run", *ours, "--", *theirs]


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our options, and the script with its own."""
    ours: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "--":
            return ours, words[at + 1 :]
        count = 2 if takes_a_value(word) else 1
        ours += filter(None, [our_spelling(word), *words[at + 1 : at + count]])
        at += count
        if word.startswith("-m") and not word.startswith("-machine"):
            break
    return ours, words[at:]


def takes_a_value(word: str) -> bool:
    """Whether the next word is the value of this option."""
    return our_spelling(word) in _with_values()


@cache
def _with_values() -> frozenset[str]:
    return frozenset(
        name
        for argument in arguments()
        if argument.hint is not bool
        for name in argument.names
    )


def _run(
    *command: str,
    module: Annotated[str, Parameter(name="-m")] = "",
    options: RunOptions = _DEFAULTS,
    config: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    no_config: bool = False,
    json: bool = False,
) -> int:
    """Run a script as so many ranks, and keep its exit code.

    When a rank fails, the others may report for a while and are then ended; the
    first failure is printed last. Ranks get the variables of torchrun as well (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...), and options may be spelled as torchrun,
    mpirun and accelerate spell them. Options that are not given are taken from
    unisono.toml in this folder, if it is there (see unisono config --help).

    Example: unisono run -n 4 train.py

    Parameters
    ----------
    command
        A Python file or a program, and then its own options and arguments.
    module
        A module to run instead of a file, as python does it.
    config
        Take options from this file, not from unisono.toml in this folder.
    no_config
        Take options from no file.
    json
        Print how it ended as one JSON object; the ranks then print to stderr.
    """
    plan = options.plan()
    out, err = _bytes_of(sys.stdout), _bytes_of(sys.stderr)

    def attempt(number: int) -> Outcome:
        stage = RankOutput(err if json else out, err, plan.shown, append=number > 0)
        common = plan.environment | restart_variables(number, options.max_restarts)
        if plan.places:
            way = options.way()
            line = _hosts.command(way.python, module, command)
            common = _hosts.forwarded() | common
            return launch_on_hosts(
                line,
                plan.places,
                stage,
                way,
                environment=common,
                grace_s=plan.grace_s,
                tell=_tell if sys.stderr.isatty() else str,
            )
        _hosts.refuse_without_hosts(
            options.ssh, options.python, options.chdir, options.address
        )
        refuse_no_folder("--records", options.records)
        line = _command(module, command)
        here = plan.nodes.ranks_here(plan.world or 1, options.bind_to)
        common = plan.nodes.variables() | common
        return launch(line, here, stage, environment=common, grace_s=plan.grace_s)

    outcome, restarts = with_restarts(attempt, options.max_restarts, _tell)
    if report := outcome.report():
        _tell(report)
    if json:
        print_json(outcome.as_dict() | {"restarts": restarts})
    return outcome.exit_code


def _tell(message: str) -> None:
    print(f"unisono: {message}", file=sys.stderr, flush=True)


def _command(module: str, words: Sequence[str]) -> list[str]:
    """The whole command line of a rank."""
    if module:
        return [sys.executable, "-m", module, *words]
    if not words:
        raise BadArgument("nothing to run: name a script, or a module behind -m")
    script = words[0]
    path = Path(script)
    if not path.exists():
        program = shutil.which(script)  # as in: unisono run -n 4 python train.py
        if program is None:
            raise BadArgument(f"{script}: no such file, and no such program either")
        return [program, *words[1:]]
    if path.suffix in _PYTHON_FILES or (path / "__main__.py").exists():
        return [sys.executable, *words]
    if path.is_dir():
        raise BadArgument(f"{script}: a folder without a __main__.py cannot be run")
    if not os.access(path, os.X_OK):
        raise BadArgument(
            f"{script}: neither a Python file nor executable; chmod +x makes it so"
        )
    return [str(path.absolute()), *words[1:]]


def _bytes_of(stream: TextIO) -> BinaryIO:
    """What is under a stream of text; a closed one leads nowhere."""
    stream.flush()
    under = getattr(stream, "buffer", None)
    return under if under is not None else open(os.devnull, "wb")
