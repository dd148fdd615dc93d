"""Who takes part, and on which host: what all ranks know once they have met.

Two ranks are on one host if they can share memory and see each other's processes: the
same boot of the same kernel, one user, and the same namespaces of processes and of the
network (through Unix sockets they hand each other memory). UNISONO_HOST_ID parts what
would be one host, as if there were several; it cannot join what is apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from unisono.transports import shm
from unisono.transports.connect import Connection
from unisono.transports.listener import Listener
from unisono.transports.session import Peer

HOST_ID = "UNISONO_HOST_ID"


class RankEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank in the roll; `address` is that of its reception."""

    rank: int
    pid: int
    host: str
    identity: str
    cores: int
    address: str


@dataclass(frozen=True)
class RankTable:
    """All ranks of the job as this one knows them, and its own ends of connections.

    `why` tells where this rank listens and by what reason.
    """

    rank: int
    entries: tuple[RankEntry, ...]
    listener: Listener
    lifelines: dict[int, Connection]
    why: str

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, counted as they first appear."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(e.identity, len(numbers)) for e in self.entries]

    @property
    def peers(self) -> list[Peer]:
        """All ranks as errors name them."""
        return [Peer(e.rank, e.pid, e.host) for e in self.entries]

    def local(self, rank: int | None = None) -> list[int]:
        """The ranks on the same host as `rank`, itself included; by default as us."""
        host = self.entries[self.rank if rank is None else rank].identity
        return [e.rank for e in self.entries if e.identity == host]

    def close(self) -> None:
        """Leave: close the reception and the lifelines."""
        self.listener.close()
        for connection in self.lifelines.values():
            connection.close()


def host_identity() -> str:
    """Equal in two processes only if they can share memory and see each other."""
    parts = [os.environ.get(HOST_ID, ""), shm.host_identity(), str(os.getuid())]
    for space in ("pid", "net"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
        except OSError:  # a system without namespaces
            parts.append("")
    return "/".join(parts)
