"""Kernels written for one case each, beside which the interpreter is measured."""

from __future__ import annotations

import struct
from ctypes import c_void_p
from pathlib import Path

from benchmarks.gpu.ranks import Graph, StreamRanks, array, cuda
from unisono import _native
from unisono.devices import rtc
from unisono.devices.arrays import DeviceArray
from unisono.devices.nvrtc import find

_MOST_BLOCKS = 256
THREADS = 512


class KernelByHand:
    """A kernel of this folder, and its arguments on each rank."""

    def __init__(self, name: str, ranks: StreamRanks) -> None:
        """Compile it."""
        capability = divmod(_native.cuda_device(0).capability, 10)
        nvrtc = find()
        arch = rtc.architecture(nvrtc, capability)
        options = (f"--gpu-architecture=sm_{arch}", "--std=c++20", f"-DN={ranks.n}")
        source = Path(__file__).with_name(f"{name}.cu")
        image = nvrtc.compile(
            source.name, {source.name: source.read_text()}, options
        ).image
        module = cuda.value(c_void_p, "cuModuleLoadData", image)
        self._function = cuda.value(
            c_void_p, "cuModuleGetFunction", c_void_p(module), name.encode()
        )
        self._ranks = ranks
        self._arguments: list[bytes] = []

    def captured(self, blocks: int, repeats: int, threads: int = THREADS) -> Graph:
        """A graph with so many calls of all ranks."""

        def call(comm: object, rank: int, stream: _native.CudaStream) -> None:
            cuda.initialize()
            cuda.launch(
                self._function, self._arguments[rank], stream.handle, blocks, threads
            )

        return self._ranks.captured(call, repeats)


class DirectByHand(KernelByHand):
    """all_reduce of float32 by direct, on the arrays of the interpreter's run."""

    def __init__(self, ranks: StreamRanks, arrays: list[DeviceArray]) -> None:
        """Compile the kernel, and allocate its flags."""
        super().__init__("direct_by_hand", ranks)
        n = ranks.n
        self._flags = _zeros(n, n * _MOST_BLOCKS)
        self._epochs = _zeros(n, _MOST_BLOCKS)
        addresses = [x.view.address for x in arrays]
        count = arrays[0].shape[0] // (4 * n)
        self._arguments = [
            struct.pack(
                f"{3 * n + 1}Q2q",
                *addresses,
                *addresses,
                *(x.view.address for x in self._flags),
                self._epochs[rank].view.address,
                count,
                rank,
            )
            for rank in range(n)
        ]


class RingByHand(KernelByHand):
    """all_reduce by ring of four float32 for each rank, all of them 1."""

    def __init__(self, ranks: StreamRanks) -> None:
        """Compile the kernel, and allocate its memory."""
        super().__init__("ring_by_hand", ranks)
        n = ranks.n
        self._inputs = [array(4 * n) for _ in range(n)]
        self._outputs = [array(4 * n) for _ in range(n)]
        self._windows = [array(8 * n) for _ in range(n)]
        self._flags = _zeros(n, 1)
        self._epochs = _zeros(n, 1)
        self._arguments = [
            struct.pack(
                f"{2 * n + 3}Qq",
                self._inputs[rank].view.address,
                self._outputs[rank].view.address,
                *(x.view.address for x in self._windows),
                *(x.view.address for x in self._flags),
                self._epochs[rank].view.address,
                rank,
            )
            for rank in range(n)
        ]

    def is_right(self) -> bool:
        """Whether every rank has the sum."""
        return all((x.numpy() == self._ranks.n).all() for x in self._outputs)


def _zeros(n: int, count: int) -> list[DeviceArray]:
    return [DeviceArray((count,), "uint32", 0) for _ in range(n)]
