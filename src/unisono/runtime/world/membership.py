"""What a world needs to become another: its job, its epoch, and how its ranks meet.

Every world of a job has an epoch of its own, and whoever goes on counts further. So
nothing that belongs to an earlier world is taken for news in a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import unisono
from unisono.runtime.communicator import Communicator
from unisono.runtime.plan import tuned
from unisono.transports import shm, tcp
from unisono.transports import threads as memory
from unisono.transports.addresses import Address
from unisono.transports.base import Transport
from unisono.transports.endpoints import Door
from unisono.transports.secret import Secret


class Changes(NamedTuple):
    """The functions by which a world changes; they stand above this module."""

    shrink: Callable[[Membership, Communicator, float, Sequence[int]], Communicator]
    grow: Callable[[Membership, Communicator, int, float, str | None], Communicator]


@dataclass(frozen=True)
class Membership:
    """How this process belongs to a job, in the world of one epoch.

    `across` tells whether its ranks meet over TCP; `address` is then the job's own,
    where ranks that join come. `kept` are doors of earlier worlds at which ranks that
    were left out may still knock.
    """

    job: str
    changes: Changes
    epoch: int = 0
    across: bool = False
    address: str = ""
    secret: Secret | None = None
    interface: str | None = None
    insecure: bool = False
    tls: bool = False
    kept: tuple[Door, ...] = ()

    def later(self, epoch: int, kept: tuple[Door, ...] = ()) -> Membership:
        """The same in a later world."""
        return replace(self, epoch=epoch, kept=self.kept + kept)

    def meet(
        self,
        rank: int,
        world_size: int,
        place: str,
        *,
        timeout_s: float,
        announce: Callable[[str], None] = lambda place: None,
        lost: Callable[[], str] = str,
    ) -> Transport:
        """Meet the others of this epoch.

        `place` is an address that all were told, or on one host any word. Rank 0 may
        give port 0; `announce` is called with what there is to tell the others.
        """
        if world_size == 1:
            announce(place)
            return memory.alone()
        if self.across:
            return tcp.meet(
                rank,
                world_size,
                self.job,
                place,
                secret=self.secret,
                version=unisono.__version__,
                timeout_s=timeout_s,
                interface=self.interface,
                epoch=self.epoch,
                insecure=self.insecure,
                tls=self.tls,
                announce=lambda found: announce(_told(found)),
                lost=lost,
            )
        announce(place)
        job = f"{self.job}/{self.epoch}"
        return shm.meet(
            rank,
            world_size,
            f"{job}/{place}" if place else job,
            version=unisono.__version__,
            timeout_s=timeout_s,
            lost=lost,
            note=int(rank == 0 and tuned.is_there()),
        )

    def shrink(
        self, comm: Communicator, timeout_s: float, dead: Sequence[int]
    ) -> Communicator:
        """See `Communicator.shrink`."""
        return self.changes.shrink(self, comm, timeout_s, dead)

    def grow(
        self,
        comm: Communicator,
        world_size: int,
        timeout_s: float,
        address: str | None,
    ) -> Communicator:
        """See `Communicator.grow`."""
        return self.changes.grow(self, comm, world_size, timeout_s, address)

    def let_go(self) -> None:
        """Leave the doors of earlier worlds."""
        for door in self.kept:
            door.close()


def _told(address: Address) -> str:
    return str(address.sent())


def membership_of(comm: Communicator) -> Membership:
    """How the world of a communicator came to be, which is from `unisono.init`."""
    found = comm.core.membership
    assert isinstance(found, Membership)
    return found
