"""What is needed to form the next world of a job: name, epoch, rendezvous options.

Every world of a job has an epoch of its own, larger than those before. So no message of
an earlier world is taken for one of a later world.
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
from unisono.transports.base import Transport
from unisono.transports.endpoints import Door
from unisono.transports.secret import Secret


class ResizeFunctions(NamedTuple):
    """The functions that resize a world; their modules import this one."""

    shrink: Callable[[Membership, Communicator, float, Sequence[int]], Communicator]
    grow: Callable[[Membership, Communicator, int, float, str | None], Communicator]


@dataclass(frozen=True)
class Membership:
    """This process's membership in a job, in the world of one epoch.

    `across`: the ranks meet over TCP; `address` is then the job's own, to which joining
    ranks connect. `kept` are endpoints of earlier worlds to which ranks that were left
    out may still connect.
    """

    job: str
    changes: ResizeFunctions
    epoch: int = 0
    across: bool = False
    address: str = ""
    secret: Secret | None = None
    interface: str | None = None
    insecure: bool = False
    tls: bool = False
    kept: tuple[Door, ...] = ()

    def later(self, epoch: int, kept: tuple[Door, ...] = ()) -> Membership:
        """The membership in a later world."""
        return replace(self, epoch=epoch, kept=self.kept + kept)

    def rendezvous(
        self,
        rank: int,
        world_size: int,
        place: str,
        *,
        timeout_s: float,
        announce: Callable[[str], None] = lambda place: None,
        lost: Callable[[], str] = str,
    ) -> Transport:
        """Rendezvous with the others of this epoch.

        `place` is an address that all know, or on one host any name. Rank 0 may give
        port 0; `announce` is called with the address that it then has.
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
                announce=lambda found: announce(str(found.sent())),
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

    def release(self) -> None:
        """Close the endpoints of earlier worlds."""
        for endpoint in self.kept:
            endpoint.close()


def membership_of(comm: Communicator) -> Membership:
    """The membership of a communicator from `unisono.init`."""
    found = comm.core.membership
    assert isinstance(found, Membership)
    return found
