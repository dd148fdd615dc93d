"""Which engine carries out the calls of a communicator on CUDA arrays.

All ranks decide it together, at the first such call. It is unisono's own kernel, unless
`unisono.init(engine="nccl")`, `comm.engine = "nccl"` or the environment variable
UNISONO_CUDA_ENGINE says NCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from unisono import _native
from unisono.devices import nccl
from unisono.devices.variables import ENGINE as VARIABLE
from unisono.errors import BadArgument, DeviceError, UnsupportedWorld, UsageError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import DeviceCalls
from unisono.runtime.device.between_hosts import BetweenHosts
from unisono.runtime.device.engine_names import NAMES, NCCL, UNISONO, wish
from unisono.runtime.device.host_half import HostHalf, gather_bytes, gather_texts
from unisono.runtime.device.kernel_engine import KernelEngine
from unisono.runtime.device.levels import Split
from unisono.runtime.device.nccl_engine import NcclEngine
from unisono.runtime.observe.subject import DeviceCall

_NAME, _UUID, _VERSION = 16, 16, 4
"""Bytes of what ranks tell each other."""


class Engine(Protocol):
    """What carries out calls on CUDA arrays."""

    @property
    def calls(self) -> DeviceCalls:
        """Those in flight."""

    @property
    def kept(self) -> deque[Any]:
        """The arrays of calls in flight."""

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Start a call."""

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on such an array; nothing is run or made."""

    def check(self, what: str) -> None:
        """Raise the error of the communicator if a call has failed by now."""

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""


class Facts(NamedTuple):
    """What a rank says of itself."""

    engine: str
    uuid: bytes
    version: int
    """Of NCCL, as 2.27.5 is 22705; 0 if the rank has none."""


def make_engine(
    host: HostHalf, ordinal: int, given: str, split: Split | None
) -> Engine:
    """The engine of a communicator; all ranks make it at the same time.

    `split` makes groups of the communicator, for calls between hosts.
    """
    wanted = wish(given)
    version, missing = 0, ""
    if wanted.name == NCCL:
        try:
            major, minor, patch = nccl.find().version
            version = major * 10_000 + minor * 100 + patch
        except DeviceError as why:
            missing = str(why)
    about = wanted.name.encode()[:_NAME].ljust(_NAME, b"\0")
    about += _native.cuda_device(ordinal).uuid + version.to_bytes(_VERSION, "little")
    ranks = [_facts(row) for row in gather_bytes(host, about)]
    if agreed(ranks) == UNISONO:
        if not host.hosts_if_several:
            return KernelEngine(host, ordinal, wanted.why)
        if split is None:
            raise UsageError(
                "calls on CUDA arrays between hosts need a communicator that can be "
                "split"
            )
        return BetweenHosts(host, ordinal, split, wanted.why)
    refuse_missing(gather_texts(host, missing))
    refuse_nccl(ranks)
    return NcclEngine(host, ordinal, nccl.find(), wanted.why)


def agreed(ranks: Sequence[Facts]) -> str:
    """The engine that all ranks ask for."""
    for rank, facts in enumerate(ranks):
        if facts.engine not in NAMES:
            raise BadArgument(
                f"{VARIABLE}={facts.engine} (rank {rank}): expected 'unisono' or 'nccl'"
            )
    first = ranks[0].engine
    other = next((r for r, facts in enumerate(ranks) if facts.engine != first), None)
    if other is not None:
        raise BadArgument(
            f"the engine for CUDA arrays is {first!r} on rank 0 and "
            f"{ranks[other].engine!r} on rank {other}: all ranks must agree, by "
            f"engine= or {VARIABLE}"
        )
    return first


def refuse_missing(reasons: Sequence[str]) -> None:
    """Raise DeviceError if a rank has no NCCL."""
    for rank, why in enumerate(reasons):
        if why:
            raise DeviceError(f"engine 'nccl' cannot be used; rank {rank}: {why}")


def refuse_nccl(ranks: Sequence[Facts]) -> None:
    """Raise if ranks share a GPU, which NCCL cannot, or have different versions."""
    first: dict[bytes, int] = {}
    for rank, facts in enumerate(ranks):
        if facts.uuid in first:
            raise UnsupportedWorld(
                f"engine 'nccl': ranks {first[facts.uuid]} and {rank} use the same "
                "GPU, and NCCL needs one for each rank. Give each rank its own, as "
                "with torch.cuda.set_device(local_rank), or use unisono's own kernel, "
                f"which ranks can share a GPU with: engine='unisono', or unset "
                f"{VARIABLE}",
                n=len(ranks),
            )
        first[facts.uuid] = rank
    versions = [facts.version for facts in ranks]
    other = next((r for r, v in enumerate(versions) if v != versions[0]), None)
    if other is not None:
        raise DeviceError(
            f"engine 'nccl': rank 0 has version {versions[0]} of NCCL, rank {other} "
            f"has {versions[other]}: install the same on all hosts, or name it with "
            f"{nccl.VARIABLE}"
        )


def _facts(row: bytes) -> Facts:
    name, rest = row[:_NAME], row[_NAME:]
    said = name.rstrip(b"\0").decode(errors="replace")
    return Facts(said, rest[:_UUID], int.from_bytes(rest[_UUID:], "little"))
