"""What it is for: training strategies on our own collectives, each in a file to read.

    from unisono.parallel import DDP, FSDP, Mesh

    mesh               named axes over the world           Mesh(comm, dp=2, tp=2)
    parameter_server   gradients to a server and back      ParameterServer, Async...
    plain_ddp, ddp     the mean of all ranks' gradients    PlainDDP, DDP(module, comm)
    zero               each rank steps its share           ZeRO(module, comm, AdamW)
    fsdp               each rank has its share             FSDP(module, comm)
    sync_batch_norm    statistics of all ranks' batches    SyncBatchNorm.convert(...)

What they are made of: `flat` (many tensors in one), `buckets` (gradients as they come),
`units` and `partition` (parameters that come and go), `pieces` (what a rank has of a
parameter), `functions` (collectives that gradients flow through), `checkpoint`.

Every strategy takes a module that knows nothing of it and any Communicator, and every
byte it sends goes through that communicator, which counts it (`comm.sent_bytes`).
Names are fetched from their files when first used; all but the mesh need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra

if TYPE_CHECKING:
    from unisono.parallel.ddp import DDP
    from unisono.parallel.fsdp import FSDP
    from unisono.parallel.mesh import Mesh
    from unisono.parallel.parameter_server import AsyncParameterServer, ParameterServer
    from unisono.parallel.plain_ddp import PlainDDP
    from unisono.parallel.sync_batch_norm import SyncBatchNorm
    from unisono.parallel.zero import ZeRO

__all__ = [
    "DDP",
    "FSDP",
    "AsyncParameterServer",
    "Mesh",
    "ParameterServer",
    "PlainDDP",
    "SyncBatchNorm",
    "ZeRO",
]

_FILE_OF = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    "AsyncParameterServer": "parameter_server",
    "Mesh": "mesh",
    "ParameterServer": "parameter_server",
    "PlainDDP": "plain_ddp",
    "SyncBatchNorm": "sync_batch_norm",
    "ZeRO": "zero",
}


def __getattr__(name: str) -> Any:
    """A public name, from the file it stands in."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise MissingExtra("torch", f"unisono.parallel.{name}") from missing
