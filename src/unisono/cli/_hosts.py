"""The options of commands that start ranks on other hosts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from unisono.errors import BadArgument
from unisono.launch.hostfile import (
    HostSpec,
    in_slots,
    parse_hosts,
    read_hostfile,
    with_ranks,
)
from unisono.launch.remote import RemoteOptions
from unisono.launch.ssh import SSH

_FORWARDED = re.compile(r"UNISONO_|PYTHON|OMP_|UCX_")
_NOT_FORWARDED = re.compile(
    r"UNISONO_(LOCAL_)?(RANK|WORLD_SIZE)|UNISONO_(JOB|SECRET.*)"
)
FOR_HOSTS = ("ssh", "python", "chdir", "address")
"""Options that do not apply to ranks of this host."""
_PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz")


def places(
    hosts: str, hostfile: Path | None, n: int | None, total: int | None = None
) -> list[HostSpec]:
    """The hosts with their ranks; none if none are named.

    There are n on each, or `total` on all of them together.
    """
    if hosts and hostfile is not None:
        raise BadArgument("--hosts and --hostfile: give one of them")
    found = parse_hosts(hosts) if hosts else []
    if hostfile is not None:
        found = read_hostfile(hostfile)
    return in_slots(found, total) if total and found else with_ranks(found, n)


def world(hosts: Iterable[HostSpec]) -> int | None:
    """The number of ranks, if it does not depend on the hosts' cores."""
    ranks = [host.ranks for host in hosts]
    return None if None in ranks else sum(number or 0 for number in ranks)


def way(
    ssh: str, python: str, chdir: str, address: str, binding: str = "none"
) -> RemoteOptions:
    """How hosts are reached, with what is the same there as here."""
    if address and not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):[0-9]{1,5}", address):
        raise BadArgument(f"--address {address}: expected host:port, as in node1:29400")
    try:
        command = shlex.split(ssh or SSH)
    except ValueError as why:
        raise BadArgument(f"--ssh {ssh}: {why}") from why
    if not command:
        raise BadArgument("--ssh: expected a command")
    return RemoteOptions(
        python or sys.executable, chdir or os.getcwd(), command, address, binding
    )


def refuse_without_hosts(ssh: str, python: str, chdir: str, address: str) -> None:
    """These do not apply to ranks of this host."""
    for name, value in zip(FOR_HOSTS, (ssh, python, chdir, address), strict=True):
        if value:
            raise BadArgument(
                f"--{name} {value}: this is for other hosts; name them with --hosts"
            )


def command(python: str, module: str, words: Sequence[str]) -> list[str]:
    """The command line of a rank elsewhere; whether all is there, is seen there."""
    if module:
        return [python, "-m", module, *words]
    if not words:
        raise BadArgument("nothing to run: name a script, or a module behind -m")
    path = Path(words[0])
    if path.suffix in _PYTHON_FILES or (path / "__main__.py").exists():
        return [python, *words]
    return [str(path.absolute()) if path.exists() else words[0], *words[1:]]


def variables(given: Iterable[str]) -> dict[str, str]:
    """The variables of `--env`: NAME=value, or NAME with its value here."""
    given_variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise BadArgument(f"--env {text}: expected NAME or NAME=value")
        if not equals and name not in os.environ:
            raise BadArgument(f"--env {name}: is not set here; give {name}=value")
        given_variables[name] = value if equals else os.environ[name]
    return given_variables


def forwarded() -> dict[str, str]:
    """Variables that ranks on other hosts get without `--env`."""
    return {
        name: value
        for name, value in os.environ.items()
        if _FORWARDED.match(name) and not _NOT_FORWARDED.fullmatch(name)
    }
