"""Model parallelism: ranks have different parts of the model or of the sequence.

tensor          layers sharded over the ranks           parallelize(module, ...)
linear          linear layers sharded by columns or rows
shared_input    layers on one input communicate once for it
sequence        activations between them sharded, too   sequence_plan(plan, ...)
vocabulary      embedding and loss of a sharded vocabulary
sharded_layer   a layer with a shard of its parameters
patterns        which modules a plan matches
context         attention over a sharded sequence       ring_attention(q, k, v, ...)
context_shards  which rank has which tokens
expert          mixture of experts                      MoE(gate, experts, comm)
pipeline        stages of consecutive layers            Pipeline(layers, comm, ...)
pipeline_step   one batch: messages of a stage
pipeline_order  the order of forward and backward
"""
