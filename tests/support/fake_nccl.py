"""A libnccl for the emulated driver, compiled when a test first needs it."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import CDLL, CFUNCTYPE, c_char_p, c_int, c_void_p
from pathlib import Path

import pytest

from emulated_world import Gate
from unisono import _native
from unisono.devices import nccl

SOURCE = Path(__file__).with_name("fake_nccl.cpp")
NEVER, LATER, ON_DEVICE = -1, -2, -3
"""Faults: a function never ends; an error is reported later; the stream never goes on.
A positive one is the code that the function returns."""
_OF_DRIVER = ("cuStreamSynchronize", "cuStreamIsCapturing", "cuMemcpyAsync")


def compiled():
    """The path of the library; the test is skipped without a compiler.

    It takes seconds, so it is kept for other workers and runs. Under ThreadSanitizer it
    is compiled for that too, which would else not see what orders its threads.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    kind = ["-fsanitize=thread", "-g"] if hasattr(CDLL(None), "__tsan_init") else []
    text = SOURCE.read_bytes() + repr(kind).encode()
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"unisono-fake-nccl-{os.getuid()}-{digest}"
    made = folder / "libnccl.so.2"
    if not made.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        scratch = folder / f"{os.getpid()}.so"
        command = [compiler, "-std=c++20", "-shared", "-fPIC", SOURCE, "-o", scratch]
        subprocess.run([*command, *kind, "-lrt", "-pthread"], check=True)
        scratch.replace(made)
    return str(made)


class FakeNccl:
    """The library that UNISONO_NCCL names, given the driver, in this process."""

    def __init__(self):
        nccl.find.cache_clear()
        self._library = CDLL(os.environ[nccl.VARIABLE])
        functions = _native.emulated_functions()
        self._gates = []
        self._hang = CFUNCTYPE(None, c_void_p)(self._close_gate)
        self._unhang = CFUNCTYPE(None)(self._open_gates)
        callbacks = [ctypes.cast(f, c_void_p) for f in (self._hang, self._unhang)]
        given = [c_void_p(functions[name]) for name in _OF_DRIVER]
        self._library.fake_nccl_driver(*given, *callbacks)

    def fault(self, rank, function, what):
        """From now on this function does so on this rank; 0: it works."""
        self._library.fake_nccl_fault(c_int(rank), c_char_p(function.encode()), what)

    def calls(self, function):
        """How often a function was called in this process."""
        return self._library.fake_nccl_calls(c_char_p(function.encode()))

    def _close_gate(self, stream):
        self._gates.append(Gate(stream))

    def open_gates(self):
        """Let the streams go on."""
        self._open_gates()

    def _open_gates(self):
        for gate in self._gates:
            gate.open()
