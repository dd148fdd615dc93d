"""Hosts by name, as people write them: `a,b:4,c`, or a file of Open MPI's spelling.

    node1 slots=4
    node2 slots=2   # what follows a hash is a remark
    user@node3
    [fe80::1]:2

A number is how many ranks the host gets; without one it is decided later.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import BadArgument

# A leading hyphen would be an option to ssh, and blanks or signs a second command.
_NAME = r"(?:[A-Za-z0-9_.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])"
_HOST = re.compile(rf"({_NAME})(?::([0-9]{{1,6}}))?", re.ASCII)
_LINE = re.compile(
    rf"({_NAME})(?::([0-9]{{1,6}}))?((?:\s+[a-z_-]+\s*=\s*\S+)*)", re.ASCII
)
_SLOTS = re.compile(r"\b(?:max[_-]slots|(slots))\s*=\s*(\S+)")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Host:
    """A machine to start ranks on; None of them is as many as it has cores."""

    name: str
    ranks: int | None = None

    @property
    def address(self) -> str:
        """The name without a user: what others connect to."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether everybody calls its own machine so."""
        return self.address in _LOOPBACK

    @property
    def is_here(self) -> bool:
        """Whether it needs no ssh: the machine that this process runs on."""
        if "@" in self.name:
            return False
        if self.is_loopback or self.name == socket.gethostname():
            return True
        return "." in self.name and self.name == socket.getfqdn()  # which may be slow

    @property
    def login(self) -> str:
        """The name as ssh takes it: an IPv6 address without brackets."""
        return self.name.replace("[", "").replace("]", "")


def parse_hosts(text: str) -> list[Host]:
    """The hosts that "a,b:4,c" means."""
    hosts = []
    for part in text.split(","):
        found = _HOST.fullmatch(part.strip())
        if not found:
            raise BadArgument(
                f"--hosts {text}: {part.strip()!r} is no host; expected names with or "
                "without a number of ranks, as in a,b:4,c"
            )
        hosts.append(_host("--hosts", found[1], found[2]))
    return _distinct("--hosts", hosts)


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file: one a line, as `name slots=4`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise BadArgument(f"{path}: this file of hosts cannot be read: {why}") from why
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        where = f"{path}, line {number}"
        found = _LINE.fullmatch(line)
        if not found:
            raise BadArgument(
                f"{where}: {line!r}; expected a host, as in: node1 slots=4"
            )
        slots = [m[2] for m in _SLOTS.finditer(found[3]) if m[1]]
        hosts.append(_host(where, found[1], slots[0] if slots else found[2]))
    if not hosts:
        raise BadArgument(f"{path}: names no host")
    return _distinct(str(path), hosts)


def _host(where: str, name: str, ranks: str | None) -> Host:
    if ranks is None:
        return Host(name)
    if not ranks.isascii() or not ranks.isdigit() or not 1 <= int(ranks) <= 1 << 20:
        raise BadArgument(f"{where}: {name} with {ranks} ranks: expected 1 or more")
    return Host(name, int(ranks))


def _distinct(where: str, hosts: Sequence[Host]) -> list[Host]:
    seen: set[str] = set()
    for host in hosts:
        if host.address in seen:
            raise BadArgument(
                f"{where}: {host.name} is named twice; name it once, with its number "
                f"of ranks, as in {host.name}:4"
            )
        seen.add(host.address)
    return list(hosts)


def with_ranks(hosts: Iterable[Host], n: int | None) -> list[Host]:
    """The same, with `n` ranks where nothing is said."""
    return [host if host.ranks else Host(host.name, n) for host in hosts]
