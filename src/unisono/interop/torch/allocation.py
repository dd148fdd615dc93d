"""Tensors in memory that the ranks of a host share, for torch's own buffers.

torch asks a backend for them where a program says so, as FSDP2 does after
`module.set_allocate_memory_from_process_group_for_comm(True)`. Calls on such a tensor
copy nothing between ranks of one host: they read and write it in place.

On the CPU it is memory of `comm.empty`. A tensor that is dropped gives its memory back
to this object, which keeps no more than was in use at any one time: to make shared
memory, and to map it by all ranks, takes longer than to use it again. On a GPU it is
a pool of torch's own allocator, which knows the streams that still use a tensor; its
memory is shared with the other ranks as any of torch's is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.interop.torch.errors import BadArgument
from unisono.runtime.communicator import Communicator

NO_ALLOCATOR = (
    "the unisono backend has no mem_allocator: use torch.cuda.MemPool() without one, "
    "since ranks share the memory of torch's own allocator"
)
_GRAIN = 4096
Bytes = NDArray[np.uint8]


class SharedBlocks:
    """Blocks of shared memory, in use or to be used again."""

    def __init__(self, make: Callable[[int], Bytes]) -> None:
        """`make` makes one of so many bytes."""
        self._make = make
        # A finalizer may run inside any of the functions, on the same thread.
        self._lock = threading.RLock()
        self._free: OrderedDict[int, Bytes] = OrderedDict()  # by number, oldest first
        self._number = 0
        self.used = self.kept = self.most_used = 0

    def take(self, nbytes: int) -> Bytes:
        """So many bytes, which come back when the array is dropped."""
        size = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        with self._lock:
            number = next((k for k, b in self._free.items() if b.nbytes == size), None)
            block = None if number is None else self._free.pop(number)
            self.used += size
            self.most_used = max(self.used, self.most_used)
            self.kept -= 0 if block is None else size
            self._drop_some()
        if block is None:
            block = self._make(size)
        view = block[:nbytes]
        finalize(view, self._put, block).atexit = False
        return view

    def _put(self, block: Bytes) -> None:
        with self._lock:
            self._number += 1
            self._free[self._number] = block
            self.used -= block.nbytes
            self.kept += block.nbytes
            self._drop_some()

    def _drop_some(self) -> None:
        """The oldest, until there is no more than was ever in use."""
        while self._free and self.used + self.kept > self.most_used:
            _, block = self._free.popitem(last=False)
            self.kept -= block.nbytes

    def clear(self) -> None:
        """Keep nothing; what is in use is not kept when it comes back."""
        with self._lock:
            self.most_used = 0
            self._drop_some()


class TensorAllocator:
    """The tensors of one group."""

    def __init__(
        self, communicator: Callable[[], Communicator], devices: Sequence[str]
    ) -> None:
        """Nothing is made, and no rank is connected, before the first tensor."""
        self._devices = devices
        self._blocks = SharedBlocks(lambda size: communicator().empty(size, "uint8"))
        self._pools: dict[int, Any] = {}  # of GPUs

    def serves(self, device: torch.device) -> bool:
        """Whether it has memory for tensors of a device."""
        return device.type in self._devices

    def serves_number(self, index: int) -> bool:
        """The same by a number alone, all that torch's C++ half tells; -1 is a CPU."""
        return ("cpu" if index < 0 else "cuda") in self._devices

    def make(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of so many elements, whose values are not known."""
        if not self.serves(device):
            kinds = " and ".join(self._devices)
            raise BadArgument(
                f"allocate_tensor: this group serves tensors on {kinds}, not {device}"
            )
        if device.type == "cuda":
            return self._on_gpu(size, dtype, device)
        if size == 0:
            return torch.empty(0, dtype=dtype)
        block = self._blocks.take(size * dtype.itemsize)
        return torch.from_numpy(block).view(dtype)

    def _on_gpu(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._pools:
            self._pools[index] = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pools[index], device=index):
            return torch.empty(size, dtype=dtype, device=torch.device("cuda", index))

    def clear(self) -> None:
        """The group is left: keep nothing for it."""
        self._blocks.clear()
        self._pools.clear()
