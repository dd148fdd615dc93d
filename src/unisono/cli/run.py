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
from dataclasses import replace
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

from cyclopts import App, Parameter

from unisono.cli import _hosts
from unisono.cli._help import PARAMETER
from unisono.cli._nodes import Nodes
from unisono.cli._spellings import our_spelling, ranks_by_word
from unisono.cli.output import parse_world, print_json, seconds_of
from unisono.errors import BadArgument
from unisono.launch.environment import restart_variables
from unisono.launch.local import launch
from unisono.launch.outcome import Outcome
from unisono.launch.output import RankOutput
from unisono.launch.remote import launch_on_hosts
from unisono.launch.restarts import with_restarts
from unisono.launch.screen import OutputOptions
from unisono.runtime.observe.recorder import FLIGHT_DIR, MONITOR

_TAKE_A_VALUE = (
    *("-n", "--ranks", "--only", "--log-dir", "--grace", "--timeout-s", "--hosts"),
    *("--hostfile", "--ssh", "--python", "--chdir", "--address", "--env", "-x"),
    *("--records", "--np", "--nnodes", "--node-rank", "--master-addr"),
    *("--master-port", "--max-restarts", "--bind-to"),
)
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
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        default_parameter=PARAMETER,
    )
    reader.command(_run, name="run")
    ours, theirs = _split(words)
    result = reader(["run", *ours, "--", *theirs])
    return result if isinstance(result, int) else 0


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our options, and the script with its own."""
    ours: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "--":
            return ours, words[at + 1 :]
        count = 2 if takes_a_value(word) or word == "-m" else 1
        ours += filter(None, [our_spelling(word), *words[at + 1 : at + count]])
        at += count
        if word.startswith("-m") and not word.startswith("-machine"):
            break
    return ours, words[at:]


def takes_a_value(word: str) -> bool:
    """Whether the next word is the value of this option."""
    return our_spelling(word) in _TAKE_A_VALUE


def _run(
    *command: str,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "",
    np: Annotated[str, Parameter(metavar="N")] = "",
    module: Annotated[str, Parameter(name="-m")] = "",
    only: str = "",
    tag_output: bool = False,
    timestamps: bool = False,
    log_dir: Path | None = None,
    grace: Annotated[str, Parameter(metavar="SECONDS")] = "5",
    timeout_s: Annotated[str, Parameter(metavar="SECONDS")] = "",
    max_restarts: int = 0,
    bind_to: str = "none",
    hosts: str = "",
    hostfile: Path | None = None,
    ssh: str = "",
    python: str = "",
    chdir: str = "",
    address: str = "",
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "",
    master_port: int = 29500,
    env: Annotated[list[str] | None, Parameter(name=["--env", "-x"])] = None,
    records: Path | None = None,
    json: bool = False,
) -> int:
    """Run a script as so many ranks, and keep its exit code.

    When a rank fails, the others may report for a while and are then ended; the
    first failure is printed last. Ranks get the variables of torchrun as well (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...), and options may be spelled as torchrun,
    mpirun and accelerate spell them.

    Example: unisono run -n 4 train.py

    Parameters
    ----------
    command
        A Python file or a program, and then its own options and arguments.
    n
        Number of ranks (on each host); as many as there are cores if not given.
    np
        Number of ranks on all hosts together, which get as many as they have slots, in
        order.
    module
        A module to run instead of a file, as python does it.
    only
        Show only what these ranks print, as 0 or 0,2.
    tag_output
        Say before each line whether it is of stdout or stderr, too.
    timestamps
        Put the time of day before each line.
    log_dir
        Write what each rank prints to this folder as well, as rank0.log and so on.
    grace
        Seconds that the others have to report after the first failure.
    timeout_s
        Seconds after which a collective times out, unless the script sets others.
    max_restarts
        After a failure start all ranks again, so many times at most.
    bind_to
        core: each rank runs on its own share of the cores; numa: on those of the NUMA
        nodes that this share touches.
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
    nnodes
        Without ssh: this command is given on each of so many hosts.
    node_rank
        The number of this host among them, from 0 on.
    master_addr
        The name of the host with number 0.
    master_port
        A port there for torch; unisono uses the one that is 100 above it.
    env
        A variable for all ranks, NAME or NAME=value; may be given several times. The
        hosts get those that begin with UNISONO_, PYTHON or OMP_ anyway.
    records
        Have every rank leave its flight record in this folder (on each host), for
        unisono trace why.
    json
        Print how it ended as one JSON object; the ranks then print to stderr.
    """
    per_host, total = _ranks("-n", n), _ranks("-np", np)
    if per_host and total:
        raise BadArgument("-n and -np: give one of them")
    if max_restarts < 0:
        raise BadArgument(f"--max-restarts {max_restarts}: expected 0 or more")
    grace_s = seconds_of("--grace", grace)
    environment = {MONITOR: "1", **_hosts.variables(env or [])}
    environment |= _settings(records, timeout_s)
    nodes = Nodes(nnodes, node_rank, master_addr, master_port)
    places = _hosts.places(hosts, hostfile, per_host, total)
    nodes.check(places, max_restarts)
    world = _hosts.world(places) if places else total or per_host or _cores()
    shown = OutputOptions(
        only=_only(only, world and world * nodes.count),
        log_dir=log_dir,
        tag=tag_output,
        timestamps=timestamps,
    )
    out, err = _bytes_of(sys.stdout), _bytes_of(sys.stderr)

    def attempt(number: int) -> Outcome:
        stage = RankOutput(err if json else out, err, shown, append=number > 0)
        common = environment | restart_variables(number, max_restarts)
        if places:
            way = replace(_hosts.way(ssh, python, chdir, address), binding=bind_to)
            line = _hosts.command(way.python, module, command)
            common = _hosts.forwarded() | common
            return launch_on_hosts(
                line,
                places,
                stage,
                way,
                environment=common,
                grace_s=grace_s,
                tell=_tell if sys.stderr.isatty() else str,
            )
        _hosts.refuse_without_hosts(ssh, python, chdir, address)
        line, here = _command(module, command), nodes.ranks_here(world or 1, bind_to)
        common = nodes.variables() | common
        return launch(line, here, stage, environment=common, grace_s=grace_s)

    outcome, restarts = with_restarts(attempt, max_restarts, _tell)
    if report := outcome.report():
        _tell(report)
    if json:
        print_json(outcome.as_dict() | {"restarts": restarts})
    return outcome.exit_code


def _settings(records: Path | None, timeout_s: str) -> dict[str, str]:
    """Variables that options set."""
    settings = {}
    if records is not None:
        settings[FLIGHT_DIR] = str(records.absolute())
    if timeout_s:
        seconds = seconds_of("--timeout-s", timeout_s, zero=False)
        settings["UNISONO_TIMEOUT_S"] = str(seconds)
    return settings


def _tell(message: str) -> None:
    print(f"unisono: {message}", file=sys.stderr, flush=True)


def _ranks(option: str, text: str) -> int | None:
    text = ranks_by_word(text)
    if not text:
        return None
    world = parse_world(text)
    if world < 1:
        raise BadArgument(f"{option} {text}: a world has at least one rank")
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
