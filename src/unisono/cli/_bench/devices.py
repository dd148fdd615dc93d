"""Where ranks are: on the CPU or on GPUs; what can be measured there, and what to note.

Ranks that share a GPU have no link between them, so their bus bandwidth means nothing
and is not reported. What bounds them is the memory of the GPU, which they read and
write at best as fast as the driver copies inside it: the share of that is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unisono import _native, cuda_queues
from unisono.cli._bench.cases import COLLECTIVES, ON_DEVICES
from unisono.errors import BadArgument, MissingExtra, unknown
from unisono.units import format_bytes

CPU, CUDA = "cpu", "cuda"
PROCESSES, STREAMS = "processes", "streams"
DEVICE_PEERS = ("nccl", "gloo")
MOST_STREAMS = cuda_queues.MOST
"""Kernels of more streams could wait for each other."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of unisono are; `per_host` emulates hosts."""

    per_host: int = 0
    device: str = CPU
    ranks_as: str = PROCESSES

    @property
    def on_device(self) -> bool:
        """Whether the arrays are on GPUs."""
        return self.device == CUDA

    @property
    def as_streams(self) -> bool:
        """Whether the ranks are threads of one process."""
        return self.ranks_as == STREAMS

    def check(self, n: int) -> None:
        """Raise BadArgument if it cannot be."""
        _known("device", self.device, (CPU, CUDA))
        _known("kind of ranks", self.ranks_as, (PROCESSES, STREAMS))
        if not self.on_device:
            if self.as_streams:
                raise BadArgument("--ranks-as streams: needs --device cuda")
            return
        if self.per_host:
            raise BadArgument("--per-host: bench measures CUDA arrays inside one host")
        if self.as_streams and n > MOST_STREAMS:
            raise BadArgument(f"--ranks-as streams: at most {MOST_STREAMS} ranks")
        num_devices()


def _known(kind: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise unknown(kind, name, names)


def num_devices() -> int:
    """How many GPUs there are, at least one."""
    try:
        count = _native.cuda_device_count()
    except _native.CudaError as why:
        raise BadArgument(f"--device cuda: {why}") from why
    if not count:
        raise BadArgument("--device cuda: the driver finds no GPU")
    return count


def collectives_on_devices(names: Sequence[str]) -> list[str]:
    """Those of `names` that CUDA arrays have, if all are named; else all must be."""
    if list(names) == list(COLLECTIVES):
        return list(ON_DEVICES)
    for name in names:
        if name not in ON_DEVICES:
            raise BadArgument(
                f"{name}: not offered on CUDA arrays; measure it with --device cpu"
            )
    return list(names)


def check_peers(peers: Sequence[str], n: int) -> None:
    """Raise BadArgument if a peer cannot be measured on the GPUs of this machine."""
    for name in peers:
        if name not in DEVICE_PEERS:
            raise BadArgument(
                f"--vs {name}: on CUDA arrays the peers are {', '.join(DEVICE_PEERS)}"
            )
    count = num_devices()
    if "nccl" in peers and count < n:
        raise BadArgument(
            f"--vs nccl: {n} ranks, but GPUs here: {count}; NCCL refuses two ranks on "
            f"one GPU, so take -n {count}, or a machine with a GPU for each rank"
        )
    for name in peers:
        _check_torch(name)


def _check_torch(peer: str) -> None:
    if not find_spec("torch"):
        raise MissingExtra("torch", f"--vs {peer}")
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        raise BadArgument(
            f"--vs {peer}: torch {torch.__version__} has no CUDA or finds no GPU; "
            "install a torch for CUDA"
        )
    if peer == "nccl" and not torch.distributed.is_nccl_available():
        raise BadArgument(f"--vs nccl: torch {torch.__version__} is without NCCL")


@dataclass(frozen=True)
class RankDevice:
    """The GPU of a rank, as the rank knows it."""

    ordinal: int
    name: str
    memory: int
    has_mps: bool
    is_emulated: bool


@dataclass(frozen=True)
class DeviceUse:
    """How ranks use GPUs, which says what bounds them."""

    devices: tuple[RankDevice, ...]
    copy_speed: float = math.nan
    """Bytes per second of the one that all share, read and written."""

    @classmethod
    def of(cls, devices: Sequence[dict[str, Any]]) -> DeviceUse:
        """From what the ranks tell."""
        return cls(tuple(RankDevice(**about) for about in devices))

    @property
    def ranks_by_device(self) -> dict[int, int]:
        """How many ranks each GPU has."""
        ordinals = [device.ordinal for device in self.devices]
        return {ordinal: ordinals.count(ordinal) for ordinal in dict.fromkeys(ordinals)}

    @property
    def most_ranks(self) -> int:
        """On one GPU."""
        return max(self.ranks_by_device.values())

    @property
    def has_links(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.most_ranks == 1

    @property
    def is_one_device(self) -> bool:
        """Whether all ranks, more than one, share one GPU."""
        return len(self.ranks_by_device) == 1 and not self.has_links

    def notes(self, place: Placement) -> list[str]:
        """What a reader of the times must know."""
        notes = []
        first = self.devices[0]
        if first.is_emulated:
            notes.append(
                "the driver is emulated by threads of the CPU: times of no GPU"
            )
        elif not self.has_links and not place.as_streams and not first.has_mps:
            notes.append(
                f"{self.most_ranks} processes share a GPU without MPS: it runs them by "
                "turns, which is slow; `nvidia-cuda-mps-control -d` starts MPS, "
                "--ranks-as streams needs none"
            )
        return notes

    def refuse_too_large(self, nbytes: int, systems: int) -> None:
        """Raise BadArgument if a GPU has not the memory for arrays of such a size."""
        needed = 3 * nbytes * systems * self.most_ranks
        memory = min(device.memory for device in self.devices)
        if needed > memory:
            raise BadArgument(
                f"-e {nbytes}: the buffers of {self.most_ranks} ranks need "
                f"{format_bytes(needed)}, and a GPU has {format_bytes(memory)}; "
                "take a smaller size"
            )
