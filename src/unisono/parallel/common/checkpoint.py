"""Checkpoints: full tensors by name, in safetensors files, for any number of ranks.

    save_checkpoint("model.safetensors", model.state_dict(), comm)     rank 0 writes
    model.load_state_dict(load_checkpoint("model.safetensors"))        on any ranks

A state may contain dicts in dicts, lists and plain values, as an optimizer's does:

    save_checkpoint("all.safetensors", {"optimizer": {...}, "step": 7}, comm)

The `safetensors` library writes and reads the files, so other programs can read them,
and reading never runs code. A file is written under another name and renamed when it is
complete, so a rank that dies leaves the old file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.errors import BadArgument, Corrupted, MissingExtra
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.nested_state import KEY, flatten_state, restore_state
from unisono.runtime.communicator import Communicator

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    comm: Communicator | None = None,
) -> None:
    """Write tensors by name. With `comm`, its rank 0 writes and all wait for it.

    Values may also be plain ones (numbers, strings, None), and dicts, lists and tuples
    of these, at any depth.
    """
    if comm is None:
        _write(Path(path), state)
        return
    with setup_together(comm, "save_checkpoint"):
        if comm.rank == 0:
            _write(Path(path), state)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file; tensors are memory-mapped, so read as they are used."""
    library = _library()
    file = Path(path)
    if not file.stat().st_size:
        raise Corrupted(f"{path}: not a safetensors file: it is empty")
    try:
        tensors: dict[str, Tensor] = library.torch.load_file(file)
        with library.safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(KEY, "")
    except library.SafetensorError as error:
        raise Corrupted(f"{path}: not a safetensors file: {error}") from error
    try:
        return restore_state(tensors, text) if text else tensors
    except Corrupted as error:
        raise Corrupted(f"{path}: {error}") from error


def _write(path: Path, state: Mapping[str, Any]) -> None:
    library = _library()
    flat, text = flatten_state(state)
    tensors = _without_overlaps({k: _checked(k, v) for k, v in flat.items()})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.touch()
    try:
        mode = temporary.stat().st_mode  # the library makes files for the owner only
        library.torch.save_file(tensors, temporary, {KEY: text} if text else None)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except library.SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise BadArgument(
            f"save_checkpoint: {name} is {tensor.dtype}; expected a tensor of numbers"
        )
    return tensor.detach().cpu().contiguous()


def _without_overlaps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same; tensors that share memory, as tied parameters do, are copied.

    The library refuses them, since in a file they are separate.
    """
    end = 0
    separate = dict(tensors)
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        tensor = tensors[name]
        begin = tensor.data_ptr()
        if begin < end and tensor.numel():
            separate[name] = tensor.clone()
        end = max(end, begin + tensor.nbytes)
    return separate


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as missing:
        raise MissingExtra("torch", "a checkpoint") from missing
    return safetensors
