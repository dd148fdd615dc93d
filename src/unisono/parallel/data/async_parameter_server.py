"""Asynchronous parameter servers: a gradient is applied when it arrives.

Unlike collectives, servers need not wait for all ranks. A fast worker goes on without
the slow ones, but by no more than `staleness` steps, since old gradients slow down
convergence. What a rank sends is as with synchronous servers (`parameter_server`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, CollectiveTimeout, UsageError, whole_number
from unisono.parallel.common.agreement import close_after
from unisono.parallel.common.optimizers import refuse_closure
from unisono.parallel.data.served_parameters import ServedParameters
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

_PUSH, _PULL = 1, 2  # tags
_POLL_S = 0.002


class AsyncParameterServer(ServedParameters):
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

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.clear_grads()

    def step(self, closure: Any = None) -> None:
        """Push this worker's gradients and pull the parameters."""
        refuse_closure(closure, "AsyncParameterServer")
        if self.serving:
            raise UsageError(
                "AsyncParameterServer.step: this rank is a server; call serve()"
            )
        self.collect_grads()
        self._push(working=True)
        for server, (begin, end) in enumerate(self.spans):
            self.comm.recv(self.flat[begin:end], server, tag=_PULL)
        self.clear_grads()

    def _push(self, *, working: bool) -> None:
        """Send each server its part of the gradients, and whether more will follow."""
        sent = []
        for server, (begin, end) in enumerate(self.spans):
            message = self.grads.new_empty(end - begin + 1)
            message[:-1] = self.grads[begin:end]
            message[-1] = float(working)
            work = self.comm.send(message, server, tag=_PUSH, async_op=True)
            sent.append(work)
        for work in sent:
            work.wait()

    def serve(self) -> None:
        """Step with each gradient as it arrives, until all workers are done."""
        if not self.serving:
            raise UsageError(
                "AsyncParameterServer.serve: this rank is a worker; call step()"
            )
        begin, end = self.span
        size = end - begin + 1
        messages = {w: self.flat.new_empty(size) for w in self.clocks}
        posted = {w: self._post_recv(w, messages[w]) for w in self.clocks}
        waiting: set[int] = set()
        while self.clocks:
            worker = _next_arrival(posted)
            del posted[worker]
            if not messages[worker][-1]:  # its last message
                del self.clocks[worker]
            else:
                self.set_shard_grads(messages[worker][:-1])
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
        begin, end = self.span
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
        self.broadcast_parameters("final parameters")


def _next_arrival(posted: dict[int, Work]) -> int:
    """A worker whose message has arrived; of several, the one posted first."""
    while True:
        for worker, work in posted.items():
            if work.done():
                work.wait()
                return worker
        with suppress(CollectiveTimeout):  # then check the other workers
            next(iter(posted.values())).wait(timeout_s=_POLL_S)
