"""Gradients in buckets: each is reduced when it is full, while backward goes on.

Backward computes gradients from the last layer to the first. Buckets are filled in that
order, so that the first bucket is full long before backward ends:

    backward   | layer 4 | layer 3 | layer 2 | layer 1 |
    bucket 0             full: its collective runs . . .
    bucket 1                                 full: . . . .   wait

One collective per gradient would cost a latency each; one for all could only begin at
the end. Collectives must begin in the same order on every rank, so a bucket that is
full early waits for those before it.

The strategy decides what to do with a full bucket: DDP all-reduces it, ZeRO
reduce-scatters it. Hooks run on the thread that calls backward (torch runs the CPU's
part of a graph there), so ranks may be threads. On a GPU they run on a thread of torch,
and the collectives are ordered by streams; there ranks are processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.flat import needs_grad, offsets, views
from unisono.parallel.common.module_state import NamedParameters
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that the collectives begin early."""


@dataclass
class Bucket:
    """Parameters of one element type, whose gradients are views of one flat tensor."""

    number: int
    names: list[str]
    params: list[nn.Parameter]
    data: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    work: Work | None = None
    launched: bool = False

    @property
    def count(self) -> int:
        """The number of elements."""
        return sum(p.numel() for p in self.params)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of all of them."""
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.params[0].device

    @property
    def begins(self) -> list[int]:
        """Where each gradient begins, and the end."""
        return offsets(self.params)

    def attach(self, data: Tensor) -> None:
        """Make the gradients views of this flat tensor."""
        self.data = data
        self.views = views(data, self.params)


def fill_buckets(named: NamedParameters, cap_bytes: int) -> list[Bucket]:
    """Put parameters, in the order of gradients, into buckets of one type each."""
    if cap_bytes <= 0:
        raise BadArgument("bucket_cap_mb: expected a positive number")
    cap = min(FIRST_BUCKET_BYTES, cap_bytes)
    done: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for name, param in named:
        bucket = filling.setdefault(param.dtype, Bucket(0, [], []))
        bucket.names.append(name)
        bucket.params.append(param)
        if bucket.count * param.element_size() >= cap:
            done.append(filling.pop(param.dtype))
            cap = cap_bytes
    done += filling.values()
    for number, bucket in enumerate(done):
        bucket.number = number
    return done


class Buckets:
    """Tracks gradients in backward, and launches the collective of each full bucket.

    `launch(bucket)` begins its collective; `finish(buckets)` is called at the end of
    backward, when all have been launched; `allocate(bucket)` attaches memory to a
    bucket that has none. `keep_grads`: .grad is the gradient's view of the bucket;
    otherwise it is None after backward.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        comm: Communicator,
        *,
        launch: Callable[[Bucket], None],
        finish: Callable[[list[Bucket]], None],
        allocate: Callable[[Bucket], None] = lambda bucket: None,
        overlap: bool = True,
        finds_unused: bool = False,
        keep_grads: bool = True,
    ) -> None:
        """Register a hook for every parameter."""
        self.buckets, self.comm = buckets, comm
        self.sync = True
        self.steps = 0
        self.order: list[nn.Parameter] = []
        self._launch, self._finish, self._allocate = launch, finish, allocate
        self._overlap, self._finds_unused = overlap, finds_unused
        self._keep_grads = keep_grads
        self._running = False
        self._next = 0
        self._position: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._refill(buckets)
        for param in self._position:
            param.register_post_accumulate_grad_hook(self._grad_ready)

    def _refill(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        for bucket in buckets:
            for i, param in enumerate(bucket.params):
                self._position[param] = bucket, i

    def reorder(self, buckets: list[Bucket]) -> None:
        """Use other buckets for the same parameters."""
        self._refill(buckets)
        self.order = []

    def watch(self, output: Any) -> None:
        """Prepare for the backward pass of this output."""
        if torch._C._current_graph_task_id() == -1:  # not computed again in backward
            self._running = False  # an earlier pass may have failed
        for leaf in tree_leaves(output):
            if needs_grad(leaf):
                leaf.register_hook(self._begin)

    def _begin(self, _: Tensor | None = None) -> None:
        """At the first gradient of a backward pass: register a callback at its end."""
        if self._running or not self.sync:
            return
        self._running, self._next = True, 0
        self.order = []
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))
            bucket.launched, bucket.work = False, None
        Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _grad_ready(self, param: nn.Parameter) -> None:
        """A gradient is complete: copy it into its bucket."""
        bucket, i = self._position[param]
        self._begin()
        if bucket.data is None:
            self._allocate(bucket)
        grad, view = param.grad, bucket.views[i]
        assert grad is not None
        if grad.is_sparse:
            with fail_together(self.comm, "an error: sparse gradient"):
                raise UsageError(
                    f"{bucket.names[i]}: its gradient is sparse and buckets are dense; "
                    "give the embedding sparse=False"
                )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        if self._keep_grads or not self.sync:
            param.grad = view
        if not self.sync:
            return
        if not self._keep_grads:
            param.grad = None
        self.order.append(param)
        bucket.missing.discard(i)
        if self._overlap and not bucket.missing:
            self._launch_full()

    def _launch_full(self) -> None:
        """Launch full buckets, in order, up to the first one that is not full."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing:
                return
            bucket.launched = True
            self._next += 1
            self._launch(bucket)

    @torch.no_grad()
    def _end(self) -> None:
        """Backward is over: parameters without a gradient by now are unused."""
        unused = [b.names[i] for b in self.buckets for i in sorted(b.missing)]
        if unused and not self._finds_unused:
            self._running = False
            with fail_together(self.comm, "an error: unused parameters"):
                raise UsageError(
                    f"backward: {len(unused)} parameters got no gradient (the first is "
                    f"{unused[0]}); use all of them in every step, or pass "
                    "find_unused_parameters=True"
                )
        self._used = {id(p) for p in self.order}
        for bucket in self.buckets:
            # A launched bucket may be finished, and its memory released.
            if not bucket.launched:
                self._complete(bucket)
                self._launch_full()
        self._running = False
        self.steps += 1
        self._finish(self.buckets)

    def _complete(self, bucket: Bucket) -> None:
        """Missing gradients count as zero."""
        if bucket.data is None:
            self._allocate(bucket)
        for i in bucket.missing:
            if bucket.params[i].grad is None:
                bucket.views[i].zero_()
        bucket.missing = set()

    def was_used(self, param: nn.Parameter) -> bool:
        """Whether it had a gradient in the last backward pass."""
        return id(param) in self._used

    def parity(self) -> str:
        """A label for this step, so that calls of ranks one step apart do not match."""
        return ("even", "odd")[self.steps % 2]
