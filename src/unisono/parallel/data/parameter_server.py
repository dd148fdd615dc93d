"""Parameter servers: some ranks have the parameters, workers send them gradients.

    every step     workers push gradients, the server steps, workers pull parameters

Large models were first trained this way, and it shows why all_reduce replaced it: the
server's link carries all ranks' bytes, while the other links are idle most of the time.

                         a server sends        a worker sends
    central              (n-1) P               P
    sharded over s       (n-1) P/s             P, a part to each server
    (all_reduce)         2(n-1)/n P            2(n-1)/n P

With as many servers as ranks it is an all_reduce: P/n to every rank and back.

    memory per rank   parameters + gradients; a server also 1/s of the optimizer state

Unlike collectives, servers need not wait for all ranks. In `AsyncParameterServer` a
gradient is applied when it arrives; a fast worker goes on without the slow ones, but by
no more than `staleness` steps, since old gradients slow down convergence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, CollectiveTimeout, UsageError, whole_number
from unisono.parallel.common.agreement import close_after, fail_together, setup_together
from unisono.parallel.common.flat import shared_zeros, views
from unisono.parallel.common.module_state import sync_module_state, trainable_parameters
from unisono.parallel.common.optimizers import refuse_closure, refuse_not_elementwise
from unisono.parallel.common.shard_math import shard_sizes
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

_PUSH, _PULL = 1, 2  # tags
_POLL_S = 0.002
Span = tuple[int, int]


class _FlatParameters:
    """A module's parameters and gradients as two flat tensors, split by server."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        servers: int,
        optimizer: Callable[..., Optimizer],
        options: dict[str, Any],
    ) -> None:
        where = type(self).__name__
        self.module, self.comm = module, comm
        with setup_together(comm, where) as settings:
            self._check(servers, where)
            refuse_not_elementwise(optimizer, where)
            self.params = [param for _, param in trainable_parameters(module, where)]
            dtypes = {param.dtype for param in self.params}
            if len(dtypes) != 1:
                raise BadArgument(
                    f"{where}: expected parameters of one type, got {dtypes}"
                )
            settings.append(f"{servers} servers")
        sync_module_state(comm, module, where)
        count = sum(param.numel() for param in self.params)
        self.flat = shared_zeros(comm, count, self.params[0].dtype)
        for param, view in zip(self.params, views(self.flat, self.params), strict=True):
            param.data = view.copy_(param.detach())
        self.grads = shared_zeros(comm, count, self.flat.dtype)
        self._grad_views = views(self.grads, self.params)
        self.zero_grad()
        ends = accumulate(shard_sizes(count, servers), initial=0)
        self.spans: list[Span] = list(pairwise(ends))
        self.serving = comm.rank < servers
        self.inner: Optimizer | None = None
        if self.serving:
            begin, end = self.spans[comm.rank]
            self.mine = nn.Parameter(self.flat[begin:end])
        with setup_together(comm, where):  # the optimizer may refuse its options
            if self.serving:
                self.inner = optimizer([self.mine], **options)

    def _check(self, servers: int, where: str) -> None:
        """Raise if the number of servers is out of range."""
        n = self.comm.world_size
        if not 1 <= whole_number(f"{where}: servers", servers) <= n:
            raise BadArgument(f"{where}: servers = {servers}: expected 1..{n}")

    def _collect(self) -> Tensor:
        """The gradients in one flat tensor; zeros where there are none."""
        for param, view in zip(self.params, self._grad_views, strict=True):
            if param.grad is None:
                view.zero_()
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
            param.grad = view  # it has no memory of its own
        return self.grads

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients; they stay views of one flat tensor."""
        self.grads.zero_()
        for param, view in zip(self.params, self._grad_views, strict=True):
            param.grad = view

    def _broadcast(self, label: str) -> None:
        """Give every rank each server's parameters."""
        for server, (begin, end) in enumerate(self.spans):
            part = self.flat[begin:end]
            self.comm.broadcast(part, root=server, algorithm="naive", label=label)


class ParameterServer(_FlatParameters):
    """Synchronous: all ranks are workers, and the first `servers` ranks also serve.

        server = ParameterServer(model, comm, torch.optim.SGD, lr=0.1)
        loss(model(x), y).backward(); server.step(); server.zero_grad()

    The results are those of DDP, to the bit if `reproducible`.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: Callable[..., Optimizer],
        *,
        servers: int = 1,
        **options: Any,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        super().__init__(module, comm, servers, optimizer, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Push the gradients, step on the servers, pull the parameters."""
        with fail_together(self.comm, "an error: a closure"):
            refuse_closure(closure, "ParameterServer")
        grads = self._collect()
        for server, (begin, end) in enumerate(self.spans):
            self.comm.reduce(
                grads[begin:end],
                root=server,
                op="mean",
                algorithm="naive",  # all ranks send to the server; summed in rank order
                label="push",
            )
        if self.inner is not None:
            begin, end = self.spans[self.comm.rank]
            self.mine.grad = grads[begin:end]
            self.inner.step()
        self._broadcast("pull")


class AsyncParameterServer(_FlatParameters):
    """Asynchronous: the first `servers` ranks only serve, the others only work.

        server = AsyncParameterServer(model, comm, torch.optim.SGD, staleness=2, lr=0.1)
        with server:
            if server.serving:
                server.serve()
            else:
                for x, y in data:
                    loss(model(x), y).backward()
                    server.step()

    No worker is more than `staleness` + 1 steps ahead of the slowest that still works.
    At the end of the block all ranks have the same parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: Callable[..., Optimizer],
        *,
        servers: int = 1,
        staleness: int = 0,
        **options: Any,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        self.staleness = staleness
        super().__init__(module, comm, servers, optimizer, options)
        self.clocks = dict.fromkeys(range(servers, comm.world_size), 0)
        self.furthest_ahead = 0
        self._done = False

    def _check(self, servers: int, where: str) -> None:
        n, staleness = self.comm.world_size, self.staleness
        whole_number(f"{where}: staleness", staleness)
        if not 1 <= whole_number(f"{where}: servers", servers) < n or staleness < 0:
            raise BadArgument(
                f"{where}: servers = {servers}, staleness = {staleness}: expected a "
                f"server and a worker at least among {n} ranks, and no negative "
                "staleness"
            )

    def step(self, closure: Any = None) -> None:
        """Push this worker's gradients and pull the parameters."""
        refuse_closure(closure, "AsyncParameterServer")
        if self.serving:
            raise UsageError(
                "AsyncParameterServer.step: this rank is a server; call serve()"
            )
        self._collect()
        self._push(working=True)
        for server, (begin, end) in enumerate(self.spans):
            self.comm.recv(self.flat[begin:end], server, tag=_PULL)
        self.zero_grad()

    def _push(self, *, working: bool) -> None:
        """Send each server its part of the gradients, and whether more will follow."""
        sent = []
        for server, (begin, end) in enumerate(self.spans):
            message = torch.empty(end - begin + 1, dtype=self.grads.dtype)
            message[:-1] = self.grads[begin:end]
            message[-1] = float(working)
            work = self.comm.send(message, server, tag=_PUSH, async_op=True)
            sent.append(work)
        for work in sent:
            work.wait()

    def serve(self) -> None:
        """Step with each gradient as it arrives, until all workers are done."""
        if self.inner is None:
            raise UsageError(
                "AsyncParameterServer.serve: this rank is a worker; call step()"
            )
        begin, end = self.spans[self.comm.rank]
        size = end - begin + 1
        messages = {w: torch.empty(size, dtype=self.flat.dtype) for w in self.clocks}
        posted = {w: self._post_recv(w, messages[w]) for w in self.clocks}
        waiting: set[int] = set()
        while self.clocks:
            worker = _next_arrival(posted)
            del posted[worker]
            if not messages[worker][-1]:  # its last message
                del self.clocks[worker]
            else:
                self.mine.grad = messages[worker][:-1]
                self.inner.step()
                self.clocks[worker] += 1
                waiting.add(worker)
                posted[worker] = self._post_recv(worker, messages[worker])
            waiting -= self._answer(waiting)

    def _post_recv(self, worker: int, into: Tensor) -> Work:
        """One receive per worker, so that the loss of any worker is noticed."""
        work: Work = self.comm.recv(into, worker, tag=_PUSH, async_op=True)
        return work

    def _answer(self, waiting: set[int]) -> set[int]:
        """Send the parameters to the workers that are not too far ahead."""
        slowest = min(self.clocks.values(), default=0)
        ahead = max(self.clocks.values(), default=0) - slowest
        self.furthest_ahead = max(self.furthest_ahead, ahead)
        begin, end = self.spans[self.comm.rank]
        ready = {w for w in waiting if self.clocks[w] - slowest <= self.staleness}
        for worker in sorted(ready):
            self.comm.send(self.flat[begin:end], worker, tag=_PULL)
        return ready

    def __enter__(self) -> AsyncParameterServer:
        """Begin to work or to serve."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the servers that no more follows; then all get the final parameters."""
        if error is not None:
            close_after(self.comm, error)  # other ranks wait for its messages
            return
        if not self.serving and not self._done:
            self._done = True
            self._push(working=False)
        self._broadcast("final parameters")


def _next_arrival(posted: dict[int, Work]) -> int:
    """A worker whose message has arrived; of several, the one posted first."""
    while True:
        for worker, work in posted.items():
            if work.done():
                work.wait()
                return worker
        with suppress(CollectiveTimeout):  # then check the other workers
            next(iter(posted.values())).wait(timeout_s=_POLL_S)
