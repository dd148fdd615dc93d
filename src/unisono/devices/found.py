"""What there is of CUDA on this host, in words: for `unisono env` and `unisono doctor`.

Nothing here uses a GPU: libraries are opened and asked for their versions, and the
driver which GPUs can access each other's memory, for which no context is made.
"""

from __future__ import annotations

import ctypes
import os
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from unisono import cuda_queues
from unisono.devices import kernel_cache, nccl, nvrtc
from unisono.devices.variables import ENGINE
from unisono.errors import BadArgument, DeviceError, UsageError
from unisono.units import format_bytes

WINDOWS = "UNISONO_CUDA_WINDOWS"
"""Where the windows of device communicators are: "host" or "device"."""
_DRIVER = "libcuda.so.1"
_CHOSEN_DRIVER = "UNISONO_CUDA_DRIVER"


class Found(NamedTuple):
    """Something, whether it can be used, and what to do if not."""

    usable: bool
    words: str
    fix: str = ""


def driver() -> Found:
    """The library of NVIDIA's driver; hosts without a GPU have none."""
    try:
        library = ctypes.CDLL(_DRIVER)
        version = ctypes.c_int()
        code = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return Found(False, f"none (no {_DRIVER}): no NVIDIA GPU can be used here")
    if code != 0:
        return Found(False, f"{_DRIVER}, which does not tell its version ({code})")
    major, rest = divmod(version.value, 1000)
    return Found(True, f"{_DRIVER}, for CUDA {major}.{rest // 10}")


def compiler() -> Found:
    """NVRTC, which compiles kernels for GPUs."""
    try:
        library = nvrtc.find()
    except DeviceError as why:
        return Found(False, str(why), nvrtc.INSTALL)
    return Found(True, f"{library.version[0]}.{library.version[1]} ({library.path})")


def collectives() -> Found:
    """NCCL, which can be the engine of calls on CUDA arrays."""
    try:
        library = nccl.find()
    except DeviceError as why:
        return Found(False, str(why), nccl.INSTALL)
    return Found(True, f"{'.'.join(map(str, library.version))} ({library.path})")


def wants_nccl() -> bool:
    """Whether the environment says that NCCL carries out calls on CUDA arrays."""
    return os.environ.get(ENGINE, "") == "nccl"


def windows() -> Found:
    """Where ranks of this host have their windows, as far as it can be known before."""
    wish = os.environ.get(WINDOWS, "")
    if wish == "host":
        return Found(True, f"in host memory ({WINDOWS}=host)")
    if wish not in ("", "device"):
        said = f"{WINDOWS}={wish}: expected 'host' or 'device'"
        return Found(False, said, f"unset {WINDOWS}")
    if not driver().usable and not os.environ.get(_CHOSEN_DRIVER):
        return Found(True, "none, without a driver")
    try:
        from unisono import _native

        access = _native.cuda_access()
    except (ImportError, RuntimeError) as why:
        return Found(True, f"not known: {why}")
    apart = [
        f"cuda:{device} and cuda:{peer}"
        for device, peer in combinations(range(len(access)), 2)
        if not (access[device][peer] and access[peer][device])
    ]
    if not apart:
        return Found(True, "in device memory")
    others = f" and {len(apart) - 3} other pairs" if len(apart) > 3 else ""
    said = f"{', '.join(apart[:3])}{others} cannot access each other's memory"
    if wish == "device":
        return Found(False, f"{said}, but {WINDOWS}=device", f"unset {WINDOWS}")
    return Found(True, f"in host memory where ranks use such GPUs: {said}")


def queues() -> Found:
    """What streams share; copies of the host's should not wait behind a kernel."""
    said = f"{cuda_queues.words()}; ranks that are threads need one each"
    if cuda_queues.VARIABLE not in os.environ and cuda_queues.runs_mps():
        said += f"; set {cuda_queues.VARIABLE}={cuda_queues.DEFAULT} if streams wait"
    if cuda_queues.count() > 1:
        return Found(True, said)
    return Found(
        False,
        f"{said}, and the host's copies one of their own",
        f"unset {cuda_queues.VARIABLE}",
    )


def kernels() -> Found:
    """The folder of compiled kernels, and how much is in it."""
    try:
        if not kernel_cache.is_on():
            return Found(True, f"off ({kernel_cache.VARIABLE}=0)")
        folder = kernel_cache.CACHE.folder()
        sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
        if folder.exists():
            kernel_cache.CACHE.refuse_folders(folder)
    except BadArgument as why:
        return Found(False, str(why), f"unset {kernel_cache.VARIABLE}")
    except UsageError as why:
        return Found(False, str(why), "export XDG_CACHE_HOME=/a/folder/of/your/own")
    except OSError as why:
        return Found(False, f"cannot be read: {why}", "ls -ld ~/.cache/unisono")
    return Found(True, f"{_short(folder)}: {_amount(sizes)}")


def _amount(sizes: list[int]) -> str:
    if not sizes:
        return "empty"
    plural = "s" if len(sizes) > 1 else ""
    return f"{len(sizes)} kernel{plural}, {format_bytes(sum(sizes))}"


def _short(folder: Path) -> str:
    """With ~ for the home folder."""
    try:
        return f"~/{folder.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(folder)
