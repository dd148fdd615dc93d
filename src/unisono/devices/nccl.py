"""NCCL, NVIDIA's collectives: where the library is, and its functions with types.

Nothing of it is needed to build or install unisono. It is opened when a communicator
whose engine is NCCL makes its first call on CUDA arrays, from the first of these places
that has one, version 2.18 or newer:

1. the file that the environment variable UNISONO_NCCL names;
2. a library that this process has loaded, as torch does;
3. the wheels nvidia-nccl-cu13 and nvidia-nccl-cu12;
4. the folder of torch's own libraries;
5. wherever the dynamic loader finds it.

Types and numbers are those of nccl.h, as far as they are used.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p

from unisono.devices.libraries import (
    Places,
    find_library,
    function_of,
    loaded,
    newest_first,
    package_folders,
)
from unisono.errors import DeviceError, NcclMissing

VARIABLE = "UNISONO_NCCL"
INSTALL = "pip install nvidia-nccl-cu13"
OLDEST = (2, 18)
"""Calls need not block since 2.14; the form of its settings is that of 2.18."""
SUCCESS, IN_PROGRESS = 0, 7
ID_BYTES = 128
TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""The element types that it reduces in every version."""
SUM, PROD, MAX, MIN, AVG = range(5)
_FILE = re.compile(r"libnccl\.so(?P<version>[.\d]*)")
_MAGIC = 0xCAFEBEEF
_SETTINGS_VERSION = 21800
_UNSET = -(1 << 31)


class UniqueId(ctypes.Structure):
    """By which the ranks of a communicator find each other; passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * ID_BYTES),)


class Settings(ctypes.Structure):
    """ncclConfig_t of 2.18: newer versions read as much as its size says."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("fewest_ctas", c_int),
        ("most_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("reserved", c_int),
    )


_DATA = c_void_p, c_size_t, c_int  # an address, a number of elements, a type
_WHERE = c_void_p, c_void_p  # a communicator and a stream
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        *(POINTER(c_void_p), c_int, UniqueId, c_int),
        POINTER(Settings),
    ),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (c_void_p, *_DATA, c_int, *_WHERE),
    "ncclReduce": (c_void_p, *_DATA, c_int, c_int, *_WHERE),
    "ncclBroadcast": (c_void_p, *_DATA, c_int, *_WHERE),
    "ncclAllGather": (c_void_p, *_DATA, *_WHERE),
    "ncclReduceScatter": (c_void_p, *_DATA, c_int, *_WHERE),
    "ncclSend": (*_DATA, c_int, *_WHERE),
    "ncclRecv": (*_DATA, c_int, *_WHERE),
}
"""All return an error code."""


class Nccl:
    """One library, opened. OSError if it cannot be, or is none."""

    def __init__(self, path: str) -> None:
        """Open it and ask for its version."""
        self._library = ctypes.CDLL(path)
        self.path = path if "/" in path else next(loaded(_FILE), path)
        self._known: dict[str, Callable[..., int]] = {}
        code = c_int()
        self.call("ncclGetVersion", ctypes.byref(code))
        major, rest = divmod(code.value, 10_000)
        self.version = (major, *divmod(rest, 100))

    def __str__(self) -> str:
        """Version and path."""
        return f"NCCL {'.'.join(map(str, self.version))} ({self.path})"

    def call(self, name: str, *arguments: object) -> int:
        """What a function returns."""
        function = self._known.get(name)
        if function is None:
            function = self._known[name] = self._raw(name)
        return function(*arguments)

    def _raw(self, name: str) -> Callable[..., int]:
        return function_of(self._library, name, _FUNCTIONS[name])

    def unique_id(self) -> bytes:
        """By which the ranks of a new communicator find each other."""
        made = UniqueId()
        code = self.call("ncclGetUniqueId", ctypes.byref(made))
        if code != SUCCESS:
            raise self.error("ncclGetUniqueId", code)
        return bytes(made.bytes)

    def error(self, function: str, code: int, comm: int | None = None) -> DeviceError:
        """The error of a function, with NCCL's words."""
        said = self._text("ncclGetErrorString", c_int(code)) or "an unknown error"
        more = self._text("ncclGetLastError", c_void_p(comm))
        return DeviceError(
            f"{function} of {self} failed: {said} ({code})"
            f"{f': {more}' if more else ''}; NCCL_DEBUG=WARN prints more"
        )

    def _text(self, name: str, argument: object) -> str:
        function = getattr(self._library, name, None)
        if function is None:
            return ""
        function.restype = c_char_p
        return (function(argument) or b"").decode(errors="replace").strip()


def settings() -> Settings:
    """Of a communicator whose functions do not block; all else is NCCL's own choice."""
    made = Settings(ctypes.sizeof(Settings), _MAGIC, _SETTINGS_VERSION, 0)
    made.cga_cluster_size = made.fewest_ctas = made.most_ctas = _UNSET
    made.split_share = made.reserved = _UNSET
    return made


@functools.cache
def find() -> Nccl:
    """The first there is; NcclMissing says where it was looked for."""
    return find_library(
        VARIABLE,
        _PLACES,
        Nccl,
        OLDEST,
        unusable=_unusable,
        too_old=_too_old,
        missing=_missing,
    )


def _missing(looked: list[str]) -> NcclMissing:
    return NcclMissing(
        f"NCCL was not found; {INSTALL} (or nvidia-nccl-cu12), or name the library: "
        f"{VARIABLE}=/path/to/libnccl.so.2. Looked in: {'; '.join(looked)}",
        looked=looked,
    )


def _unusable(path: str, why: OSError) -> NcclMissing:
    return NcclMissing(
        f"{VARIABLE}={path} cannot be used: {why}; give the path of a libnccl.so, "
        f"or unset it and {INSTALL}",
        looked=[f"{VARIABLE}: {why}"],
    )


def _too_old(found: Nccl) -> NcclMissing:
    oldest = ".".join(map(str, OLDEST))
    return NcclMissing(
        f"{found} is too old: version {oldest} or newer is needed; {INSTALL}",
        looked=[str(found)],
    )


# Places, each of which yields paths


def _loaded() -> Iterator[str]:
    """Libraries that this process has mapped."""
    yield from loaded(_FILE)


def _wheels() -> Iterator[str]:
    """Those for CUDA 12 and 13 have the same folder."""
    for folder in package_folders("nvidia"):
        yield from newest_first(folder.glob("*/lib/libnccl*"), _FILE)


def _torch() -> Iterator[str]:
    for folder in package_folders("torch"):
        yield from newest_first((folder / "lib").glob("libnccl*"), _FILE)


def _loader() -> Iterator[str]:
    """Names without a folder, which the dynamic loader looks for."""
    yield from ("libnccl.so.2", "libnccl.so")


_PLACES: Places = (
    ("libraries of this process", _loaded),
    ("wheels in site-packages", _wheels),
    ("torch's libraries", _torch),
    ("the dynamic loader", _loader),
)
