"""What this host has for RDMA: UCX, devices, GPUDirect, huge pages.

None of it is needed, unless the transport is `ucx` (UNISONO_FABRIC).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono.cli._doctor.limits import memory_limit
from unisono.transports import ucx
from unisono.transports.registry import FABRIC

_DEVICES = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")
_MODULES = Path("/sys/module")
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")


class Fact(NamedTuple):
    """Something that is there or not; `fix` is how to get it.

    Without what is `needed` UCX does not work, or is no faster than TCP.
    """

    name: str
    there: bool
    words: str
    fix: str = ""
    needed: bool = True


def is_wanted() -> bool:
    """Whether a world that is started here would use UCX."""
    return os.environ.get(FABRIC, "") == ucx.Ucx.name


def facts() -> Iterator[Fact]:
    """All, in the order in which they depend on each other."""
    yield library()
    devices = rdma()
    yield devices
    if devices.there:
        yield locked_memory()
    yield gpu_direct()
    yield huge_pages()


def library() -> Fact:
    """Whether libucp can be loaded; this loads it."""
    why = ucx.Ucx().unavailable()
    if why:
        return Fact("UCX", False, "not found", why)
    return Fact("UCX", True, ucx.describe())


def rdma() -> Fact:
    """The RDMA devices, the state of their ports, and whether they may be opened."""
    found = [_described(device) for device in _listed(_DEVICES)]
    if not found:
        return Fact(
            *("RDMA", False, f"no device in {_DEVICES}: UCX would use TCP"),
            "load the driver of the network card, as by `sudo modprobe mlx5_ib`, and "
            "look at `rdma link`; in a container: docker run --device=/dev/infiniband",
        )
    words = "; ".join(found)
    if not any(entry.name.startswith("uverbs") for entry in _listed(_VERBS)):
        return Fact(
            *("RDMA", False, f"{words}, but {_VERBS} has no uverbs device"),
            "sudo modprobe ib_uverbs; in a container: docker run "
            "--device=/dev/infiniband",
        )
    return Fact("RDMA", True, words)


def locked_memory() -> Fact:
    """RDMA pins the memory that it reads and writes."""
    unlimited, words = memory_limit(resource.RLIMIT_MEMLOCK)
    fix = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1"
    return Fact("RDMA memory", unlimited, f"{words} may be locked", fix)


def gpu_direct() -> Fact:
    """Whether a network card could read a GPU's memory."""
    for module in _PEER_MEMORY:
        if (_MODULES / module).exists():
            words = f"{module} is loaded; arrays on GPUs go through host memory so far"
            return Fact("GPUDirect", True, words, needed=False)
    return Fact(
        *("GPUDirect", False, f"{_PEER_MEMORY[0]} is not loaded"),
        f"sudo modprobe {_PEER_MEMORY[0].replace('_', '-')}, with NVIDIA's driver",
        needed=False,
    )


def huge_pages() -> Fact:
    """Fewer entries in the tables of a network card."""
    try:
        chosen = _HUGE.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = ""
    reserved = 0
    for line in _lines(_MEMORY):
        if line.startswith("HugePages_Total:"):
            reserved = int(line.split()[1])
    words = f"transparent: {chosen or 'not known'}; reserved: {reserved}"
    there = chosen in ("always", "madvise") or reserved > 0
    fix = f"echo madvise | sudo tee {_HUGE}"
    return Fact("huge pages", there, words, fix, needed=False)


def _described(device: Path) -> str:
    ports = [
        " ".join(
            [
                f"port {port.name}",
                _line(port / "state").partition(":")[2].strip().lower(),
                _line(port / "link_layer"),
                _line(port / "rate"),
            ]
        )
        for port in _listed(device / "ports")
    ]
    return f"{device.name} ({', '.join(ports) or 'no port'})"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _line(file: Path) -> str:
    return next(iter(_lines(file)), "").strip()
