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
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

from cyclopts import App, Parameter

from unisono.cli import _hosts
from unisono.cli.output import parse_world, print_json, seconds_of
from unisono.errors import BadArgument
from unisono.launch.local import launch
from unisono.launch.output import RankOutput
from unisono.launch.remote import launch_on_hosts
from unisono.runtime.observe.monitor import MONITOR
from unisono.runtime.observe.recorder import FLIGHT_DIR

TAKE_A_VALUE = (
    *("-n", "--ranks", "--only", "--log-dir", "--grace", "--timeout-s", "--hosts"),
    *("--hostfile", "--ssh", "--python", "--chdir", "--address", "--env", "-x"),
    "--records",
)
"""The options that take a value."""
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
    reader = App(
        name="unisono",
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        default_parameter=Parameter(negative=""),
    )
    reader.command(_run, name="run")
    ours, theirs = _split(words)
    result = reader(["run", *ours, "--", *theirs])
    return result if isinstance(result, int) else 0


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our options, and the script with its own."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "--":
            return words[:at], words[at + 1 :]
        if word.startswith("-m"):
            at += 2 if word == "-m" else 1
            return words[:at], words[at:]
        at += 2 if word in TAKE_A_VALUE else 1
    return words[:at], words[at:]


def _run(
    *command: str,
    n: Annotated[str, Parameter(name=["-n", "--ranks"])] = "",
    module: Annotated[str, Parameter(name="-m")] = "",
    only: str = "",
    log_dir: Path | None = None,
    grace: str = "5",
    timeout_s: str = "",
    hosts: str = "",
    hostfile: Path | None = None,
    ssh: str = "",
    python: str = "",
    chdir: str = "",
    address: str = "",
    env: Annotated[list[str] | None, Parameter(name=["--env", "-x"])] = None,
    records: Path | None = None,
    json: bool = False,
) -> int:
    """Run a script as so many ranks, and keep its exit code.

    When a rank fails, the others may report for a while and are then ended; the
    first failure is printed last.

    Example: unisono run -n 4 train.py

    Parameters
    ----------
    command
        A Python file or a program, and then its own options and arguments.
    n
        Number of ranks (on each host); as many as there are cores if not given.
    module
        A module to run instead of a file, as python does it.
    only
        Show only what these ranks print, as 0 or 0,2.
    log_dir
        Write what each rank prints to this folder as well, as rank0.log and so on.
    grace
        Seconds that the others have to report after the first failure.
    timeout_s
        Seconds after which a collective times out, unless the script sets others.
    hosts
        Where to run it, by ssh: names, with a number of ranks or without, as a,b:4,c.
    hostfile
        The same from a file with one host a line, as node1 slots=4.
    ssh
        The command that reaches a host, if it is not ssh.
    python
        The path of Python on the hosts, if it is not the same as here.
    chdir
        The folder to run in on the hosts, if it is not the same as here.
    address
        Where rank 0 listens, as host:port, if not at the first host's name.
    env
        A variable for all ranks, NAME or NAME=value; may be given several times. The
        hosts get those that begin with UNISONO_, PYTHON or OMP_ anyway.
    records
        Have every rank leave its flight record in this folder (on each host), for
        unisono trace why.
    json
        Print how it ended as one JSON object; the ranks then print to stderr.
    """
    grace_s = seconds_of("--grace", grace)
    environment = {MONITOR: "1", **_hosts.variables(env or [])}
    if records is not None:
        environment[FLIGHT_DIR] = str(records.absolute())
    if timeout_s:
        seconds = seconds_of("--timeout-s", timeout_s, zero=False)
        environment["UNISONO_TIMEOUT_S"] = str(seconds)
    places = _hosts.places(hosts, hostfile, _ranks(n))
    world = _hosts.world(places) if places else _ranks(n) or _cores()
    out, err = _bytes_of(sys.stdout), _bytes_of(sys.stderr)
    if json:
        out = err
    stage = RankOutput(out, err, only=_only(only, world), log_dir=log_dir)
    if places:
        way = _hosts.way(ssh, python, chdir, address)
        line = _hosts.command(way.python, module, command)
        environment = _hosts.forwarded() | environment
        outcome = launch_on_hosts(
            line, places, stage, way, environment=environment, grace_s=grace_s
        )
    else:
        _hosts.refuse_without_hosts(ssh, python, chdir, address)
        line = _command(module, command)
        n_ranks = world or 1
        outcome = launch(line, n_ranks, stage, environment=environment, grace_s=grace_s)
    if report := outcome.report():
        print(f"unisono: {report}", file=sys.stderr, flush=True)
    if json:
        print_json(outcome.as_dict())
    return outcome.exit_code


def _ranks(text: str) -> int | None:
    if not text:
        return None
    world = parse_world(text)
    if world < 1:
        raise BadArgument(f"-n {text}: a world has at least one rank")
    return world


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _only(text: str, world: int | None) -> frozenset[int] | None:
    """The ranks to show; None is all of them. The world may not be known yet."""
    if not text:
        return None
    shown = set()
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdigit()):
            raise BadArgument(f"--only {text}: expected ranks, as in 0 or 0,2")
        shown.add(int(part))
    if world is not None and max(shown) >= world:
        raise BadArgument(f"--only {text}: ranks are 0..{world - 1}")
    return frozenset(shown)


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
