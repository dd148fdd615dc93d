"""Checkpoints that know nothing of ranks: plain tensors by name, in safetensors files.

    save("model.safetensors", model.state_dict(), comm)     all ranks; one writes
    model.load_state_dict(load("model.safetensors"))        in a world of any size

A file is the length of a header (8 bytes), the header (JSON: type, shape and place of
every tensor), and the tensors' bytes. Nothing in it is ever run. It is written beside
its place and moved there when it is complete, so a rank that dies leaves the old one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from unisono.errors import BadArgument, Corrupted
from unisono.parallel.common.agreement import prepared
from unisono.runtime.communicator import Communicator

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    comm: Communicator | None = None,
) -> None:
    """Write tensors by name. With `comm`, its first rank writes and all wait for it."""
    if comm is None:
        _write(Path(path), state)
        return
    with prepared(comm, "save"):
        if comm.rank == 0:
            _write(Path(path), state)


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    header: dict[str, _Entry] = {}
    end = 0
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise BadArgument(f"save: {name} is {kind}; expected a tensor of numbers")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = _Entry(_NAMES[tensor.dtype], list(tensor.shape), (begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with beside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in state.values():
            flat = tensor.detach().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, by name; read from the file as they are used."""
    file = Path(path)
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise Corrupted(f"{path}: not a safetensors file, or cut short")
        header = opened.read(length)
    begins = 8 + length
    raw = np.memmap(file, np.uint8, mode="c") if size else np.empty(0, np.uint8)
    return {
        name: _tensor(path, name, entry, raw[begins:])
        for name, entry in _entries(path, header).items()
    }


def _entries(path: object, header: bytes) -> dict[str, _Entry]:
    try:
        told = msgspec.json.decode(header, type=dict[str, Any])
        told.pop("__metadata__", None)
        return msgspec.convert(told, dict[str, _Entry])
    except msgspec.MsgspecError as why:
        raise Corrupted(f"{path}: its header cannot be read: {why}") from why


def _tensor(path: object, name: str, entry: _Entry, raw: Any) -> Tensor:
    begin, end = entry.data_offsets
    dtype = _TYPES.get(entry.dtype)
    if dtype is None:
        raise BadArgument(f"{path}: {name} has the type {entry.dtype}, unknown here")
    wanted = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
    if not 0 <= begin <= end <= raw.size or end - begin != wanted:
        raise Corrupted(f"{path}: {name} does not lie where the header says")
    part = torch.from_numpy(np.asarray(raw[begin:end]))
    if begin % dtype.itemsize:  # torch wants elements where they belong
        part = part.clone()
    return part.view(dtype).view(entry.shape)
