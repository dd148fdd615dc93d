"""Parameter servers: who has the parameters, and who has the gradients, talk in pairs.

    every step     workers push gradients, the server steps, workers pull parameters

It is how large models were first trained, and it teaches why all_reduce replaced it:
the server's link carries everybody's bytes, while the others are idle mostly.

                         a server sends        a worker sends
    central              (n-1) P               P
    sharded over s       (n-1) P/s             P, a part to each server
    (all_reduce)         2(n-1)/n P            2(n-1)/n P

With as many servers as ranks it is an all_reduce: P/n to everybody and back.

What servers can do and collectives cannot is not to wait. In `AsyncParameterServer` a
gradient is applied when it comes; a fast worker goes on without the slow ones, but by
no more than `staleness` steps, since old gradients lead astray.
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
from unisono.parallel.agreement import heard, leave, prepared
from unisono.parallel.flat import room, same_start, shares, trainable, views
from unisono.parallel.pieces import refuse_closure, refuse_whole
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

_PUSH, _PULL = 1, 2  # tags
_GLANCE_S = 0.002
Span = tuple[int, int]


class _Flat:
    """A module's parameters and gradients as two flat tensors, cut for the servers."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        servers: int,
        make: Callable[..., Optimizer],
        options: dict[str, Any],
    ) -> None:
        where = type(self).__name__
        self.module, self.comm = module, comm
        with prepared(comm, where) as told:
            self._check(servers, where)
            refuse_whole(make, where)
            self.params = [param for _, param in trainable(module, where)]
            dtypes = {param.dtype for param in self.params}
            if len(dtypes) != 1:
                raise BadArgument(
                    f"{where}: expected parameters of one type, got {dtypes}"
                )
            told.append(f"{servers} servers")
        same_start(comm, module, where)
        count = sum(param.numel() for param in self.params)
        self.flat = room(comm, count, self.params[0].dtype)
        for param, view in zip(self.params, views(self.flat, self.params), strict=True):
            param.data = view.copy_(param.detach())
        self.grads = room(comm, count + servers, self.flat.dtype)
        ends = accumulate(shares(count, servers), initial=0)
        self.spans: list[Span] = list(pairwise(ends))
        self.serving = comm.rank < servers
        self.inner: Optimizer | None = None
        if self.serving:
            begin, end = self.spans[comm.rank]
            self.mine = nn.Parameter(self.flat[begin:end])
        with prepared(comm, where):  # it may refuse its options
            if self.serving:
                self.inner = make([self.mine], **options)

    def _check(self, servers: int, where: str) -> None:
        """Raise if there cannot be so many servers."""
        n = self.comm.world_size
        if not 1 <= whole_number(f"{where}: servers", servers) <= n:
            raise BadArgument(f"{where}: servers = {servers}: expected 1..{n}")

    def _collect(self) -> Tensor:
        """The gradients, one after the other; zeros where there are none."""
        flat = self.grads[: self.flat.numel()]
        for param, view in zip(self.params, views(flat, self.params), strict=True):
            if param.grad is None:
                view.zero_()
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
        return flat

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self.params:
            param.grad = None

    def _hand_out(self, label: str) -> None:
        """Give every rank what each server has."""
        for server, (begin, end) in enumerate(self.spans):
            part = self.flat[begin:end]
            self.comm.broadcast(part, root=server, algorithm="naive", label=label)


class ParameterServer(_Flat):
    """Synchronous: all ranks are workers, and the first `servers` also have a share.

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
        """Begin with the first rank's parameters; all ranks together."""
        super().__init__(module, comm, servers, optimizer, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Push the gradients, have the servers step, pull the parameters."""
        with heard(self.comm, "an error: a closure"):
            refuse_closure(closure, "ParameterServer")
        grads = self._collect()
        for server, (begin, end) in enumerate(self.spans):
            self.comm.reduce(
                grads[begin:end],
                root=server,
                op="mean",
                algorithm="naive",  # everything to the server, in rank order
                label="push",
            )
        if self.inner is not None:
            begin, end = self.spans[self.comm.rank]
            self.mine.grad = grads[begin:end]
            self.inner.step()
        self._hand_out("pull")


class AsyncParameterServer(_Flat):
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
        """Begin with the first rank's parameters; all ranks together."""
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
        """Push this worker's gradients and pull what the servers have made of all."""
        refuse_closure(closure, "AsyncParameterServer")
        if self.serving:
            raise UsageError("AsyncParameterServer.step: a server serves; call serve()")
        self._collect()
        self._push(working=True)
        for server, (begin, end) in enumerate(self.spans):
            self.comm.recv(self.flat[begin:end], server, tag=_PULL)
        self.zero_grad()

    def _push(self, *, working: bool) -> None:
        """To each server its share, and whether more will come."""
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
        """Step with each gradient as it comes, until all workers are done."""
        if self.inner is None:
            raise UsageError("AsyncParameterServer.serve: a worker works; call step()")
        begin, end = self.spans[self.comm.rank]
        size = end - begin + 1
        came = {w: torch.empty(size, dtype=self.flat.dtype) for w in self.clocks}
        posted = {w: self._listen(w, came[w]) for w in self.clocks}
        waiting: set[int] = set()
        while self.clocks:
            worker = _first(posted)
            del posted[worker]
            if not came[worker][-1]:  # its last word
                del self.clocks[worker]
            else:
                self.mine.grad = came[worker][:-1]
                self.inner.step()
                self.clocks[worker] += 1
                waiting.add(worker)
                posted[worker] = self._listen(worker, came[worker])
            waiting -= self._answer(waiting)

    def _listen(self, worker: int, into: Tensor) -> Work:
        """Each worker by itself, so that the loss of any is noticed."""
        work: Work = self.comm.recv(into, worker, tag=_PUSH, async_op=True)
        return work

    def _answer(self, waiting: set[int]) -> set[int]:
        """Send the parameters to those who are not too far ahead."""
        slowest = min(self.clocks.values(), default=0)
        ahead = max(self.clocks.values(), default=0) - slowest
        self.furthest_ahead = max(self.furthest_ahead, ahead)
        begin, end = self.spans[self.comm.rank]
        ready = {w for w in waiting if self.clocks[w] - slowest <= self.staleness}
        for worker in sorted(ready):
            self.comm.send(self.flat[begin:end], worker, tag=_PULL)
        return ready

    def __enter__(self) -> AsyncParameterServer:
        """Work or serve."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say that no more comes; then all take the final parameters."""
        if error is not None:
            leave(self.comm, error)  # others wait for its messages
            return
        if not self.serving and not self._done:
            self._done = True
            self._push(working=False)
        self._hand_out("final parameters")


def _first(posted: dict[int, Work]) -> int:
    """The worker whose message has come; of several, the one that waited longest."""
    while True:
        for worker, work in posted.items():
            if work.done():
                work.wait()
                return worker
        with suppress(CollectiveTimeout):  # then look at the others
            next(iter(posted.values())).wait(timeout_s=_GLANCE_S)
