"""Lists of hosts: `a,b:4,c`, or a hostfile in Open MPI's syntax.

    node1 slots=4
    node2 slots=2   # a comment
    user@node3
    [fe80::1]:2

A number is the host's number of ranks; without one it is decided later.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import BadArgument

# A leading hyphen would be an ssh option, and blanks or shell characters a command.
_NAME = r"(?:[A-Za-z0-9_.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])"
_HOST = re.compile(rf"({_NAME})(?::([0-9]{{1,6}}))?", re.ASCII)
_LINE = re.compile(
    rf"({_NAME})(?::([0-9]{{1,6}}))?((?:\s+[a-z_-]+\s*=\s*\S+)*)", re.ASCII
)
_SLOTS = re.compile(r"\b(?:max[_-]slots|(slots))\s*=\s*(\S+)")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class HostSpec:
    """A host to start ranks on; `ranks` None means one for each core."""

    name: str
    ranks: int | None = None

    @property
    def address(self) -> str:
        """The name without a user: the address that others connect to."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether the name means the local host everywhere."""
        return self.address in _LOOPBACK

    @property
    def is_here(self) -> bool:
        """Whether it is the host of this process, which needs no ssh."""
        if "@" in self.name:
            return False
        if self.is_loopback or self.name == socket.gethostname():
            return True
        return "." in self.name and self.name == socket.getfqdn()  # getfqdn may be slow

    @property
    def login(self) -> str:
        """The name as ssh takes it: an IPv6 address without brackets."""
        return self.name.replace("[", "").replace("]", "")


def parse_hosts(text: str) -> list[HostSpec]:
    """Parse "a,b:4,c"."""
    hosts = []
    for part in text.split(","):
        found = _HOST.fullmatch(part.strip())
        if not found:
            raise BadArgument(
                f"--hosts {text}: {part.strip()!r} is not a host; expected names "
                "with or without a number of ranks, as in a,b:4,c"
            )
        hosts.append(_host("--hosts", found[1], found[2]))
    return _distinct("--hosts", hosts)


def read_hostfile(path: Path) -> list[HostSpec]:
    """Read a hostfile: one host per line, as `name slots=4`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise BadArgument(f"{path}: this hostfile cannot be read: {why}") from why
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
        raise BadArgument(f"{path}: contains no host")
    return _distinct(str(path), hosts)


def _host(where: str, name: str, ranks: str | None) -> HostSpec:
    if ranks is None:
        return HostSpec(name)
    if not ranks.isascii() or not ranks.isdigit() or not 1 <= int(ranks) <= 1 << 20:
        raise BadArgument(f"{where}: {name} with {ranks} ranks: expected 1 or more")
    return HostSpec(name, int(ranks))


def _distinct(where: str, hosts: Sequence[HostSpec]) -> list[HostSpec]:
    addresses: set[str] = set()
    for host in hosts:
        if host.address in addresses:
            raise BadArgument(
                f"{where}: {host.name} is named twice; name it once, with its number "
                f"of ranks, as in {host.name}:4"
            )
        addresses.add(host.address)
    return list(hosts)


def with_ranks(hosts: Iterable[HostSpec], n: int | None) -> list[HostSpec]:
    """The same hosts, with `n` ranks where no number is given."""
    return [host if host.ranks else HostSpec(host.name, n) for host in hosts]


def in_slots(hosts: Sequence[HostSpec], total: int) -> list[HostSpec]:
    """`total` ranks on these hosts in order, each with as many as it has slots.

    A host without a number has one slot, as with mpirun; one that gets no rank is left
    out.
    """
    slots = sum(host.ranks or 1 for host in hosts)
    if total > slots:
        raise BadArgument(
            f"-np {total}: the hosts have {slots} slots together; name more hosts, or "
            "give them more slots, as in a:4,b:4 or node1 slots=4"
        )
    filled = []
    for host in hosts:
        ranks = min(total, host.ranks or 1)
        total -= ranks
        if ranks:
            filled.append(HostSpec(host.name, ranks))
    return filled
