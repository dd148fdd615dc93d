"""What several strategies use; nothing here knows a strategy.

mesh           named axes over the ranks
agreement      all ranks pass the same arguments; if one rank fails, all raise
placement      which communicators a parameter is sharded over
marking        marks a parameter as sharded
shard_math     sizes and bounds of shards
local_shard    the elements of a parameter that a rank has, and the full state
flat           many tensors in one; buffers in shared memory
module_state   the same parameters on all ranks at the start
functions      collectives with gradients
opaque         what torch.compile does not look into
clipping       the norm of the whole model's gradients
scaling        gradient scalers that skip a step on all ranks or on none
optimizers     which optimizers a strategy can wrap
checkpoint     safetensors files
nested_state   dicts in dicts as tensors by name and a text
"""
