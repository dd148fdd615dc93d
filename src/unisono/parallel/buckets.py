"""Gradients in buckets, each reduced as soon as it is full, while backward goes on.

Backward yields gradients from the last layer to the first. They are laid into buckets
in that order, so that the first bucket is full long before backward ends:

    backward   | layer 4 | layer 3 | layer 2 | layer 1 |
    bucket 0             full: its collective runs . . .
    bucket 1                                 full: . . . .   wait

One collective per gradient would cost a latency each; one for all could only begin at
the end. Collectives must begin in the same order on every rank, so a bucket that fills
early waits for those before it.

What is done with a full bucket is not decided here: DDP all-reduces it, ZeRO
reduce-scatters it. Hooks run on the thread that calls backward (torch runs the CPU's
part of a graph there), so ranks may as well be threads.
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
from unisono.parallel.agreement import heard
from unisono.parallel.flat import Named, needs_grad, offsets, views
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that the collectives begin early."""


@dataclass
class Bucket:
    """Some parameters of one element type, and where their gradients lie."""

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
    def begins(self) -> list[int]:
        """Where each gradient begins, and the end."""
        return offsets(self.params)

    def settle(self, data: Tensor) -> None:
        """Let the gradients live in this flat tensor."""
        self.data = data
        self.views = views(data, self.params)


def fill(named: Named, cap_bytes: int) -> list[Bucket]:
    """Parameters, in the order their gradients come, into buckets of one type each."""
    if cap_bytes <= 0:
        raise BadArgument("bucket_cap_mb: expected a positive number")
    cap = min(FIRST_BUCKET_BYTES, cap_bytes)
    done: list[Bucket] = []
    open_ones: dict[torch.dtype, Bucket] = {}
    for name, param in named:
        bucket = open_ones.setdefault(param.dtype, Bucket(0, [], []))
        bucket.names.append(name)
        bucket.params.append(param)
        if bucket.count * param.element_size() >= cap:
            done.append(open_ones.pop(param.dtype))
            cap = cap_bytes
    done += open_ones.values()
    for number, bucket in enumerate(done):
        bucket.number = number
    return done


class Buckets:
    """Counts gradients as they come; tells when a bucket is full, and when all are.

    `launch(bucket)` begins its collective; `land(buckets)` is called at the end of
    backward, when all have been launched. `keeps_grads` says whether .grad is to be the
    gradient's place in the bucket or None.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        comm: Communicator,
        *,
        launch: Callable[[Bucket], None],
        land: Callable[[list[Bucket]], None],
        take: Callable[[Bucket], None] = lambda bucket: None,
        overlap: bool = True,
        finds_unused: bool = False,
        keeps_grads: bool = True,
    ) -> None:
        """Hook every parameter."""
        self.buckets, self.comm = buckets, comm
        self.sync = True
        self.steps = 0
        self.order: list[nn.Parameter] = []
        self._launch, self._land, self._take = launch, land, take
        self._overlap, self._finds_unused = overlap, finds_unused
        self._keeps_grads = keeps_grads
        self._running = False
        self._next = 0
        self._place: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._refill(buckets)
        for param in self._place:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _refill(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        for bucket in buckets:
            for i, param in enumerate(bucket.params):
                self._place[param] = bucket, i

    def reorder(self, buckets: list[Bucket]) -> None:
        """Go on with the same parameters in other buckets."""
        self._refill(buckets)
        self.order = []

    def watch(self, output: Any) -> None:
        """Take part in the backward pass of this output, even if no parameter does."""
        if torch._C._current_graph_task_id() == -1:  # not computed again in backward
            self._running = False  # whatever an earlier pass left when it failed
        for leaf in tree_leaves(output):
            if needs_grad(leaf):
                leaf.register_hook(self._begin)

    def _begin(self, _: Tensor | None = None) -> None:
        """Once in a backward pass: ask to be called at its end."""
        if self._running or not self.sync:
            return
        self._running, self._next = True, 0
        self.order = []
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))
            bucket.launched, bucket.work = False, None
        Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _arrived(self, param: nn.Parameter) -> None:
        """A gradient is complete: lay it into its bucket."""
        bucket, i = self._place[param]
        self._begin()
        if bucket.data is None:
            self._take(bucket)
        grad, place = param.grad, bucket.views[i]
        assert grad is not None
        if grad.is_sparse:
            with heard(self.comm, "an error: sparse gradient"):
                raise UsageError(
                    f"{bucket.names[i]}: its gradient is sparse and buckets are dense; "
                    "give the embedding sparse=False"
                )
        if grad.data_ptr() != place.data_ptr():
            place.copy_(grad)
        if self._keeps_grads or not self.sync:
            param.grad = place
        if not self.sync:
            return
        if not self._keeps_grads:
            param.grad = None
        self.order.append(param)
        bucket.missing.discard(i)
        if self._overlap and not bucket.missing:
            self._launch_full()

    def _launch_full(self) -> None:
        """Launch what is full and has nothing unlaunched before it."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing:
                return
            bucket.launched = True
            self._next += 1
            self._launch(bucket)

    @torch.no_grad()
    def _end(self) -> None:
        """Backward is over: what has not come by now does not come."""
        unused = [b.names[i] for b in self.buckets for i in sorted(b.missing)]
        if unused and not self._finds_unused:
            self._running = False
            with heard(self.comm, "an error: unused parameters"):
                raise UsageError(
                    f"backward: {len(unused)} parameters got no gradient (the first is "
                    f"{unused[0]}); use all of them in every step, or say "
                    "find_unused_parameters=True"
                )
        self._used = {id(p) for p in self.order}
        for bucket in self.buckets:
            # One that is launched may have landed, and given its memory back.
            if not bucket.launched:
                self._complete(bucket)
                self._launch_full()
        self._running = False
        self.steps += 1
        self._land(self.buckets)

    def _complete(self, bucket: Bucket) -> None:
        """What has not come counts as zero."""
        if bucket.data is None:
            self._take(bucket)
        for i in bucket.missing:
            if bucket.params[i].grad is None:
                bucket.views[i].zero_()
        bucket.missing = set()

    def was_used(self, param: nn.Parameter) -> bool:
        """Whether the last backward pass had a gradient for it."""
        return id(param) in self._used

    def parity(self) -> str:
        """Which step this is, so that ranks which are one apart do not match."""
        return ("even", "odd")[self.steps % 2]
