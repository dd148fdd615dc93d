"""The interpreter kernel, compiled for one GPU, element type and operation.

The sources are text in the native core, so source and binary are of one version. They
are compiled by NVRTC when first needed, in two to four seconds, and the result is kept
in the user's cache folder (`kernel_cache.py`).

The options keep the bits of the CPU's engine: no fused multiply-add, division as IEEE
754 rounds it, and subnormal numbers are kept.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

from unisono import _native
from unisono.devices import kernel_cache
from unisono.devices.nvrtc import INSTALL, VARIABLE, Nvrtc, find
from unisono.devices.once import OncePerKey
from unisono.dtypes import DTYPES, REDUCTIONS, check_op
from unisono.errors import NvrtcTooOld, UnsupportedDevice, unknown

ENTRIES = "unisono_interpret", "unisono_exchange"
"""The names of the kernels in the image."""

_MAIN = "device/kernel.cu"
_OLDEST_DEVICE = (7, 0)
# The NVRTC that first knew the architectures of each major compute capability.
_SINCE = {8: "11.0", 9: "11.8", 10: "12.8", 11: "13.0", 12: "12.8"}
_OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)


def compile_kernel(
    capability: tuple[int, int], dtype: str, op: str, *, one_device: bool = False
) -> bytes:
    """A cubin for GPUs of a compute capability, as `cuModuleLoadData` takes it.

    For worlds on one device it is faster. DeviceError if it cannot be had: no NVRTC, or
    one that does not suit the GPU.
    """
    nvrtc = find()
    arch = architecture(nvrtc, capability)
    options = options_for(arch, dtype, op)
    if one_device:
        options += ("-DUNISONO_ONE_DEVICE",)
    key = f"sm_{arch}-{dtype}-{op}-{_digest(nvrtc, options)}"

    def make() -> bytes:
        return nvrtc.compile(_MAIN, sources(), options).image

    return _IMAGES.get(key, lambda: kernel_cache.fetch(key, make))


def options_for(arch: int, dtype: str, op: str) -> tuple[str, ...]:
    """What NVRTC is told; BadArgument if there is no such type or operation."""
    if dtype not in DTYPES:
        raise unknown("element type", dtype, DTYPES)
    if op not in REDUCTIONS:
        raise unknown("reduction", op, REDUCTIONS)
    check_op(DTYPES[dtype], op)
    return (
        f"--gpu-architecture=sm_{arch}",
        *_OPTIONS,
        f"-DUNISONO_DTYPE={DTYPES[dtype].code}",
        f"-DUNISONO_OP={REDUCTIONS[op]}",
    )


@cache
def sources() -> dict[str, str]:
    """The kernel's source and what it includes, by the names that are included."""
    return _native.device_sources()


def architecture(nvrtc: Nvrtc, capability: tuple[int, int]) -> int:
    """The newest architecture that this NVRTC knows and the GPU runs.

    A GPU runs code for its own major compute capability with the same minor one or an
    older one.
    """
    known, wanted = nvrtc.architectures(), 10 * capability[0] + capability[1]
    suitable = [a for a in known if a // 10 == capability[0] and a <= wanted]
    if suitable and capability >= _OLDEST_DEVICE:
        return max(suitable)
    gpu = f"this GPU has compute capability {_dotted(wanted)}"
    if capability < _OLDEST_DEVICE:
        raise UnsupportedDevice(
            f"{gpu}; unisono needs {_OLDEST_DEVICE[0]}.{_OLDEST_DEVICE[1]} or newer",
            capability=capability,
        )
    range_ = f"{nvrtc} compiles for {_dotted(known[0])} to {_dotted(known[-1])}"
    if wanted < known[0]:
        raise UnsupportedDevice(
            f"{gpu}, and {range_}; an older NVRTC does it: "
            f"pip install nvidia-cuda-nvrtc-cu12, and name it by {VARIABLE}=/path",
            capability=capability,
        )
    since = _SINCE.get(capability[0])
    needed = f"NVRTC {since} or newer" if since else "the newest NVRTC"
    raise NvrtcTooOld(
        f"{gpu}, and {range_}; {needed} is needed: {INSTALL} --upgrade, or name one by "
        f"{VARIABLE}=/path",
        version=nvrtc.version,
        capability=capability,
    )


def _dotted(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _digest(nvrtc: Nvrtc, options: tuple[str, ...]) -> str:
    """Of all that the image depends on."""
    facts = [sorted(sources().items()), options, nvrtc.version]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


_IMAGES: OncePerKey[bytes] = OncePerKey()
