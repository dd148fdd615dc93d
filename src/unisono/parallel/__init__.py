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
    from unisono.parallel.common.clipping import clip_grad_norm_
    from unisono.parallel.common.mesh import Mesh
    from unisono.parallel.data.ddp import DDP
    from unisono.parallel.data.onebit_adam import OneBitAdam
    from unisono.parallel.data.parameter_server import (
        AsyncParameterServer,
        ParameterServer,
    )
    from unisono.parallel.data.plain_ddp import PlainDDP
    from unisono.parallel.data.sync_batch_norm import SyncBatchNorm
    from unisono.parallel.model.context import (
        all_to_all_attention,
        positions,
        ring_attention,
        shard_sequence,
        whole_sequence,
    )
    from unisono.parallel.model.expert import MoE
    from unisono.parallel.model.pipeline import Pipeline
    from unisono.parallel.model.sequence import sequence_plan
    from unisono.parallel.model.sharded_layer import load_whole_state, whole_state
    from unisono.parallel.model.tensor import (
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
    from unisono.parallel.model.vocabulary import (
        VocabularyEmbedding,
        vocabulary_cross_entropy,
    )
    from unisono.parallel.sharded.fsdp import FSDP
    from unisono.parallel.sharded.zero import ZeRO

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
    "AsyncParameterServer": "data.parameter_server",
    "Column": "model.tensor",
    "ColumnLinear": "model.tensor",
    "DDP": "data.ddp",
    "Divide": "model.tensor",
    "FSDP": "sharded.fsdp",
    "Mesh": "common.mesh",
    "MoE": "model.expert",
    "OneBitAdam": "data.onebit_adam",
    "ParameterServer": "data.parameter_server",
    "Pipeline": "model.pipeline",
    "PlainDDP": "data.plain_ddp",
    "Row": "model.tensor",
    "RowLinear": "model.tensor",
    "SyncBatchNorm": "data.sync_batch_norm",
    "Vocabulary": "model.tensor",
    "VocabularyEmbedding": "model.vocabulary",
    "ZeRO": "sharded.zero",
    "all_to_all_attention": "model.context",
    "attention_plan": "model.tensor",
    "clip_grad_norm_": "common.clipping",
    "load_whole_state": "model.sharded_layer",
    "mlp_plan": "model.tensor",
    "parallelize": "model.tensor",
    "positions": "model.context",
    "ring_attention": "model.context",
    "sequence_plan": "model.sequence",
    "shard_sequence": "model.context",
    "vocabulary_cross_entropy": "model.vocabulary",
    "whole_sequence": "model.context",
    "whole_state": "model.sharded_layer",
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
