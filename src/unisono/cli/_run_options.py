"""The options of `unisono run` that describe how ranks are started.

They are one class, so that what is typed, what is saved (`_saved`) and what is shown
(`config`) are the same options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli import _hosts
from unisono.cli._help import with_whole_paragraphs
from unisono.cli._nodes import Nodes
from unisono.cli._spellings import ranks_by_word
from unisono.cli.output import parse_world, seconds_of
from unisono.errors import BadArgument
from unisono.launch.binding import refuse_unknown_binding
from unisono.launch.hostfile import HostSpec
from unisono.launch.remote import RemoteOptions
from unisono.launch.screen import OutputOptions
from unisono.runtime.observe.recorder import FLIGHT_DIR, MONITOR

VARIABLES = {"records": FLIGHT_DIR, "timeout_s": "UNISONO_TIMEOUT_S"}
"""Options that set a variable of the ranks."""


@dataclass(frozen=True)
class Plan:
    """What the options mean, checked."""

    places: list[HostSpec]
    nodes: Nodes
    world: int | None
    shown: OutputOptions
    environment: dict[str, str]
    grace_s: float


@Parameter(name="*")
@with_whole_paragraphs
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How ranks are started.

    Parameters
    ----------
    n
        Number of ranks (on each host); as many as there are cores if not given.
    np
        Number of ranks on all hosts together, which get as many as they have slots, in
        order.
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
    """

    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = ""
    np: Annotated[str, Parameter(metavar="N")] = ""
    only: str = ""
    tag_output: bool = False
    timestamps: bool = False
    log_dir: Path | None = None
    grace: Annotated[str, Parameter(metavar="SECONDS")] = "5"
    timeout_s: Annotated[str, Parameter(metavar="SECONDS")] = ""
    max_restarts: int = 0
    bind_to: str = "none"
    hosts: str = ""
    hostfile: Path | None = None
    ssh: str = ""
    python: str = ""
    chdir: str = ""
    address: str = ""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29500
    env: Annotated[list[str] | None, Parameter(name=["--env", "-x"])] = None
    records: Path | None = None

    def plan(self) -> Plan:
        """What they mean; BadArgument if they mean nothing, or not together."""
        per_host, total = _ranks("-n", self.n), _ranks("-np", self.np)
        if per_host and total:
            raise BadArgument("-n and -np: give one of them")
        if self.max_restarts < 0:
            raise BadArgument(f"--max-restarts {self.max_restarts}: expected 0 or more")
        refuse_unknown_binding(self.bind_to)
        nodes = Nodes(self.nnodes, self.node_rank, self.master_addr, self.master_port)
        places = _hosts.places(self.hosts, self.hostfile, per_host, total)
        nodes.check(places, self.max_restarts)
        world = _hosts.world(places) if places else total or per_host or _cores()
        shown = OutputOptions(
            only=_only(self.only, world and world * nodes.count),
            log_dir=self.log_dir,
            tag=self.tag_output,
            timestamps=self.timestamps,
        )
        environment = {MONITOR: "1", **_hosts.variables(self.env or [])}
        environment |= self._settings()
        grace_s = seconds_of("--grace", self.grace)
        return Plan(places, nodes, world, shown, environment, grace_s)

    def way(self) -> RemoteOptions:
        """How other hosts are reached; BadArgument as for `plan`."""
        return _hosts.way(self.ssh, self.python, self.chdir, self.address, self.bind_to)

    def _settings(self) -> dict[str, str]:
        """Variables that options set."""
        settings = {}
        if self.records is not None:
            settings[VARIABLES["records"]] = str(self.records.absolute())
        if self.timeout_s:
            seconds = seconds_of("--timeout-s", self.timeout_s, zero=False)
            settings[VARIABLES["timeout_s"]] = str(seconds)
        return settings


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
