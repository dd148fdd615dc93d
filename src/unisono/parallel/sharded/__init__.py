"""Strategies that shard model states over data parallel ranks.

fsdp           parameters, gradients and optimizer state    FSDP(module, comm)
fsdp_unit      one FSDP unit: parameters that are gathered and freed together
fsdp_policy    which modules are units
fsdp_prefetch  which unit is gathered next
fsdp_state     full states of the module and of its optimizer
fsdp_summon    full parameters of all units
zero           stages 1 to 3 of ZeRO                 ZeRO(module, comm, AdamW)
zero_buckets   stages 1 and 2: full parameters in flat buckets
step_check     names ranks that skipped an optimizer step
"""
