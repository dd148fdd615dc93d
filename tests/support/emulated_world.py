"""Ranks on an emulated device, for tests of it; and what tests of the driver share."""

import ctypes
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import emulated as cuda
from conformance import Case, prepare
from interpreted import plans
from unisono import _native
from unisono.dtypes import DTYPES, OPS

SUPPORT = Path(__file__).parent


def refused(code):
    """The driver returns this error."""
    return pytest.raises(cuda.CudaError, match=rf"\({code}\)$")


def alone(code, *, timeout=120, **environment):
    """Run a program in a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class World:
    """Ranks of one emulated device: words, windows and tables in its memory.

    Buffers are in segment 0, which begins at address 0. Freed with the context.
    """

    def __init__(self, n: int, half: int = 4096) -> None:
        self.n = n
        self.half = half
        size = _native.device_words_size()
        segments = self._zeros(8)
        no_packets = 0
        peers = [
            (self._zeros(size), cuda.allocate(2 * half), segments, no_packets)
            for _ in range(n)
        ]
        peer = struct.Struct("4Q")
        self.peers = cuda.allocate(peer.size * n)
        cuda.write(self.peers, b"".join(peer.pack(*each) for each in peers))
        self.abort = cuda.allocate_host(4)
        size = _native.device_failure_size()
        self.failures = [cuda.allocate_host(size) for _ in range(n)]
        self.done = cuda.allocate_host(8 * n)
        for address in (self.abort, *self.failures):
            ctypes.memset(address, 0, 4)

    @staticmethod
    def _zeros(nbytes: int) -> int:
        made = cuda.allocate(nbytes)
        cuda.fill(made, 0, nbytes)
        cuda.synchronize()
        return made

    def argument(self, plan: _native.Plan, rank: int, x: int, out: int) -> bytes:
        """What the kernel is given; its tables are copied to the device."""
        tables = _native.device_tables(plan)
        places = _native.DevicePlaces()
        places.tables = cuda.allocate(len(tables))
        cuda.write(places.tables, tables)
        places.peers, places.half = self.peers, self.half
        places.input, places.output = x, out
        places.abort, places.failure = self.abort, self.failures[rank]
        places.done = self.done + 8 * rank
        places.timeout_ns = 120 * 10**9
        return _native.device_launch(plan, rank, self.n, places)

    def end(self) -> None:
        """Make all kernels end that still wait."""
        ctypes.c_uint32.from_address(self.abort).value = 1

    def reported(self) -> list[int]:
        """Whether ranks have reported a failure."""
        return [ctypes.c_uint32.from_address(f).value for f in self.failures]


class Gate:
    """A stream that does not go on before the gate is opened."""

    def __init__(self, stream):
        self.world = World(2)
        plan = plans(Case("all_reduce", "naive", 2, 4), 4096)[0]
        argument = self.world.argument(plan, 0, cuda.allocate(16), cuda.allocate(16))
        function = cuda.kernel(DTYPES["float32"].code, 0)
        cuda.launch(function, argument, stream, blocks=1, threads=1)

    def open(self):
        self.world.end()


class Collective:
    """The buffers and launches of all ranks of one call, on the current device."""

    def __init__(self, case, *, in_place=False):
        self.case = case
        prepare([case])
        self.world = World(case.n)
        self.function = cuda.kernel(DTYPES[case.dtype].code, list(OPS).index(case.op))
        self.inputs, self.outputs, self.arguments = [], [], []
        for r, plan in enumerate(plans(case, self.world.half)):
            given = case.given(r).tobytes()
            x = cuda.allocate(len(given))
            cuda.write(x, given)
            out = x if in_place else cuda.allocate(len(given))
            self.inputs.append(x)
            self.outputs.append(out)
            self.arguments.append(self.world.argument(plan, r, x, out))

    def launch(self, rank, stream, *, blocks=2, threads=64):
        argument = self.arguments[rank]
        cuda.launch(self.function, argument, stream, blocks=blocks, threads=threads)

    def results(self):
        return [
            np.frombuffer(cuda.read(out, given.nbytes), given.dtype)
            for r, out in enumerate(self.outputs)
            for given in [self.case.given(r)]
        ]
