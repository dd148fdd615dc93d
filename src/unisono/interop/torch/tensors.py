"""Tensors as the engine sees them: an address, a type, and a number of elements.

On the CPU or on a CUDA device: what torch does here for the latter is on its current
stream.

What does not lie in one piece is copied into something that does. Several tensors in a
row are one piece if they happen to lie one after the other, as the shards of a flat
parameter do; then nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.dtypes import DTYPES, DType
from unisono.interop.torch.errors import BadArgument

_BYTES = DTYPES["uint8"]
DTYPE_OF: dict[torch.dtype, DType] = {
    found: DTYPES[name]
    for name in DTYPES
    if (found := getattr(torch, name, None)) is not None
}
"""unisono's name of an element type of torch's."""

Finish = Callable[[], None]


def type_of(tensor: Tensor) -> DType:
    """The element type, for a reduction."""
    dtype = DTYPE_OF.get(tensor.dtype)
    if dtype is None:
        raise BadArgument(f"{tensor.dtype} cannot be reduced")
    return dtype


def moved_as(tensor: Tensor) -> tuple[DType, int]:
    """A type to copy it as, and how many of these an element has."""
    dtype = DTYPE_OF.get(tensor.dtype)
    return (dtype, 1) if dtype is not None else (_BYTES, tensor.element_size())


def known(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes if unisono does not have its type."""
    if tensor.dtype in DTYPE_OF:
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check(tensor: Tensor, what: str) -> None:
    """Refuse what the engine cannot reach."""
    if not (tensor.is_cpu or tensor.is_cuda):
        raise BadArgument(
            f"{what}: the tensor is on {tensor.device}, expected the CPU or a CUDA "
            "device"
        )
    if tensor.layout is not torch.strided:
        raise BadArgument(
            f"{what}: the tensor is {tensor.layout}, expected a dense one"
        )


def plain(tensor: Tensor) -> bool:
    """Whether its bytes are its values, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def simple(tensor: Tensor) -> bool:
    """Whether it can be used as it is: dense, plain, on the CPU, of a known type."""
    return (
        tensor.is_cpu
        and tensor.dtype in DTYPE_OF
        and tensor.layout is torch.strided
        and plain(tensor)
    )


def first_of(*some: Any) -> Tensor | None:
    """The first tensor of tensors and lists of them."""
    for one in some:
        found = one if isinstance(one, Tensor) else first_of(*one)
        if found is not None:
            return found
    return None


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a CUDA tensor in pinned memory; the host waits for it."""
    room = pinned_like(tensor)
    with torch.no_grad():
        room.copy_(tensor.detach())
    return room


def pinned_like(tensor: Tensor) -> Tensor:
    """Room for a CUDA tensor in one piece, in pinned memory of the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def to_read(tensor: Tensor, what: str) -> Tensor:
    """The tensor, or a copy in one piece."""
    check(tensor, what)
    if plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_write(tensor: Tensor, what: str) -> tuple[Tensor, Finish | None]:
    """The tensor, or one in one piece and how to bring it back from there."""
    check(tensor, what)
    if plain(tensor):
        return tensor, None
    stand_in = to_read(tensor, what)
    if stand_in.data_ptr() == tensor.data_ptr() and tensor.numel():
        stand_in = stand_in.clone()

    def finish() -> None:
        with torch.no_grad():
            tensor.detach().copy_(stand_in)

    return stand_in, finish


def _in_a_row(tensors: Sequence[Tensor]) -> bool:
    """Whether they lie one after the other, as if they were one."""
    at = tensors[0].data_ptr()
    for tensor in tensors:
        if not plain(tensor) or (tensor.numel() and tensor.data_ptr() != at):
            return False
        at += tensor.numel() * tensor.element_size()
    return True


def joined_to_read(tensors: Sequence[Tensor], what: str) -> Tensor:
    """All of them in one piece; its first tensor if they are that already."""
    for tensor in tensors:
        check(tensor, what)
    _same_type(tensors, what)
    if _in_a_row(tensors):
        return tensors[0]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def joined_to_write(
    tensors: Sequence[Tensor], what: str
) -> tuple[Tensor, Finish | None]:
    """Room for all of them in one piece, and how to bring them home from there."""
    for tensor in tensors:
        check(tensor, what)
    _same_type(tensors, what)
    if _in_a_row(tensors) and not _overlapping(tensors):
        return tensors[0], None
    sizes = [tensor.numel() for tensor in tensors]
    room = tensors[0].detach().new_empty(sum(sizes))

    def finish() -> None:
        with torch.no_grad():
            for tensor, part in zip(tensors, torch.split(room, sizes), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    return room, finish


def _overlapping(tensors: Sequence[Tensor]) -> bool:
    """Whether empty ones apart, two begin at the same place."""
    begins = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(begins)) != len(begins)


def _same_type(tensors: Sequence[Tensor], what: str) -> None:
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise BadArgument(f"{what}: tensors of one type expected, got {types}")
