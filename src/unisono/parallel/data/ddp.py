"""Data parallelism: every rank has the model and a part of the batch.

    model = DDP(Net(), comm)
    loss(model(x), y).backward()       # afterwards .grad is the mean over all ranks
    optimizer.step()                   # the same on every rank

Gradients are views of flat buckets (see `buckets`). A full bucket is all-reduced by the
communicator's own thread while backward goes on; at the end of backward only the last
bucket is left to wait for. After the first step the buckets are filled again, in the
order in which gradients were computed.

    memory per rank   parameters + gradients + optimizer state, not sharded
    sent per step     2(n-1)/n of the gradients, in one message per bucket; with a
                      codec less (see `compression`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.flat import shared_zeros
from unisono.parallel.common.marking import forbid_assign
from unisono.parallel.common.module_state import (
    broadcast_tensors,
    sync_module_state,
    trainable_parameters,
)
from unisono.parallel.common.opaque import opaque
from unisono.parallel.common.placement import is_sharded, refuse_unaveraged
from unisono.parallel.data.buckets import MIB, Bucket, Buckets, fill_buckets
from unisono.parallel.data.compression import BucketCodec, Compression
from unisono.runtime.communicator import Communicator


class DDP(nn.Module):
    """A module whose gradients are averaged over the ranks during backward.

    `find_unused_parameters`: parameters may have no gradient, on some ranks or on all.
    `broadcast_buffers`: before each step all ranks get rank 0's buffers.
    `reproducible`: the bits depend on nothing but the ranks' gradients. `overlap=False`
    reduces only after backward, to measure what overlapping saves. `codec` compresses
    gradients, for all buckets or as a function of a bucket; `compression` has its error
    feedback, to be saved and loaded.
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
        codec: BucketCodec = None,
    ) -> None:
        """Begin with rank 0's parameters and buffers; a collective call."""
        super().__init__()
        self.module, self.comm = module, comm
        with setup_together(comm, "DDP") as settings:
            every = trainable_parameters(module, "DDP")
            refuse_unaveraged(every, comm, "DDP")
            named = [(name, p) for name, p in every if not is_sharded(p, comm)]
            first = fill_buckets(named[::-1], int(bucket_cap_mb * MIB))
            settings += [f"bucket_cap_mb = {bucket_cap_mb}", f"overlap = {overlap}"]
            settings.append(f"find_unused_parameters = {find_unused_parameters}")
            settings.append(f"broadcast_buffers = {broadcast_buffers}")
            settings += [f"codec = {codec}"] if isinstance(codec, str) else []
        sync_module_state(comm, module, "DDP", skip_sharded=True)
        forbid_assign(module, "DDP")
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
        self._memory = {
            dtype: shared_zeros(comm, size, dtype, named[0][1].device)
            for dtype, size in sizes.items()
        }
        buckets = self._attached(first)
        self.compression = Compression(comm, codec, buckets)
        self._buckets = Buckets(
            buckets,
            comm,
            launch=self._all_reduce,
            finish=self._finish,
            overlap=overlap,
            finds_unused=find_unused_parameters,
        )

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own forward pass, with preparations for backward."""
        training = torch.is_grad_enabled()
        if training:
            self._begin_forward()
        output = self.module(*args, **options)
        if training:
            self._end_forward(output)
        return output

    @opaque
    def _begin_forward(self) -> None:
        active = [True] * self.comm.world_size
        if self._join is not None:
            active = self._join.exchange(True, self._buckets.sync)[0]
        if self._synced:
            self._prepare(active)

    @opaque
    def _end_forward(self, output: Any) -> None:
        self._synced = self._buckets.sync
        self._buckets.watch(output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on each rank until the first backward outside."""
        before, self._buckets.sync = self._buckets.sync, False
        try:
            yield
        finally:
            self._buckets.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole model's gradients; returns it.

        torch's own function does the same where no parameter is sharded.
        """
        mine = self.module.parameters()
        return clip_grad_norm_(mine, max_norm, norm_type, comm=self.comm)

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """For loops that are longer on some ranks: finished ranks shadow the others.

        They contribute zeros to the collectives until all are done, and then get the
        parameters of a rank that was last. `divide_by_initial_world_size=False` divides
        by the number of ranks that still have inputs.
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

    def _attached(self, buckets: list[Bucket]) -> list[Bucket]:
        """Attach memory to the buckets: one flat tensor for each type."""
        used = dict.fromkeys(self._memory, 0)
        for bucket in buckets:
            begin = used[bucket.dtype]
            used[bucket.dtype] = end = begin + bucket.count
            bucket.attach(self._memory[bucket.dtype][begin:end])
        return buckets

    def _all_reduce(self, bucket: Bucket) -> None:
        divides = self._join is None or self._join.by_all
        bucket.work = self.compression.all_reduce(
            bucket,
            mean=divides,
            reproducible=self._reproducible,
            label=f"bucket {bucket.number}, {self._buckets.parity()} step",
        )

    def _finish(self, buckets: list[Bucket]) -> None:
        """Backward is over: wait for the collectives."""
        for bucket in buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if self._join is not None and not self._join.by_all:
                assert bucket.data is not None
                bucket.data /= self._join.count
        if self._finds_unused:
            self._set_used_grads(buckets)

    def _set_used_grads(self, buckets: list[Bucket]) -> None:
        """A parameter that any rank has used gets a gradient on all ranks."""
        every = [
            (p, v) for b in buckets for p, v in zip(b.params, b.views, strict=True)
        ]
        mine = [self._buckets.was_used(param) for param, _ in every]
        used = self.comm.all_reduce(np.array(mine, np.uint8), op="max")
        for (param, view), was_used in zip(every, used, strict=True):
            if was_used:
                param.grad = view

    def _prepare(self, active: list[bool]) -> None:
        """Between two steps: order the buckets once, and broadcast buffers."""
        first = active.index(True)
        keep_order = self._in_order or self.compression.has_feedback
        if self._buckets.steps and not keep_order:
            self._in_order = True
            self._reorder(first)
        if self._broadcasts and (buffers := list(self.module.buffers())):
            broadcast_tensors(self.comm, buffers, root=first, label="buffers")

    def _reorder(self, root: int) -> None:
        """Fill the buckets again, in the order in which the root computed gradients."""
        params = list(self._names)
        number = {param: i for i, param in enumerate(params)}
        computed = [number[param] for param in self._buckets.order]
        rest = [i for i in reversed(range(len(params))) if i not in set(computed)]
        order = np.array(computed + rest, np.int64)
        self.comm.broadcast(order, root=root, label="order of gradients")
        named = [(self._names[params[i]], params[i]) for i in order]
        buckets = fill_buckets(named, self._cap)
        if [b.names for b in buckets] == [b.names for b in self._buckets.buckets]:
            return
        kept = {p: p.grad.clone() for p in params if p.grad is not None}
        self._buckets.reorder(self._attached(buckets))
        self.compression.choose(buckets)
        for bucket in buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param in kept:
                    param.grad = view.copy_(kept[param])

    # --- uneven inputs

    def _shadow(self, join: _Join) -> None:
        """Contribute zeros to the steps of ranks that are not done yet."""
        while True:
            active, syncing = join.exchange(False, False)
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
        params = [p for p in self.module.parameters() if not is_sharded(p, self.comm)]
        return [*params, *self.module.buffers()]


class _Join:
    """Which ranks still have inputs; exchanged before each step."""

    def __init__(self, comm: Communicator, by_all: bool) -> None:
        self.comm, self.by_all = comm, by_all
        self.count = comm.world_size
        self.last = 0

    def exchange(self, active: bool, syncing: bool) -> tuple[list[bool], bool]:
        """Which ranks are active, and whether they sync: all of them, or none."""
        mine = np.array([[active, syncing]], np.int64)
        every = self.comm.all_gather(mine, label="join")
        running = [bool(a) for a in every[:, 0]]
        if any(running):
            self.count, self.last = sum(running), running.index(True)
        syncs = {bool(s) for a, s in every if a}
        if len(syncs) > 1:
            raise UsageError(
                "join: some ranks are inside no_sync() and others are not; all that "
                "have inputs must accumulate in the same steps"
            )
        return running, syncs == {True}
