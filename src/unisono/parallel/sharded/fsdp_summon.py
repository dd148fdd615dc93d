"""Full parameters of all FSDP units at once, to read or to change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from unisono.parallel.common.local_shard import load_local_shards
from unisono.parallel.sharded.fsdp_unit import FSDPUnit


@contextmanager
def full_parameters_installed(
    units: Sequence[FSDPUnit], writeback: bool
) -> Iterator[None]:
    """Full parameters in the module; with `writeback`, changes are kept afterwards."""
    full = [
        [
            nn.Parameter(shard.full_tensor(shard.param), shard.param.requires_grad)
            for shard in unit.local_shards
        ]
        for unit in units
    ]
    for unit, params in zip(units, full, strict=True):
        unit.install(params)
    try:
        yield
    finally:
        for unit, params in zip(units, full, strict=True):
            if writeback:
                pairs = zip(unit.local_shards, params, strict=True)
                load_local_shards(unit.local_shards, {s.name: p for s, p in pairs})
            unit.reshard()
