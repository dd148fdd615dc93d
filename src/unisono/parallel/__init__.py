"""What it is for: training strategies on our own collectives, each in a file to read.

    from unisono.parallel import DDP, FSDP, Mesh

    mesh               named axes over the world           Mesh(comm, dp=2, tp=2)
    parameter_server   gradients to a server and back      ParameterServer, Async...
    plain_ddp, ddp     the mean of all ranks' gradients    PlainDDP, DDP(module, comm)
    zero               each rank steps its share           ZeRO(module, comm, AdamW)
    fsdp               each rank has its share             FSDP(module, comm)
    compressed         gradients that travel as less       DDP(..., codec="topk:0.01")
    onebit_adam        momentum that travels as signs      OneBitAdam(module, comm)
    sync_batch_norm    statistics of all ranks' batches    SyncBatchNorm.convert(...)
    tensor             layers cut over the ranks           parallelize(module, ...)
    vocabulary         the embedding and the loss, cut     vocabulary_cross_entropy
    sequence           and what lies between them          sequence_plan(plan, ...)
    context            attention over a sequence in shards ring_attention(q, k, v, ...)
    expert             tokens travel to their experts      MoE(gate, experts, comm)
    pipeline           layers one after the other          Pipeline(layers, comm, ...)
    clipping           by the norm of the whole model      clip_grad_norm_(params, 1.0)
    scaling            an overflow on one rank, all skip   torch.amp.GradScaler("cpu")

What they are made of: `flat` (many tensors in one), `buckets` (gradients as they come),
`shares` (buckets of which a rank steps its part), `units` and `partition` (parameters
that come and go), `pieces` (what a rank has of a parameter), `sharded` (layers that are
cut), `apart` (the mark on what is cut), `patterns` (which modules a plan means),
`stepping` (that all ranks step, or none), `functions` (collectives that gradients flow
through), `checkpoint`.

Every strategy takes a module that knows nothing of it and any Communicator, and every
byte it sends goes through that communicator, which counts it (`comm.sent_bytes`).
Names are fetched from their files when first used; all but the mesh need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra

if TYPE_CHECKING:
    from unisono.parallel.clipping import clip_grad_norm_
    from unisono.parallel.context import (
        all_to_all_attention,
        positions,
        ring_attention,
        shard_sequence,
        whole_sequence,
    )
    from unisono.parallel.ddp import DDP
    from unisono.parallel.expert import MoE
    from unisono.parallel.fsdp import FSDP
    from unisono.parallel.mesh import Mesh
    from unisono.parallel.onebit_adam import OneBitAdam
    from unisono.parallel.parameter_server import AsyncParameterServer, ParameterServer
    from unisono.parallel.pipeline import Pipeline
    from unisono.parallel.plain_ddp import PlainDDP
    from unisono.parallel.sequence import sequence_plan
    from unisono.parallel.sharded import load_whole_state, whole_state
    from unisono.parallel.sync_batch_norm import SyncBatchNorm
    from unisono.parallel.tensor import (
        Column,
        ColumnLinear,
        Divide,
        Row,
        RowLinear,
        Vocabulary,
        attention_plan,
        mlp_plan,
        parallelize,
    )
    from unisono.parallel.vocabulary import (
        VocabularyEmbedding,
        vocabulary_cross_entropy,
    )
    from unisono.parallel.zero import ZeRO

__all__ = [
    "DDP",
    "FSDP",
    "AsyncParameterServer",
    "Column",
    "ColumnLinear",
    "Divide",
    "Mesh",
    "MoE",
    "OneBitAdam",
    "ParameterServer",
    "Pipeline",
    "PlainDDP",
    "Row",
    "RowLinear",
    "SyncBatchNorm",
    "Vocabulary",
    "VocabularyEmbedding",
    "ZeRO",
    "all_to_all_attention",
    "attention_plan",
    "clip_grad_norm_",
    "load_whole_state",
    "mlp_plan",
    "parallelize",
    "positions",
    "ring_attention",
    "sequence_plan",
    "shard_sequence",
    "vocabulary_cross_entropy",
    "whole_sequence",
    "whole_state",
]

_FILE_OF = {
    "AsyncParameterServer": "parameter_server",
    "Column": "tensor",
    "ColumnLinear": "tensor",
    "DDP": "ddp",
    "Divide": "tensor",
    "FSDP": "fsdp",
    "Mesh": "mesh",
    "MoE": "expert",
    "OneBitAdam": "onebit_adam",
    "ParameterServer": "parameter_server",
    "Pipeline": "pipeline",
    "PlainDDP": "plain_ddp",
    "Row": "tensor",
    "RowLinear": "tensor",
    "SyncBatchNorm": "sync_batch_norm",
    "Vocabulary": "tensor",
    "VocabularyEmbedding": "vocabulary",
    "ZeRO": "zero",
    "all_to_all_attention": "context",
    "attention_plan": "tensor",
    "clip_grad_norm_": "clipping",
    "load_whole_state": "sharded",
    "mlp_plan": "tensor",
    "parallelize": "tensor",
    "positions": "context",
    "ring_attention": "context",
    "sequence_plan": "sequence",
    "shard_sequence": "context",
    "vocabulary_cross_entropy": "vocabulary",
    "whole_sequence": "context",
    "whole_state": "sharded",
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
