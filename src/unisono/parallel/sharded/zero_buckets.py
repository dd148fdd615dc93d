"""Stages 1 and 2 of ZeRO: full parameters in flat buckets; each rank steps a shard.

bucket   | weight | bias | ...      |     parameters are views of it
shards   |  rank 0  | rank 1 | ...  |     gradients are reduce-scattered into them,
                                          new parameters are gathered from them
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from torch import Tensor, nn

from unisono.parallel.common.flat import CPU, BufferPool, shared_zeros, views
from unisono.parallel.common.local_shard import LocalShard
from unisono.parallel.common.marking import mark_sharded
from unisono.parallel.common.opaque import opaque
from unisono.parallel.common.shard_math import (
    overlap_sizes,
    shard_bounds,
    uneven_counts,
)
from unisono.parallel.data.buckets import Bucket, Buckets
from unisono.parallel.data.compression import BucketCodec, Compression
from unisono.parallel.sharded.step_check import explain_step_mismatch
from unisono.runtime.communicator import Communicator

_STEP = "parameters of bucket"


def _stepped(call: str) -> bool:
    return _STEP in call


class ZeroBuckets:
    """The buckets of a module, of which each rank steps its shard."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        buckets: list[Bucket],
        *,
        keep_grads: bool,
        reproducible: bool,
        finds_unused: bool,
        codec: BucketCodec = None,
    ) -> None:
        """`keep_grads`: full gradients have memory of their own (stage 1)."""
        self.comm, self._keep_grads = comm, keep_grads
        self._reproducible = reproducible
        self.compression = Compression(comm, codec, buckets)
        self._in_flight: deque[Bucket] = deque()
        self._flat: list[Tensor] = []
        self.local_shards: list[LocalShard] = []
        self._spans: list[list[tuple[LocalShard, slice]]] = []
        for bucket in buckets:
            self._flatten(bucket)
        self.buckets = Buckets(
            buckets,
            comm,
            launch=self._launch,
            finish=self._finish_all,
            allocate=self._allocate,
            finds_unused=finds_unused,
            keep_grads=False,
        )
        largest = max((b.count * b.dtype.itemsize for b in buckets), default=0)
        device = buckets[0].device if buckets else CPU
        self._pool = BufferPool(comm, largest, self._finish_oldest, 2, device)
        module.register_forward_hook(self._watch)

    @opaque
    def _watch(self, module: nn.Module, args: object, output: object) -> None:
        self.buckets.watch(output)

    def _flatten(self, bucket: Bucket) -> None:
        """Move parameters into one flat tensor, and make this rank's local shards."""
        kind = bucket.count, bucket.dtype, bucket.device
        flat = shared_zeros(self.comm, *kind)
        self._flat.append(flat)
        for param, view in zip(bucket.params, views(flat, bucket.params), strict=True):
            param.data = view.copy_(param.detach())
        if self._keep_grads:
            bucket.attach(shared_zeros(self.comm, *kind))
        lower, upper = shard_bounds(bucket.count, self.comm)
        spans: list[tuple[LocalShard, slice]] = []
        for i, (begin, end) in enumerate(pairwise(bucket.begins)):
            first = min(max(begin, lower), upper)
            last = max(min(end, upper), first)
            counts = overlap_sizes(begin, end, bucket.count, self.comm.world_size)
            param = nn.Parameter(flat[first:last])
            mark_sharded(param, self.comm, of=bucket.params[i])
            shape = bucket.params[i].shape
            shard = LocalShard(bucket.names[i], param, shape, counts, self.comm)
            spans.append((shard, slice(first - lower, last - lower)))
        self._spans.append(spans)
        self.local_shards += [shard for shard, _ in spans]

    def _allocate(self, bucket: Bucket) -> None:
        bucket.attach(self._pool.acquire(bucket.count, bucket.dtype))

    def _launch(self, bucket: Bucket) -> None:
        """Begin to average a full bucket; this rank gets its shard, in place."""
        with explain_step_mismatch("ZeRO", _stepped):
            bucket.work = self.compression.reduce_scatter(
                bucket,
                reproducible=self._reproducible,
                label=f"bucket {bucket.number}, {self.buckets.parity()} step",
            )
        self._in_flight.append(bucket)

    def _finish_oldest(self) -> bool:
        """Wait for a bucket and add its shard to the local shards' gradients."""
        if not self._in_flight:
            return False
        bucket = self._in_flight.popleft()
        assert bucket.work is not None
        assert bucket.data is not None
        with explain_step_mismatch("ZeRO", _stepped):
            bucket.work.wait()
        lower, upper = shard_bounds(bucket.count, self.comm)
        mine = bucket.data[lower:upper].clone()
        for shard, span in self._spans[bucket.number]:
            if shard.param.grad is None:
                shard.param.grad = mine[span]
            else:
                shard.param.grad.add_(mine[span])
        if not self._keep_grads:
            self._pool.release(bucket.data)
            bucket.data = None
        return True

    def _finish_all(self, buckets: list[Bucket]) -> None:
        while self._finish_oldest():
            pass

    def gather_parameters(self) -> None:
        """All-gather the parameters that each rank has stepped."""
        with explain_step_mismatch("ZeRO", _stepped):
            self._gather()

    def _gather(self) -> None:
        works = []
        for number, flat in enumerate(self._flat):
            lower, upper = shard_bounds(flat.numel(), self.comm)
            work = self.comm.all_gather(
                flat[lower:upper],
                out=flat,
                counts=uneven_counts(flat.numel(), self.comm.world_size),
                async_op=True,
                label=f"{_STEP} {number}",
            )
            works.append(work)
        for work in works:
            work.wait()
