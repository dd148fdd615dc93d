"""Data parallelism: every rank has the whole model and its own part of the batch.

plain_ddp          one all_reduce per gradient             PlainDDP(module, comm)
ddp                one per bucket, during backward         DDP(module, comm)
buckets            gradients in flat buckets
compression        codecs for buckets, with error feedback
onebit_adam        momentum sent as signs                  OneBitAdam(module, comm)
parameter_server   gradients to servers, parameters back   ParameterServer(module, ...)
async_parameter_server   the same without waiting for all   AsyncParameterServer(...)
served_parameters  parameters and gradients, split by server
sync_batch_norm    statistics over all ranks' batches      SyncBatchNorm.convert
"""
