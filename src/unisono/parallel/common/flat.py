"""Flat tensors: many tensors in one, so that one collective sends them all.

A collective on a thousand small tensors is a thousand messages; on one flat tensor of
which they are views it is one message, and nothing is copied for it. Flat tensors are
in shared memory where the communicator has it, so that other ranks can read them there;
what torch allocates on a GPU, they can map.

    params   | weight (3, 2)  | bias (3)|      views
    flat     | . . . . . . . . . |             one dimension, no gaps
    shards   |  rank 0  | rank 1 |             sizes that differ by one at most
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from unisono.runtime.communicator import Communicator

CPU = torch.device("cpu")


def needs_grad(x: object) -> bool:
    """Whether it is a tensor that gets a gradient in backward."""
    return isinstance(x, Tensor) and x.requires_grad


def shared_zeros(
    comm: Communicator, count: int, dtype: torch.dtype, device: torch.device = CPU
) -> Tensor:
    """A flat tensor in memory that other ranks can access, filled with zeros."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    raw = torch.from_numpy(comm.empty(count * dtype.itemsize, "uint8"))
    return raw.view(dtype).zero_()


def offsets(tensors: Iterable[Tensor]) -> list[int]:
    """Where each tensor begins in a flat tensor of all of them, and the end."""
    return list(accumulate((t.numel() for t in tensors), initial=0))


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of `flat` in the shapes of these tensors."""
    begins = offsets(like)
    return [
        flat[begin : begin + t.numel()].view(t.shape)
        for begin, t in zip(begins, like, strict=False)
    ]


class ReleasableBuffer:
    """A flat tensor whose memory can be released and used again, with its views.

    On the CPU it keeps its address: resizing a storage would leave the memory with
    malloc, which seldom releases it. On a GPU torch's allocator has what is released.
    """

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        """Its contents are lost with every `release`."""
        self._nbytes = nbytes = count * dtype.itemsize
        self._pages: mmap.mmap | None = None
        if device.type != "cpu":
            self.tensor = torch.zeros(count, dtype=dtype, device=device)
            return
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, max(nbytes, 1), flags=kind)
        with contextlib.suppress(AttributeError, OSError):  # it only saves time
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.tensor = raw[:nbytes].view(dtype)

    def release(self) -> None:
        """Return the memory; its contents are lost."""
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def claim(self) -> None:
        """Have the memory again, before the tensor is written to."""
        storage = self.tensor.untyped_storage()
        if self._pages is None and storage.nbytes() < self._nbytes:
            storage.resize_(self._nbytes)


class BufferPool:
    """A few buffers in shared memory that are used again and again.

    `reclaim` is called when all buffers are in use: it releases one and returns True,
    or returns False, and then the pool grows by one.
    """

    def __init__(
        self,
        comm: Communicator,
        nbytes: int,
        reclaim: Callable[[], bool],
        size: int,
        device: torch.device,
    ) -> None:
        """Buffers are allocated when they are first needed."""
        self._comm, self._nbytes, self._reclaim = comm, nbytes, reclaim
        self._device = device
        self._free: list[Tensor] = []
        self._left = size

    def acquire(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor; its contents are left from earlier."""
        if not self._free and (self._left > 0 or not self._reclaim()):
            self._left -= 1
            made = shared_zeros(self._comm, self._nbytes, torch.uint8, self._device)
            self._free.append(made)
        return self._free.pop()[: count * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Return a tensor that is no longer used."""
        base = tensor.view(torch.uint8)
        self._free.append(base.as_strided((self._nbytes,), (1,), 0))
