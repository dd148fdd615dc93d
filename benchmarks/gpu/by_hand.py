"""A kernel written for one collective, beside which the interpreter is measured."""

from __future__ import annotations

import struct
from ctypes import c_void_p
from pathlib import Path

from benchmarks.gpu.ranks import Graph, StreamRanks, cuda
from unisono import _native
from unisono.devices import rtc
from unisono.devices.arrays import DeviceArray
from unisono.devices.nvrtc import find

_SOURCE = Path(__file__).with_name("direct_by_hand.cu")
_MOST_BLOCKS = 256
THREADS = 512


class DirectByHand:
    """all_reduce of float32 by direct, on the arrays of the interpreter's run."""

    def __init__(self, ranks: StreamRanks, arrays: list[DeviceArray]) -> None:
        """Compile the kernel, and allocate its flags."""
        n = ranks.n
        capability = divmod(_native.cuda_device(0).capability, 10)
        nvrtc = find()
        arch = rtc.architecture(nvrtc, capability)
        options = (f"--gpu-architecture=sm_{arch}", "--std=c++20", f"-DN={n}")
        name = _SOURCE.name
        image = nvrtc.compile(name, {name: _SOURCE.read_text()}, options).image
        module = cuda.value(c_void_p, "cuModuleLoadData", image)
        self._function = cuda.value(
            c_void_p, "cuModuleGetFunction", c_void_p(module), b"direct_by_hand"
        )
        self._ranks = ranks
        self._memory = [DeviceArray((n * _MOST_BLOCKS,), "uint32", 0) for _ in range(n)]
        self._epochs = [DeviceArray((_MOST_BLOCKS,), "uint32", 0) for _ in range(n)]
        addresses = [x.view.address for x in arrays]
        flags = [x.view.address for x in self._memory]
        count = arrays[0].shape[0] // (4 * n)
        self._arguments = [
            struct.pack(
                f"{3 * n + 1}Q2q",
                *addresses,
                *addresses,
                *flags,
                self._epochs[rank].view.address,
                count,
                rank,
            )
            for rank in range(n)
        ]

    def captured(self, blocks: int, repeats: int) -> Graph:
        """A graph with so many calls of all ranks."""

        def call(comm: object, rank: int, stream: _native.CudaStream) -> None:
            cuda.initialize()
            cuda.launch(
                self._function, self._arguments[rank], stream.handle, blocks, THREADS
            )

        return self._ranks.captured(call, repeats)
