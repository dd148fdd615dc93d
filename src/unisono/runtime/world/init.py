"""`unisono.init`: find rank and world size, rendezvous, make the communicator."""

from __future__ import annotations

import os

from unisono import _native, cuda_queues
from unisono.deprecation import warn_renamed
from unisono.errors import BadArgument
from unisono.runtime.call.options import names_options
from unisono.runtime.call.timeouts import default_timeout_s, nanoseconds
from unisono.runtime.communicator import Communicator
from unisono.runtime.device.engine_names import checked
from unisono.runtime.world import grow, shrink
from unisono.runtime.world.address import ADDRESS, no_secret, rendezvous_address
from unisono.runtime.world.environment import WorldEnvironment, find_world
from unisono.runtime.world.first import (
    RENDEZVOUS_TIMEOUT_S,
    first_communicator,
    next_epoch,
)
from unisono.runtime.world.membership import Membership, ResizeFunctions
from unisono.transports.addresses import Address, is_loopback
from unisono.transports.registry import FABRIC
from unisono.transports.secret import find_secret
from unisono.transports.tls import TLS, wanted

JOIN = "UNISONO_JOIN"
_CHANGES = ResizeFunctions(shrink.shrink, grow.grow)


@names_options(
    {
        "timeout": "timeout_s",
        "backend": "fabric",
        "transport": "fabric",
        "size": "world_size",
        "master_addr": "the address of rank 0 is UNISONO_ADDRESS=host:port",
        "init_method": "the address of rank 0 is UNISONO_ADDRESS=host:port",
    }
)
def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    job: str | None = None,
    timeout_s: float | None = None,
    rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    insecure: bool = False,
    tls: str | None = None,
    fabric: str | None = None,
    join: bool | None = None,
    engine: str | None = None,
    meeting_s: float | None = None,
) -> Communicator:
    """The communicator of all ranks of this job.

    Rank and world size come from the arguments or from the launcher of this process:
    unisono run, torchrun, mpirun, srun; without a launcher it is a world of one.
    `timeout_s` is the timeout of every call, `rendezvous_timeout_s` that of the
    rendezvous with the other ranks. Across hosts a job has a secret, unless `insecure`;
    with tls="mutual", or UNISONO_TLS, the same on all ranks, everything between hosts
    is encrypted. `fabric`, or UNISONO_FABRIC, the same on all ranks, names the
    transport; by default ranks of one host share memory, and ranks of several connect
    by TCP. `engine`, or UNISONO_CUDA_ENGINE, the same on all ranks, is who carries out
    calls on CUDA arrays: "unisono" (the default) or "nccl".

    With `join`, or UNISONO_JOIN=1, this process joins a running job, whose ranks call
    `comm.grow`: rank and world size are then assigned by the job. `meeting_s` is the
    old name of `rendezvous_timeout_s`.
    """
    if meeting_s is not None:
        warn_renamed("init(meeting_s=)", "init(rendezvous_timeout_s=)")
        rendezvous_timeout_s = meeting_s
    cuda_queues.drop_inherited()
    if engine is not None:
        checked(engine)  # refuse a bad one before the rendezvous
    encrypted = wanted(tls) or wanted(os.environ.get(TLS), TLS)
    if join or (join is None and os.environ.get(JOIN, "0") != "0"):
        comm = _join(
            rank,
            world_size,
            job,
            timeout_s,
            rendezvous_timeout_s,
            insecure,
            encrypted,
            fabric,
        )
        comm.core.device.given = engine or ""
        return comm
    world = find_world(os.environ, rank=rank, world_size=world_size, job=job)
    limit = default_timeout_s() if timeout_s is None else float(timeout_s)
    nanoseconds(limit)  # refuse a bad one before the rendezvous
    _arm_failpoints()
    member = membership(world, insecure, encrypted, fabric)
    address = member.address if member.across else ""
    session = member.rendezvous(
        world.rank, world.world_size, address, timeout_s=rendezvous_timeout_s
    )
    comm = first_communicator(
        session, timeout_s=limit, rendezvous_timeout_s=rendezvous_timeout_s
    )
    comm.core.membership = member
    comm.core.device.given = engine or ""
    return comm


def _join(
    rank: int | None,
    world_size: int | None,
    job: str | None,
    timeout_s: float | None,
    rendezvous_timeout_s: float,
    insecure: bool,
    tls: bool,
    fabric: str | None,
) -> Communicator:
    if rank is not None or world_size is not None:
        raise BadArgument(
            f"rank = {rank}, world_size = {world_size}: with join the job assigns "
            "both; leave them out"
        )
    limit = default_timeout_s() if timeout_s is None else float(timeout_s)
    nanoseconds(limit)
    return grow.join(
        job or os.environ.get("UNISONO_JOB", ""),
        os.environ.get(ADDRESS, ""),
        changes=_CHANGES,
        timeout_s=limit,
        rendezvous_timeout_s=rendezvous_timeout_s,
        insecure=insecure,
        tls=tls,
        fabric=_fabric(fabric),
    )


def _fabric(name: str | None) -> str:
    """The name of the transport that is asked for; "" for the default."""
    return name if name is not None else os.environ.get(FABRIC, "")


def membership(
    world: WorldEnvironment,
    insecure: bool = False,
    tls: bool = False,
    fabric: str | None = None,
) -> Membership:
    """The membership of a process that starts with its job."""
    # A process may leave and join again: each time in an epoch of its own.
    epoch = next_epoch(world.job) if world.world_size > 1 else 0
    if world.hosts_several or os.environ.get(ADDRESS):
        address = rendezvous_address(world).address
        secret = find_secret(os.environ)
        if secret is None and not insecure and not _is_local(address):
            raise no_secret(world)
        interface = os.environ.get("UNISONO_INTERFACE")
        return Membership(
            world.job,
            _CHANGES,
            epoch,
            across=True,
            address=address,
            secret=secret,
            interface=interface,
            insecure=insecure,
            tls=tls,
            fabric=_fabric(fabric),
        )
    return Membership(world.job, _CHANGES, epoch, fabric=_fabric(fabric))


def _is_local(address: str) -> bool:
    """Whether the address is a loopback address, closed to other hosts."""
    found = Address.parse(address).resolve()
    return all(is_loopback(str(where[0])) for _, where in found)


def _arm_failpoints() -> None:
    spec = os.environ.get("UNISONO_FAILPOINTS", "")
    if spec and not _native.TEST_HOOKS:
        raise BadArgument(
            "UNISONO_FAILPOINTS is set, but this build of unisono has no failpoints: "
            "they are in editable installs (pip install -e .)"
        )
    if spec:
        _native.arm_failpoints(spec)
