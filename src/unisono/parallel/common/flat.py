"""Many tensors in one: what is sent together lies together.

A collective on a thousand small tensors is a thousand messages; on one flat tensor that
they are views of, it is one, and nothing is copied to get there. Flat tensors live in
shared memory where the communicator has it, so that others can read them in place.

    params   | weight (3, 2)  | bias (3)|      views
    flat     | . . . . . . . . . |             one dimension, no gaps
    shares   |  rank 0  | rank 1 |             sizes that differ by one at most
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import agree
from unisono.parallel.common.placement import is_apart
from unisono.runtime.communicator import Communicator

Named = list[tuple[str, nn.Parameter]]
BROADCAST_BYTES = 1 << 20
"""From here on a tensor is sent from where it lies; smaller ones go together."""


def needs_grad(x: object) -> bool:
    """Whether it is a tensor that backward will come to."""
    return isinstance(x, Tensor) and x.requires_grad


def room(comm: Communicator, count: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor in shared memory, filled with zeros."""
    raw = torch.from_numpy(comm.empty(count * dtype.itemsize, "uint8"))
    return raw.view(dtype).zero_()


def shares(count: int, n: int) -> list[int]:
    """How many elements each of n ranks owns of `count`: the first ones one more."""
    return [count // n + (rank < count % n) for rank in range(n)]


def share(count: int, comm: Communicator) -> tuple[int, int]:
    """Where this rank's share of `count` elements begins and ends."""
    ends = list(accumulate(shares(count, comm.world_size), initial=0))
    return ends[comm.rank], ends[comm.rank + 1]


def counts_of(count: int, n: int) -> list[int] | None:
    """The shares as a collective wants them: None where they are all the same."""
    return shares(count, n) if count % n else None


def offsets(tensors: Iterable[Tensor]) -> list[int]:
    """Where each tensor begins in a flat one that has them all, and its end."""
    return list(accumulate((t.numel() for t in tensors), initial=0))


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of `flat` in the shapes of these tensors, one after the other."""
    begins = offsets(like)
    return [
        flat[begin : begin + t.numel()].view(t.shape)
        for begin, t in zip(begins, like, strict=False)
    ]


class Lapsing:
    """A flat tensor whose memory can be given back and had again, at one address.

    To resize a storage would leave the memory with malloc, which seldom lets go of it.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        """Filled with zeros, as after every `give_back`."""
        nbytes = count * dtype.itemsize
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, max(nbytes, 1), flags=kind)
        with contextlib.suppress(AttributeError, OSError):  # it only saves time
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.tensor = raw[:nbytes].view(dtype)

    def give_back(self) -> None:
        """Let the system have the memory; what was in it is gone."""
        self._pages.madvise(mmap.MADV_DONTNEED)


class Pool:
    """A few rooms in shared memory that are used again and again.

    `give_way` is called when all are taken; it brings one back, or returns False, and
    then there is one more.
    """

    def __init__(
        self, comm: Communicator, nbytes: int, give_way: Callable[[], bool], rooms: int
    ) -> None:
        """Rooms are made when they are first needed."""
        self._comm, self._nbytes, self._give_way = comm, nbytes, give_way
        self._free: list[Tensor] = []
        self._left = rooms

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor; what is in it is left from earlier."""
        if not self._free and (self._left > 0 or not self._give_way()):
            self._left -= 1
            self._free.append(room(self._comm, self._nbytes, torch.uint8))
        return self._free.pop()[: count * dtype.itemsize].view(dtype)

    def bring_back(self, tensor: Tensor) -> None:
        """Nobody uses it any longer."""
        base = tensor.view(torch.uint8)
        self._free.append(base.as_strided((self._nbytes,), (1,), 0))


def broadcast_tensors(
    comm: Communicator, tensors: Sequence[Tensor], *, root: int = 0, label: str = ""
) -> None:
    """Give every rank the root's values, many small tensors in one message.

    Large ones are sent as they lie: a copy of megabytes would be given back to malloc,
    which from then on keeps holes of that size.
    """
    with torch.no_grad():
        for same in _batches(tensors):
            alone = len(same) == 1 and same[0].is_contiguous()
            flat = (
                same[0].detach().view(-1)
                if alone
                else torch.cat([t.detach().reshape(-1) for t in same])
            )
            comm.broadcast(flat, root=root, label=label)
            if comm.rank != root and not alone:
                for tensor, part in zip(same, views(flat, same), strict=True):
                    tensor.detach().copy_(part)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Small tensors of one type together, and every large one by itself."""
    open_ones: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= BROADCAST_BYTES:
            yield [tensor]
            continue
        same = open_ones.setdefault(tensor.dtype, [])
        same.append(tensor)
        if sum(t.nbytes for t in same) >= BROADCAST_BYTES:
            yield open_ones.pop(tensor.dtype)
    yield from open_ones.values()


def trainable(module: nn.Module, where: str) -> Named:
    """The parameters that get gradients, each once, with their names."""
    named = [(k, p) for k, p in module.named_parameters() if p.requires_grad]
    for name, param in named:
        if param.device.type != "cpu" or param.layout is not torch.strided:
            raise BadArgument(
                f"{where}: {name} is {param.layout} on {param.device}; "
                "expected a dense tensor on the CPU"
            )
    return named


def check_alike(comm: Communicator, where: str, module: nn.Module) -> None:
    """Raise on every rank if the ranks have not built the same module."""
    told = [
        f"{name}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        + ("" if t.requires_grad else ", frozen")
        for name, t in module.named_parameters()
    ]
    told += [f"buffer {n}: {b.dtype}{list(b.shape)}" for n, b in module.named_buffers()]
    agree(comm, where, told)


def same_start(
    comm: Communicator, module: nn.Module, where: str, *, leaves_apart: bool = False
) -> None:
    """Give all ranks the first rank's parameters and buffers, once they fit."""
    check_alike(comm, where, module)
    apart = [name for name, p in module.named_parameters() if is_apart(p, comm)]
    if apart and not leaves_apart:
        raise BadArgument(
            f"{where}: {apart[0]} is another parameter on each of these ranks, as a "
            "shard or an expert is; use a communicator of ranks that have the same, as "
            'mesh["dp"], or for experts DDP'
        )
    params = [p for p in module.parameters() if not is_apart(p, comm)]
    state = [*params, *module.buffers()]
    broadcast_tensors(comm, state, label=f"{where}: initial state")
