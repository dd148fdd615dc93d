"""NVRTC, NVIDIA's compiler at run time: where it is, and its functions with types.

Nothing of CUDA is needed to build or install unisono. NVRTC is opened when a kernel is
to be compiled, from the first of these places that has one, version 12 or newer:

1. the file that the environment variable UNISONO_NVRTC names;
2. a library that this process has loaded, as torch does;
3. the wheels nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu13 and nvidia-cuda-nvrtc-cu12;
4. the folder of torch's own libraries;
5. a toolkit: CUDA_HOME, CUDA_PATH, /usr/local/cuda*, the newest of these first;
6. wherever the dynamic loader finds it.

It needs no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

from unisono.devices.libraries import (
    Places,
    find_library,
    function_of,
    loaded,
    newest_first,
    numbers,
    package_folders,
)
from unisono.errors import CompilationFailed, NvrtcMissing, NvrtcTooOld

VARIABLE = "UNISONO_NVRTC"
INSTALL = "pip install nvidia-cuda-nvrtc"
OLDEST = (12, 0)  # that has C++20
_FILE = re.compile(r"libnvrtc(-[0-9a-f]+)?\.so(?P<version>[.\d]*)")
_USUAL = Path("/usr/local")
_LINES = 30  # of the compiler's, in an error

_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (
        *(POINTER(c_void_p), c_char_p, c_char_p),
        *(c_int, POINTER(c_char_p), POINTER(c_char_p)),
    ),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}
"""All return an error code. The first three work without a program."""


class Compiled(NamedTuple):
    """A cubin, and what the compiler printed."""

    image: bytes
    log: str


class Nvrtc:
    """One library, opened. OSError if it cannot be, or is none."""

    def __init__(self, path: str) -> None:
        """Open it and ask for its version; one that is too old has no more."""
        self._library = ctypes.CDLL(path)
        self.path = path if "/" in path else next(iter(_loaded()), path)
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._open_builtins()

    def __str__(self) -> str:
        """Version and path."""
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def architectures(self) -> list[int]:
        """Those it compiles for, ascending: 90 is compute capability 9.0."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile(
        self, main: str, sources: Mapping[str, str], options: Sequence[str]
    ) -> Compiled:
        """Compile the source named `main`, which may include the others by name."""
        headers = {name: text for name, text in sources.items() if name != main}
        program = c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            sources[main].encode(),
            main.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        try:
            code = self._raw("nvrtcCompileProgram")(
                program, len(options), _strings(options)
            )
            log = self._text(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
            if code != 0:
                raise self._failed(main, options, code, log)
            return Compiled(self._text(program, "nvrtcGetCUBIN"), log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _open_builtins(self) -> None:
        """NVRTC opens this by its name alone, which is found if it is open already.

        Usually the loader looks beside NVRTC; not under a sanitizer, which is asked in
        its place.
        """
        name = "libnvrtc-builtins.so.{}.{}".format(*self.version)
        with suppress(OSError):
            ctypes.CDLL(str(Path(self.path).with_name(name)))

    def _text(self, program: c_void_p, name: str) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(name, program, text)
        return text.raw

    def _failed(
        self, main: str, options: Sequence[str], code: int, log: str
    ) -> CompilationFailed:
        head = "\n".join(log.splitlines()[:_LINES])
        return CompilationFailed(
            f"{self} could not compile {main} ({self._reason(code)}) with "
            f"{' '.join(options)}; please report it with the output of `unisono env`:\n"
            f"{head}",
            log=log,
        )

    def _raw(self, name: str) -> Callable[..., int]:
        return function_of(self._library, name, _FUNCTIONS[name])

    def _call(self, name: str, *arguments: object) -> None:
        code = self._raw(name)(*arguments)
        if code != 0:
            raise OSError(f"{name} of {self._library._name}: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        function = self._library.nvrtcGetErrorString
        function.argtypes, function.restype = (c_int,), c_char_p
        return str(function(code).decode())


def _strings(texts: Iterable[str]) -> ctypes.Array[c_char_p]:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


@functools.cache
def find() -> Nvrtc:
    """The first there is; NvrtcMissing says where it was looked for."""
    return find_library(
        VARIABLE,
        _PLACES,
        Nvrtc,
        OLDEST,
        unusable=_unusable,
        too_old=_too_old,
        missing=_missing,
    )


def _missing(looked: list[str]) -> NvrtcMissing:
    return NvrtcMissing(
        "kernels for GPUs are compiled by NVRTC, which was not found; "
        f"{INSTALL}, or name the library: {VARIABLE}=/path/to/libnvrtc.so. "
        f"Looked in: {'; '.join(looked)}",
        looked=looked,
    )


def _unusable(path: str, why: OSError) -> NvrtcMissing:
    return NvrtcMissing(
        f"{VARIABLE}={path} cannot be used: {why}; give the path of a libnvrtc.so, "
        f"or unset it and {INSTALL}",
        looked=[f"{VARIABLE}: {why}"],
    )


def _too_old(found: Nvrtc) -> NvrtcTooOld:
    return NvrtcTooOld(
        f"{found} has no C++20, which the kernels need: version "
        f"{OLDEST[0]}.{OLDEST[1]} or newer does; {INSTALL}",
        version=found.version,
    )


# Places, each of which yields paths


def _loaded() -> Iterator[str]:
    """Libraries that this process has mapped."""
    yield from loaded(_FILE)


def _wheels() -> Iterator[str]:
    """Wheels of CUDA 13 share the folder nvidia/cu13; those of 12 have their own."""
    for folder in package_folders("nvidia"):
        yield from newest_first(folder.glob("*/lib/libnvrtc*"), _FILE)


def _torch() -> Iterator[str]:
    for folder in package_folders("torch"):
        yield from newest_first((folder / "lib").glob("libnvrtc*"), _FILE)


def _toolkits() -> Iterator[str]:
    named = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    usual = sorted(_USUAL.glob("cuda*"), key=lambda p: numbers(p, _FILE), reverse=True)
    for root in [*(Path(name) for name in named if name), *usual]:
        for folder in ("lib64", "lib", "targets/*/lib"):
            yield from newest_first(root.glob(f"{folder}/libnvrtc*"), _FILE)


def _loader() -> Iterator[str]:
    """Names without a folder, which the dynamic loader looks for."""
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


_PLACES: Places = (
    ("libraries of this process", _loaded),
    ("wheels in site-packages", _wheels),
    ("torch's libraries", _torch),
    ("CUDA_HOME, CUDA_PATH, /usr/local/cuda*", _toolkits),
    ("the dynamic loader", _loader),
)
