"""Stages 1 and 2 of ZeRO: whole parameters in flat buckets, each rank steps a share.

bucket   | weight | bias | ...      |     parameters are views of it
shares   |  rank 0  | rank 1 | ...  |     gradients are reduce-scattered into them,
                                          and new parameters gathered from them
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from torch import Tensor, nn

from unisono.parallel.common.flat import Pool, counts_of, room, share, views
from unisono.parallel.common.placement import keep_apart
from unisono.parallel.data.buckets import Bucket, Buckets
from unisono.parallel.data.compression import Compression, PerBucket
from unisono.parallel.sharded.local_shard import Piece, counts_in
from unisono.parallel.sharded.step_check import all_step
from unisono.runtime.communicator import Communicator

_STEP = "parameters of bucket"


def _stepped(call: str) -> bool:
    return _STEP in call


class Shares:
    """The buckets of a module, of which each rank steps its share."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        buckets: list[Bucket],
        *,
        keeps: bool,
        reproducible: bool,
        finds_unused: bool,
        codec: PerBucket = None,
    ) -> None:
        """`keeps` says whether whole gradients have a place of their own (stage 1)."""
        self.comm, self._keeps, self._reproducible = comm, keeps, reproducible
        self.compression = Compression(comm, codec, buckets)
        self._flying: deque[Bucket] = deque()
        self._flat: list[Tensor] = []
        self.pieces: list[Piece] = []
        self._places: list[list[tuple[Piece, slice]]] = []
        for bucket in buckets:
            self._take_over(bucket)
        self.buckets = Buckets(
            buckets,
            comm,
            launch=self._launch,
            land=self._land_all,
            take=self._take,
            finds_unused=finds_unused,
            keeps_grads=False,
        )
        largest = max((b.count * b.dtype.itemsize for b in buckets), default=0)
        self._pool = Pool(comm, largest, self._land_oldest, rooms=2)
        module.register_forward_hook(lambda _, args, out: self.buckets.watch(out))

    def _take_over(self, bucket: Bucket) -> None:
        """Let the parameters live in one flat tensor, and cut this rank's share."""
        flat = room(self.comm, bucket.count, bucket.dtype)
        self._flat.append(flat)
        for param, view in zip(bucket.params, views(flat, bucket.params), strict=True):
            param.data = view.copy_(param.detach())
        if self._keeps:
            bucket.settle(room(self.comm, bucket.count, bucket.dtype))
        lower, upper = share(bucket.count, self.comm)
        places: list[tuple[Piece, slice]] = []
        for i, (begin, end) in enumerate(pairwise(bucket.begins)):
            first = min(max(begin, lower), upper)
            last = max(min(end, upper), first)
            counts = counts_in(begin, end, bucket.count, self.comm.world_size)
            param = nn.Parameter(flat[first:last])
            keep_apart(param, self.comm, of=bucket.params[i])
            shape = bucket.params[i].shape
            piece = Piece(bucket.names[i], param, shape, counts, self.comm)
            places.append((piece, slice(first - lower, last - lower)))
        self._places.append(places)
        self.pieces += [piece for piece, _ in places]

    def _take(self, bucket: Bucket) -> None:
        bucket.settle(self._pool.take(bucket.count, bucket.dtype))

    def _launch(self, bucket: Bucket) -> None:
        """Average a full bucket; this rank gets its share, in its place."""
        with all_step("ZeRO", _stepped):
            bucket.work = self.compression.reduce_scatter(
                bucket,
                reproducible=self._reproducible,
                label=f"bucket {bucket.number}, {self.buckets.parity()} step",
            )
        self._flying.append(bucket)

    def _land_oldest(self) -> bool:
        """Wait for a bucket and add its share to the pieces' gradients."""
        if not self._flying:
            return False
        bucket = self._flying.popleft()
        assert bucket.work is not None
        assert bucket.data is not None
        with all_step("ZeRO", _stepped):
            bucket.work.wait()
        lower, upper = share(bucket.count, self.comm)
        mine = bucket.data[lower:upper].clone()
        for piece, place in self._places[bucket.number]:
            if piece.param.grad is None:
                piece.param.grad = mine[place]
            else:
                piece.param.grad.add_(mine[place])
        if not self._keeps:
            self._pool.bring_back(bucket.data)
            bucket.data = None
        return True

    def _land_all(self, buckets: list[Bucket]) -> None:
        while self._land_oldest():
            pass

    def gather(self) -> None:
        """Give everybody what this rank has stepped."""
        with all_step("ZeRO", _stepped):
            self._gather()

    def _gather(self) -> None:
        works = []
        for number, flat in enumerate(self._flat):
            lower, upper = share(flat.numel(), self.comm)
            work = self.comm.all_gather(
                flat[lower:upper],
                out=flat,
                counts=counts_of(flat.numel(), self.comm.world_size),
                async_op=True,
                label=f"{_STEP} {number}",
            )
            works.append(work)
        for work in works:
            work.wait()
