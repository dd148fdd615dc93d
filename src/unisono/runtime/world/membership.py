"""What is needed to form the next world of a job: name, epoch, rendezvous options.

Every world of a job has an epoch of its own, larger than those before. So no message of
an earlier world is taken for one of a later world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import unisono
from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator
from unisono.runtime.plan import tuned
from unisono.transports import registry
from unisono.transports.endpoints import ShrinkEndpoint
from unisono.transports.interface import ConnectOptions, Transport
from unisono.transports.secret import Secret
from unisono.transports.session import Session


class ResizeFunctions(NamedTuple):
    """The functions that resize a world; their modules import this one."""

    shrink: Callable[[Membership, Communicator, float, Sequence[int]], Communicator]
    grow: Callable[[Membership, Communicator, int, float, str | None], Communicator]


@dataclass(frozen=True)
class Membership:
    """This process's membership in a job, in the world of one epoch.

    `across`: the ranks connect by an address; `address` is then the job's own, to which
    joining ranks connect. `fabric` names the transport; if it is "", that is TCP if
    `across`, and else shared memory. `kept` are endpoints of earlier worlds to which
    ranks that were left out may still connect.
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
    fabric: str = ""
    kept: tuple[ShrinkEndpoint, ...] = ()

    def later(self, epoch: int, kept: tuple[ShrinkEndpoint, ...] = ()) -> Membership:
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
    ) -> Session:
        """Rendezvous with the others of this epoch.

        `place` is an address that all know, or on one host any name. Rank 0 may give
        port 0; `announce` is called with the address that it then has.
        """
        options = ConnectOptions(
            rank,
            world_size,
            self.job,
            unisono.__version__,
            timeout_s=timeout_s,
            epoch=self.epoch,
            address=place,
            secret=self.secret,
            interface=self.interface,
            insecure=self.insecure,
            tls=self.tls,
            announce=announce,
            lost=lost,
            tuned=rank == 0 and tuned.is_there(),
        )
        return self._transport(world_size).connect(options)

    def _transport(self, world_size: int) -> Transport:
        if world_size == 1:
            return registry.get("threads")
        found = registry.get(self.fabric or ("tcp" if self.across else "shm"))
        if self.across and not found.capabilities.between_hosts:
            raise BadArgument(
                f"the transport {found.name!r} connects ranks of one host only; it "
                "takes no address (UNISONO_ADDRESS)"
            )
        if found.capabilities.between_hosts and not self.across:
            raise BadArgument(
                f"the transport {found.name!r} connects ranks by an address, and there "
                "is none: set UNISONO_ADDRESS to host:port of rank 0, the same on all "
                "ranks; or name no transport (UNISONO_FABRIC), since ranks of one host "
                "share memory"
            )
        if self.tls and not found.capabilities.encryption:
            raise BadArgument(
                f"tls: the transport {found.name!r} does not encrypt; choose another "
                "one, such as tcp"
            )
        return found

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
