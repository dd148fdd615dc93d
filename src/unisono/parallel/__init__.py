"""Training strategies on unisono's own collectives, each in a file to read.

    from unisono.parallel import DDP, FSDP, Mesh

    Mesh                     named axes over the ranks         Mesh(comm, dp=2, tp=2)
    PlainDDP, DDP            averaged gradients                DDP(module, comm)
    OneBitAdam               momentum sent as signs            OneBitAdam(module, comm)
    ParameterServer          gradients to servers, parameters back; also asynchronous
    SyncBatchNorm            statistics over all ranks         SyncBatchNorm.convert
    ZeRO                     sharded optimizer state, gradients, parameters
    FSDP                     all of these, unit by unit        FSDP(module, comm)
    parallelize              layers sharded by a plan          parallelize(net, plan...)
    sequence_plan            and the activations between them
    ring_attention, ...      attention over a sharded sequence
    MoE                      experts on different ranks        MoE(gate, experts, comm)
    Pipeline                 layers in stages                  Pipeline(layers, comm)
    clip_grad_norm_          by the norm of the whole model
    redistribute             tensors divided in another way, with gradients
    save_checkpoint, ...     safetensors files

Packages, each of which imports only those below it:

    sharded    ZeRO and FSDP: model states sharded over data parallel ranks
    data       data parallelism: replicas of the model, averaged gradients
    model      tensor, sequence, context, expert and pipeline parallelism
    estimate   memory and traffic by formula, without ranks; imports no other of these
    common     what they share: mesh, agreement, placements, flat tensors, checkpoints

Every strategy takes a module that knows nothing of it and any Communicator, and every
byte it sends goes through that communicator, which counts it (`comm.sent_bytes`).
Names are imported from their files when they are first used; all but Mesh need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra

if TYPE_CHECKING:
    from unisono.parallel.common.checkpoint import load_checkpoint, save_checkpoint
    from unisono.parallel.common.clipping import clip_grad_norm_
    from unisono.parallel.common.mesh import Mesh
    from unisono.parallel.common.redistributing import redistribute
    from unisono.parallel.data.async_parameter_server import AsyncParameterServer
    from unisono.parallel.data.ddp import DDP
    from unisono.parallel.data.onebit_adam import OneBitAdam
    from unisono.parallel.data.parameter_server import ParameterServer
    from unisono.parallel.data.plain_ddp import PlainDDP
    from unisono.parallel.data.sync_batch_norm import SyncBatchNorm
    from unisono.parallel.model.context import all_to_all_attention, ring_attention
    from unisono.parallel.model.context_shards import (
        positions,
        shard_sequence,
        whole_sequence,
    )
    from unisono.parallel.model.expert import MoE
    from unisono.parallel.model.linear import ColumnLinear, RowLinear
    from unisono.parallel.model.pipeline import Pipeline
    from unisono.parallel.model.sequence import sequence_plan
    from unisono.parallel.model.sharded_layer import load_whole_state, whole_state
    from unisono.parallel.model.tensor import (
        Column,
        Divide,
        Row,
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
    "load_checkpoint",
    "load_whole_state",
    "mlp_plan",
    "parallelize",
    "positions",
    "redistribute",
    "ring_attention",
    "save_checkpoint",
    "sequence_plan",
    "shard_sequence",
    "vocabulary_cross_entropy",
    "whole_sequence",
    "whole_state",
]

_NAMES_IN = {
    "common.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "common.clipping": ("clip_grad_norm_",),
    "common.mesh": ("Mesh",),
    "common.redistributing": ("redistribute",),
    "data.async_parameter_server": ("AsyncParameterServer",),
    "data.ddp": ("DDP",),
    "data.onebit_adam": ("OneBitAdam",),
    "data.parameter_server": ("ParameterServer",),
    "data.plain_ddp": ("PlainDDP",),
    "data.sync_batch_norm": ("SyncBatchNorm",),
    "model.context": ("all_to_all_attention", "ring_attention"),
    "model.context_shards": ("positions", "shard_sequence", "whole_sequence"),
    "model.expert": ("MoE",),
    "model.linear": ("ColumnLinear", "RowLinear"),
    "model.pipeline": ("Pipeline",),
    "model.sequence": ("sequence_plan",),
    "model.sharded_layer": ("load_whole_state", "whole_state"),
    "model.tensor": (
        "Column",
        "Divide",
        "Row",
        "Vocabulary",
        "attention_plan",
        "mlp_plan",
        "parallelize",
    ),
    "model.vocabulary": ("VocabularyEmbedding", "vocabulary_cross_entropy"),
    "sharded.fsdp": ("FSDP",),
    "sharded.zero": ("ZeRO",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise MissingExtra("torch", f"unisono.parallel.{name}") from missing
