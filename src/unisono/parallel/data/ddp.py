"""Data parallelism: every rank has the model and a part of the batch; gradients meet.

    model = DDP(Net(), comm)
    loss(model(x), y).backward()       # afterwards .grad is the mean over all ranks
    optimizer.step()                   # the same on every rank

Gradients lie in flat buckets (see `buckets`), of which every `.grad` is a view. A full
bucket is all-reduced by the communicator's own thread while backward goes on; at its
end there is only the last bucket to wait for. After the first step the buckets are
made anew in the order in which gradients really came.

    memory per rank   parameters + gradients + optimizer state, whole
    sent per step     2(n-1)/n of the gradients, in one message per bucket; with a
                      codec less (see `compressed`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.common.agreement import prepared
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.flat import broadcast_tensors, room, same_start, trainable
from unisono.parallel.common.placement import (
    is_apart,
    keep_parameters,
    refuse_unaveraged,
)
from unisono.parallel.data.buckets import MIB, Bucket, Buckets, fill
from unisono.parallel.data.compression import Compression, PerBucket
from unisono.runtime.communicator import Communicator


class DDP(nn.Module):
    """A module whose gradients are averaged over the ranks during backward.

    `find_unused_parameters`: parameters may go without a gradient, on some ranks or on
    all. `broadcast_buffers`: before each step all take the first rank's buffers.
    `reproducible`: the bits depend on nothing but the ranks' gradients. `overlap=False`
    sends only after backward, which shows what overlapping is worth. `codec`: what
    gradients travel as, for all buckets or as a function of a bucket; `compression`
    is what that remembers, to be saved and loaded.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        reproducible: bool = False,
        overlap: bool = True,
        codec: PerBucket = None,
    ) -> None:
        """Begin with the first rank's parameters and buffers; all ranks together."""
        super().__init__()
        self.module, self.comm = module, comm
        with prepared(comm, "DDP") as told:
            every = trainable(module, "DDP")
            refuse_unaveraged(every, comm, "DDP")
            named = [(name, p) for name, p in every if not is_apart(p, comm)]
            first = fill(named[::-1], int(bucket_cap_mb * MIB))
            told += [f"bucket_cap_mb = {bucket_cap_mb}", f"overlap = {overlap}"]
            told.append(f"find_unused_parameters = {find_unused_parameters}")
            told.append(f"broadcast_buffers = {broadcast_buffers}")
            told += [f"codec = {codec}"] if isinstance(codec, str) else []
        same_start(comm, module, "DDP", leaves_apart=True)
        keep_parameters(module, "DDP")
        self._names = {param: name for name, param in named}
        self._cap = int(bucket_cap_mb * MIB)
        self._reproducible = reproducible
        self._broadcasts = broadcast_buffers
        self._finds_unused = find_unused_parameters
        self._in_order = False
        self._join: _Join | None = None
        self._synced = True
        sizes: dict[torch.dtype, int] = {}
        for _, param in named:
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
        self._rooms = {dtype: room(comm, size, dtype) for dtype, size in sizes.items()}
        buckets = self._housed(first)
        self.compression = Compression(comm, codec, buckets)
        self._buckets = Buckets(
            buckets,
            comm,
            launch=self._all_reduce,
            land=self._landed,
            overlap=overlap,
            finds_unused=find_unused_parameters,
        )

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own forward pass, and ready for backward."""
        learning = torch.is_grad_enabled()
        active = [True] * self.comm.world_size
        if self._join is not None and learning:
            active = self._join.tell(True, self._buckets.sync)[0]
        if learning and self._synced:
            self._prepare(active)
        output = self.module(*args, **options)
        if learning:
            self._synced = self._buckets.sync
            self._buckets.watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up on each rank by itself until the first backward outside."""
        before, self._buckets.sync = self._buckets.sync, False
        try:
            yield
        finally:
            self._buckets.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole model's gradients; returns it.

        torch's own function does the same where no parameter is cut.
        """
        mine = self.module.parameters()
        return clip_grad_norm_(mine, max_norm, norm_type, comm=self.comm)

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """For loops that are longer on some ranks: who is done shadows the others.

        It contributes zeros to their collectives until all are done, and then takes the
        parameters of one that was last. `divide_by_initial_world_size=False` divides by
        the number of ranks that still have inputs.
        """
        if not enable or self.comm.world_size == 1:
            yield
            return
        self._join = _Join(self.comm, divide_by_initial_world_size)
        try:
            yield
            self._shadow(self._join)
        finally:
            self._join = None

    # --- buckets

    def _housed(self, buckets: list[Bucket]) -> list[Bucket]:
        """Give the buckets their places, in one room for each type."""
        used = dict.fromkeys(self._rooms, 0)
        for bucket in buckets:
            begin = used[bucket.dtype]
            used[bucket.dtype] = end = begin + bucket.count
            bucket.settle(self._rooms[bucket.dtype][begin:end])
        return buckets

    def _all_reduce(self, bucket: Bucket) -> None:
        divides = self._join is None or self._join.by_all
        bucket.work = self.compression.all_reduce(
            bucket,
            mean=divides,
            reproducible=self._reproducible,
            label=f"bucket {bucket.number}, {self._buckets.parity()} step",
        )

    def _landed(self, buckets: list[Bucket]) -> None:
        """Backward is over: wait for what is still under way."""
        for bucket in buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if self._join is not None and not self._join.by_all:
                assert bucket.data is not None
                bucket.data /= self._join.count
        if self._finds_unused:
            self._give_unused(buckets)

    def _give_unused(self, buckets: list[Bucket]) -> None:
        """What any rank has used has a gradient on all; what none has, on none."""
        every = [
            (p, v) for b in buckets for p, v in zip(b.params, b.views, strict=True)
        ]
        mine = [self._buckets.was_used(param) for param, _ in every]
        used = self.comm.all_reduce(np.array(mine, np.uint8), op="max")
        for (param, place), was in zip(every, used, strict=True):
            if was:
                param.grad = place

    def _prepare(self, active: list[bool]) -> None:
        """Between two steps: buckets in the order of use, and the first's buffers."""
        first = active.index(True)
        stay = self._in_order or self.compression.remembers
        if self._buckets.steps and not stay:
            self._in_order = True
            self._reorder(first)
        if self._broadcasts and (buffers := list(self.module.buffers())):
            broadcast_tensors(self.comm, buffers, root=first, label="buffers")

    def _reorder(self, root: int) -> None:
        """Fill the buckets anew, in the order in which gradients came on the root."""
        params = list(self._names)
        number = {param: i for i, param in enumerate(params)}
        came = [number[param] for param in self._buckets.order]
        rest = [i for i in reversed(range(len(params))) if i not in set(came)]
        order = np.array(came + rest, np.int64)
        self.comm.broadcast(order, root=root, label="order of gradients")
        named = [(self._names[params[i]], params[i]) for i in order]
        buckets = fill(named, self._cap)
        if [b.names for b in buckets] == [b.names for b in self._buckets.buckets]:
            return
        kept = {p: p.grad.clone() for p in params if p.grad is not None}
        self._buckets.reorder(self._housed(buckets))
        self.compression.settle(buckets)
        for bucket in buckets:
            for param, place in zip(bucket.params, bucket.views, strict=True):
                if param in kept:
                    param.grad = place.copy_(kept[param])

    # --- uneven inputs

    def _shadow(self, join: _Join) -> None:
        """Take part in the steps of those who are not done yet, with zeros."""
        while True:
            active, syncing = join.tell(False, False)
            if not any(active):
                break
            if self._synced:
                self._prepare(active)
            self._synced = syncing
            if syncing:
                self._shadow_backward()
        broadcast_tensors(self.comm, self._state(), root=join.last, label="end of join")

    def _shadow_backward(self) -> None:
        for bucket in self._buckets.buckets:
            assert bucket.data is not None
            bucket.data.zero_()
            self._all_reduce(bucket)
        for bucket in self._buckets.buckets:
            assert bucket.work is not None
            bucket.work.wait()
        if self._finds_unused:
            self.comm.all_reduce(np.zeros(len(self._names), np.uint8), op="max")
        self._buckets.steps += 1

    def _state(self) -> list[Tensor]:
        params = [p for p in self.module.parameters() if not is_apart(p, self.comm)]
        return [*params, *self.module.buffers()]


class _Join:
    """Who still has inputs, told by all to all before each step."""

    def __init__(self, comm: Communicator, by_all: bool) -> None:
        self.comm, self.by_all = comm, by_all
        self.count = comm.world_size
        self.last = 0

    def tell(self, active: bool, syncing: bool) -> tuple[list[bool], bool]:
        """Who is active, and whether they will sync; all of them must agree on that."""
        mine = np.array([[active, syncing]], np.int64)
        told = self.comm.all_gather(mine, label="join")
        found = [bool(a) for a in told[:, 0]]
        if any(found):
            self.count, self.last = sum(found), found.index(True)
        syncs = {bool(s) for a, s in told if a}
        if len(syncs) > 1:
            raise UsageError(
                "join: some ranks are inside no_sync() and others are not; all that "
                "have inputs must accumulate in the same steps"
            )
        return found, syncs == {True}
