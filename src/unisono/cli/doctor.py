"""`unisono doctor`: whether this host, or these hosts, can run ranks.

First every host is checked alone, all at the same time, so that an unreachable host
does not hide the problems of others. Then the reachable hosts form one small world,
started and connected exactly as `unisono run` does it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter

from unisono.cli import _hosts
from unisono.cli._doctor.host import MARK, Finding, examine
from unisono.cli._doctor.rank import WorldFindings
from unisono.cli._doctor.report import of_world, show, show_matrices
from unisono.cli.output import parse_world, print_json
from unisono.errors import BadArgument, UnisonoError
from unisono.launch.hostfile import HostSpec
from unisono.launch.local import launch
from unisono.launch.outcome import Outcome
from unisono.launch.output import RankOutput
from unisono.launch.remote import RemoteOptions, launch_on_hosts

_AT_ONCE = 16
_PATIENCE_S = "60"
_Kind = TypeVar("_Kind")


def doctor(
    *,
    hosts: str = "",
    hostfile: Path | None = None,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "",
    ssh: str = "",
    python: str = "",
    chdir: str = "",
    address: str = "",
    json: bool = False,
) -> int:
    """Examine this host or others, and a small world on them: OK or FIX, and how.

    The exit code is 1 if anything is to be mended.

    Example: unisono doctor --hosts a,b

    Parameters
    ----------
    hosts
        Hosts to examine, by ssh, as a,b,c; this one if none are named.
    hostfile
        The same from a file with one host a line.
    n
        Ranks on each host: 2 if not given, or 1 on each of several hosts.
    ssh
        The command that reaches a host, if it is not ssh.
    python
        The path of Python on the hosts, if it is not the same as here.
    chdir
        The folder to run in on the hosts, if it is not the same as here.
    address
        Where rank 0 listens, as host:port, if not at the first host's name.
    json
        Print a JSON object.
    """
    ranks = _ranks(n)
    places = _hosts.places(hosts, hostfile, ranks)
    if places:
        way = _hosts.way(ssh, python, chdir, address)
        findings, reached = _each(places, way)
        world = _world_on(reached, way, ranks) if reached else None
    else:
        _hosts.refuse_without_hosts(ssh, python, chdir, address)
        findings = examine(False)
        world = _world_here(ranks or 2)
    if world is not None:
        findings += of_world(world, several=len(places) > 1)
    if json:
        print_json({"findings": findings, "world": world})
    else:
        show(findings)
        if world is not None and not world.failed:
            show_matrices(world)
    return 0 if all(finding.ok for finding in findings) else 1


def _ranks(text: str) -> int | None:
    if not text:
        return None
    ranks = parse_world(text)
    if ranks < 1:
        raise BadArgument(f"-n {text}: a world has at least one rank")
    return ranks


def _each(
    hosts: Sequence[HostSpec], way: RemoteOptions
) -> tuple[list[Finding], list[HostSpec]]:
    """The findings of every host, and the hosts that answered."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(partial(_one, way), hosts))
    reached = [host for host, (ok, _) in zip(hosts, answers, strict=True) if ok]
    return [finding for _, findings in answers for finding in findings], reached


def _one(way: RemoteOptions, host: HostSpec) -> tuple[bool, list[Finding]]:
    command = [way.python, "-m", "unisono.cli._doctor.host"]
    output = io.BytesIO()
    stage, alone = RankOutput(output, io.BytesIO()), replace(host, ranks=1)
    try:
        outcome = launch_on_hosts(
            command, [alone], stage, way, environment=_hosts.forwarded()
        )
    except UnisonoError as error:
        return False, [Finding("ssh", False, str(error), where=host.name)]
    findings = _marked(output, list[Finding])
    if not findings:
        detail = f"the checks failed: {outcome.report()}"
        return False, [Finding("host", False, detail, where=host.name)]
    for finding in findings[0]:
        finding.where = host.name
    reached = Finding("ssh", True, "reached, same version", where=host.name)
    return True, [reached, *findings[0]]


def _world_here(ranks: int) -> WorldFindings:
    output, err = io.BytesIO(), io.BytesIO()
    command = [sys.executable, "-m", "unisono.cli._doctor.rank"]
    environment = {
        "UNISONO_TIMEOUT_S": os.environ.get("UNISONO_TIMEOUT_S", _PATIENCE_S)
    }
    outcome = launch(command, ranks, RankOutput(output, err), environment=environment)
    return _world(output, outcome)


def _world_on(
    hosts: Sequence[HostSpec], way: RemoteOptions, ranks: int | None
) -> WorldFindings:
    each = ranks or (1 if len(hosts) > 1 else 2)
    places = [replace(host, ranks=host.ranks or each) for host in hosts]
    command = [way.python, "-m", "unisono.cli._doctor.rank"]
    output, err = io.BytesIO(), io.BytesIO()
    environment = {"UNISONO_TIMEOUT_S": _PATIENCE_S, **_hosts.forwarded()}
    try:
        outcome = launch_on_hosts(
            command, places, RankOutput(output, err), way, environment=environment
        )
    except UnisonoError as error:
        return WorldFindings([], {}, {}, [], [], [], failed=str(error))
    return _world(output, outcome)


def _world(output: io.BytesIO, outcome: Outcome) -> WorldFindings:
    findings = _marked(output, WorldFindings)
    if findings:
        return next((one for one in findings if not one.failed), findings[0])
    message = outcome.report() or "the ranks printed nothing"
    return WorldFindings([], {}, {}, [], [], [], failed=message)


def _marked(output: io.BytesIO, kind: type[_Kind]) -> list[_Kind]:
    """What was printed for us, among whatever else was."""
    lines = output.getvalue().decode(errors="replace").splitlines()
    texts = [line.partition(MARK)[2] for line in lines if MARK in line]
    return [msgspec.json.decode(text, type=kind) for text in texts]
