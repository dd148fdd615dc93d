"""The rank table: which ranks there are, and on which host each of them is.

Two ranks are on one host if they can share memory and see each other's processes: the
same boot of the same kernel, one user, and the same namespaces of processes and of the
network (they pass each other memory through Unix sockets). UNISONO_HOST_ID emulates
several hosts on one; it cannot join several.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from unisono.transports import shm
from unisono.transports.addresses import Rail
from unisono.transports.connect import Connection
from unisono.transports.listener import Listener
from unisono.transports.session import Peer

HOST_ID = "UNISONO_HOST_ID"


class RankEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank of the table; `address` is that of its listener.

    `fabric` is the name of its transport, `rails` the addresses of its network cards,
    if it uses several.
    """

    rank: int
    pid: int
    host: str
    identity: str
    cores: int
    address: str
    fabric: str = "tcp"
    rails: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankTable:
    """All ranks of the job, and this rank's listener and lifelines.

    `why` says where this rank listens, and why there; `rails` are its network cards, if
    it uses several.
    """

    rank: int
    entries: tuple[RankEntry, ...]
    listener: Listener
    lifelines: dict[int, Connection]
    why: str
    rails: tuple[Rail, ...] = ()

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
        """The ranks on the host of `rank`, by default of this one; itself included."""
        host = self.entries[self.rank if rank is None else rank].identity
        return [e.rank for e in self.entries if e.identity == host]

    def sharing_machine(self) -> int:
        """How many ranks run on this rank's machine, on emulated hosts or not."""
        boots = [e.identity.rsplit("/", 4)[1] for e in self.entries]
        return boots.count(boots[self.rank])

    def close(self) -> None:
        """Close the listener and the lifelines."""
        self.listener.close()
        for connection in self.lifelines.values():
            connection.close()


def host_identity() -> str:
    """Equal in two processes only if they can share memory and see each other.

    Of its five parts the second is the boot, which is the same for a whole machine.
    """
    parts = [os.environ.get(HOST_ID, ""), shm.host_identity(), str(os.getuid())]
    for space in ("pid", "net"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
        except OSError:  # a system without namespaces
            parts.append("")
    return "/".join(parts)
