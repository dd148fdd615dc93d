"""An ordered set of ranks that runs collectives.

    comm = unisono.init()
    comm.all_reduce(x)                          in place, returns x
    shard = comm.reduce_scatter(x, op="mean")
    work = comm.all_gather(x, async_op=True); y = work.wait()

All ranks make the same calls in the same order; otherwise all raise an error. Every
call returns the right answer or raises, at the latest after `timeout_s`. A communicator
may be used by several threads; calls then queue.

Every collective takes `algorithm=` (a name as `ring`, `tree:radix=4` or `ring+direct`),
`async_op=True` (returns a Work), `timeout_s=`, `label=` (what the call is for: ranks
must agree on that too, and errors and records name it), and those that reduce also
`reproducible=True` (the bits depend on nothing but the inputs). With `codec="fp8"` (see
`unisono.codecs`) values are sent as codes, smaller and less exact: between all ranks,
or with `codec="fp8@hosts"` only between hosts. All ranks still end with the same bits,
and the root of a broadcast, too, has the decoded values. A call is refused if the
relative error of its result, known beforehand, is above `error_bound=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from unisono.codecs.options import is_scheme
from unisono.deprecation import renamed_method
from unisono.errors import whole_number
from unisono.runtime import groups, object_collectives, python_reductions, scans
from unisono.runtime.call import arguments
from unisono.runtime.call.messages import incoming, outgoing
from unisono.runtime.call.options import CallOptions, Options, with_option_help
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.compress import all_reduce as compress
from unisono.runtime.core import Core
from unisono.runtime.failing import fail_together
from unisono.runtime.identity import Identity
from unisono.runtime.in_place import InPlaceArrays
from unisono.runtime.observe import explain, recorder
from unisono.runtime.plan.plans import CODES
from unisono.runtime.redistribution import redistribute
from unisono.transports.session import refuse_too_many

_ALL_REDUCE, _REDUCE = CODES["all_reduce"], CODES["reduce"]
_ALL_GATHER, _GATHER = CODES["all_gather"], CODES["gather"]
_REDUCE_SCATTER, _SCATTER = CODES["reduce_scatter"], CODES["scatter"]
_ALL_TO_ALL, _BROADCAST = CODES["all_to_all"], CODES["broadcast"]
_BARRIER = CODES["barrier"]
SHRINK_S, GROW_S = 30.0, 300.0
_NOTHING = np.empty(0, dtype=np.uint8)  # what a barrier moves
_COPIES = Reduction("sum")  # for collectives that reduce nothing


@with_option_help
class Communicator(Identity, InPlaceArrays):
    """Ranks 0..world_size-1, of which this process (or thread) is `rank`."""

    def __init__(self, core: Core) -> None:
        """Not for users: `unisono.init`, `split` and `testing.world` make them."""
        super().__init__(core)
        self.left_out: tuple[int, ...] = ()
        self._position, self._quick = core.position, core.quick
        core.device.split = groups.splitter(self)

    def abort(self) -> None:
        """Break it for all ranks, and leave.

        Calls in flight, here and on other ranks, and all later ones raise PeerLost
        that names this rank. For a rank that has found an error it cannot go on with.
        """
        if not self.core.closed:
            self.core.abort()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until all calls on CUDA arrays have ended; raise if one has failed.

        Such calls run on a stream and do not wait for the device: an error is raised by
        the next call, or here. CollectiveTimeout after `timeout_s`, if given.
        """
        self.core.device.synchronize(timeout_s)

    def close(self) -> None:
        """Leave. Others that still wait for this rank raise PeerLost."""
        self.core.close()

    def all_reduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, **how: Unpack[Options]
    ) -> Any:
        """Reduce every rank's x; all get the result, in place or in `out`.

        `op` is sum, mean (or avg), prod, min, max, band, bor, bxor, a constant of
        `ReduceOp`, `premul_sum(factor)`, or a function of two arrays.
        """
        if state := self._quick(_ALL_REDUCE, x, out, op, 0, how):
            if state == 1:
                return x if out is None else out
            return self.core.outcome(state)
        reduction, options = as_reduction(op), CallOptions(**how)
        if how.get("codec") is not None and is_scheme(how["codec"]):
            return compress.all_reduce(self, x, out, reduction, options)
        if reduction.in_python:
            return python_reductions.all_reduce(self, x, out, reduction, options)
        call = arguments.all_reduce(self._position, x, out)
        key = _ALL_REDUCE, x, out, op, 0, how
        return self.core.run(call, reduction, options, key)

    def broadcast(
        self, x: Any, *, root: int = 0, out: Any = None, **how: Unpack[Options]
    ) -> Any:
        """Give every rank the root's x, in place or in `out`."""
        if state := self._quick(_BROADCAST, x, out, None, root, how):
            if state == 1:
                return x if out is None else out
            return self.core.outcome(state)
        call = arguments.broadcast(self._position, x, out, root)
        key = _BROADCAST, x, out, None, root, how
        return self.core.run(call, _COPIES, CallOptions(**how), key)

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: Any = "sum",
        out: Any = None,
        **how: Unpack[Options],
    ) -> Any:
        """Reduce every rank's x for the root, in place or in its `out`."""
        key = _REDUCE, x, out, op, root, how
        if state := self._quick(*key):
            if state == 1:
                return None if root != self.rank else x if out is None else out
            return self.core.outcome(state)
        reduction, options = as_reduction(op), CallOptions(**how)
        if reduction.in_python:
            return python_reductions.reduce(self, x, out, reduction, root, options)
        call = arguments.reduce(self._position, x, out, root)
        return self.core.run(call, reduction, options, key)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any:
        """Give every rank the rows of all, in rank order: (k, ...) → (n·k, ...).

        `counts` are the rows of each rank, if they are not all as many as here.
        """
        key = _ALL_GATHER, x, out, None, 0, how
        even = counts is None and out is not None
        if even and (state := self._quick(*key)):
            return out if state == 1 else self.core.outcome(state)
        call = arguments.all_gather(self._position, x, out, counts)
        return self.core.run(call, _COPIES, CallOptions(**how), key if even else None)

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any:
        """Reduce every rank's x; each rank gets its rows: (n·k, ...) → (k, ...)."""
        key = _REDUCE_SCATTER, x, out, op, 0, how
        even = counts is None and out is not None
        if even and (state := self._quick(*key)):
            return out if state == 1 else self.core.outcome(state)
        reduction, options = as_reduction(op), CallOptions(**how)
        if reduction.in_python:
            return python_reductions.reduce_scatter(
                self, x, out, reduction, counts, options
            )
        call = arguments.reduce_scatter(self._position, x, out, counts)
        return self.core.run(call, reduction, options, key if even else None)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any:
        """Give the root the rows of all, in rank order; others get None."""
        out = None if root != self.rank else out
        key = _GATHER, x, out, None, root, how
        plain = counts is None and (out is not None or root != self.rank)
        if plain and (state := self._quick(*key)):
            return out if state == 1 else self.core.outcome(state)
        call = arguments.gather(self._position, x, out, root, counts)
        return self.core.run(call, _COPIES, CallOptions(**how), key if plain else None)

    def scatter(
        self,
        x: Any = None,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any:
        """Give each rank its rows of the root's x.

        All but the root give `out`, or an x as large as the root's, which is not read.
        """
        array, other = (x, out) if root == self.rank else (out, None)
        key = _SCATTER, array, other, None, root, how
        plain = counts is None and out is not None
        if plain and (state := self._quick(*key)):
            return out if state == 1 else self.core.outcome(state)
        with fail_together(self, "an error: scatter's out", how.get("timeout_s")):
            call = arguments.scatter(self._position, x, out, root, counts)
        return self.core.run(call, _COPIES, CallOptions(**how), key if plain else None)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any:
        """Send each rank some rows of x: the j-th share of rank i is the i-th of j's.

        With counts the shares are uneven. All ranks then give `send_counts`; they tell
        each other, and `recv_counts`, if given, is checked against what others send.
        """
        key = _ALL_TO_ALL, x, out, None, 0, how
        even = send_counts is None and recv_counts is None
        if even and out is not None and (state := self._quick(*key)):
            return out if state == 1 else self.core.outcome(state)
        matrix = None
        if not even:
            matrix = object_collectives.exchange_counts(
                self, x, send_counts, recv_counts
            )
            send_counts = matrix[self.rank]
        call = arguments.all_to_all(self._position, x, out, send_counts, matrix)
        quick = key if even and out is not None else None
        return self.core.run(call, _COPIES, CallOptions(**how), quick)

    def barrier(self, **how: Unpack[Options]) -> Any:
        """Wait until every rank has come here."""
        key = _BARRIER, _NOTHING, None, None, 0, how
        if state := self._quick(*key):
            return None if state == 1 else self.core.outcome(state)
        call = arguments.barrier(_NOTHING)
        return self.core.run(call, _COPIES, CallOptions(**how), key)

    def send(self, x: Any, dst: int, *, tag: int = 0, **how: Unpack[Options]) -> Any:
        """Send x to rank `dst`, which receives it with the same tag.

        A small message leaves at once; a large one leaves as it is received.
        """
        source = outgoing(x, self.synchronize)
        return self.core.transfer("send", source, dst, tag, CallOptions(**how))

    def recv(
        self,
        out: Any,
        src: int | None = None,
        *,
        tag: int = 0,
        **how: Unpack[Options],
    ) -> Any:
        """Receive into `out` from rank `src`, or from any rank if None.

        With async_op=True the Work's `source` is the sender.
        """
        target, finish = incoming(out, self.synchronize)
        options = CallOptions(**how)
        return self.core.transfer("recv", target, src, tag, options, out, finish)

    def sendrecv(
        self,
        x: Any,
        dst: int,
        out: Any,
        src: int | None = None,
        *,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send x to `dst` and receive into `out` from `src` at the same time.

        Any ring or pair of ranks may call it together: none waits for the other to
        send first. `recv_tag` is the tag of what is received, if it is another.
        """
        wanted = tag if recv_tag is None else recv_tag
        limit: Options = {"async_op": True, "timeout_s": timeout_s}
        arriving = self.recv(out, src, tag=wanted, **limit)
        leaving = self.send(x, dst, tag=tag, **limit)
        result = arriving.wait()
        leaving.wait()
        return result

    def redistribute(
        self,
        x: Any,
        from_: Any,
        to: Any,
        *,
        shape: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        op: Any = "sum",
        **how: Unpack[Options],
    ) -> Any:
        """Divide in another way what the ranks have together: a new array.

        `from_` and `to` are the number of a dimension (each rank has its part along
        it), None (each has the whole) or, `from_` only, "partial" (summands, by `op`).
        One collective, and a small one before it if `shape`, that of the whole, is not
        given. The first new parts have one row more, or each its number of `sizes`.
        """
        return redistribute(self, x, from_, to, shape, sizes, op, CallOptions(**how))

    def scan(
        self, x: Any, *, op: Any = "sum", out: Any = None, **how: Unpack[Options]
    ) -> Any:
        """Reduce the x of ranks 0 to this one, in place or in `out`."""
        return scans.scan(self, x, out, op, CallOptions(**how), inclusive=True)

    def exscan(
        self, x: Any, *, op: Any = "sum", out: Any = None, **how: Unpack[Options]
    ) -> Any:
        """Reduce the x of the ranks before this one, in place or in `out`.

        Rank 0 gets what changes nothing: 0 of a sum, 1 of a product, infinity of min.
        """
        return scans.scan(self, x, out, op, CallOptions(**how), inclusive=False)

    def broadcast_object(
        self, thing: Any = None, root: int = 0, *, allow_pickle: bool = False
    ) -> Any:
        """Give every rank the root's object: plain data, unless pickle is allowed."""
        return object_collectives.broadcast_object(self, thing, root, allow_pickle)

    def all_gather_objects(
        self, thing: Any, *, allow_pickle: bool = False
    ) -> list[Any]:
        """Give every rank the objects of all, in rank order."""
        return object_collectives.all_gather_objects(self, thing, allow_pickle)

    def gather_objects(
        self, thing: Any, root: int = 0, *, allow_pickle: bool = False
    ) -> list[Any] | None:
        """Give the root the objects of all, in rank order; others get None."""
        return object_collectives.gather_objects(self, thing, root, allow_pickle)

    def scatter_objects(
        self,
        things: Sequence[Any] | None = None,
        root: int = 0,
        *,
        allow_pickle: bool = False,
    ) -> Any:
        """Give each rank its one of the root's objects, a sequence of world_size."""
        return object_collectives.scatter_objects(self, things, root, allow_pickle)

    all_gather_object = renamed_method("all_gather_object", all_gather_objects)
    gather_object = renamed_method("gather_object", gather_objects)

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """A communicator of all ranks that give the same color, ordered by key.

        All ranks of this one call it. With color None a rank takes no part.
        """
        return groups.split(self, color, self.rank if key is None else key)

    def duplicate(self) -> Communicator:
        """Another communicator of the same ranks, independent of this one."""
        return groups.duplicate(self)

    def shrink(
        self, *, timeout_s: float = SHRINK_S, dead: Sequence[int] = ()
    ) -> Communicator:
        """The communicator of those who are left: epoch one up, ranks moved together.

        All survivors call it, after a PeerLost or at any time; this one is closed then.
        A rank that may live but does not come within `timeout_s`, or cannot be reached,
        is left out, and is among `left_out` of the new one. On several hosts those who
        go on without it must be more than half, or half with rank 0; else ConnectFailed
        is raised. `dead` are ranks that you know to have ended, from a scheduler, say:
        for these no majority is needed. If that is wrong, there may be two worlds.
        On a communicator from split it is an error.
        """
        world = self.core.changeable("shrink")
        found: Communicator = world.shrink(self, timeout_s, dead)
        return found

    def grow(
        self,
        world_size: int,
        *,
        timeout_s: float = GROW_S,
        address: str | None = None,
    ) -> Communicator:
        """The communicator of these ranks and newcomers, `world_size` in all.

        All ranks call it, and wait until so many processes have called
        `unisono.init(join=True)`. The ranks keep their numbers, newcomers follow them;
        this one is closed then. If it raises ConnectFailed, it is as before. `address`
        is where newcomers come across hosts, if not to the address of the job.
        """
        refuse_too_many(whole_number("world_size", world_size))
        world = self.core.changeable("grow")
        found: Communicator = world.grow(self, world_size, timeout_s, address)
        return found

    def explain(self, collective: str, x: Any = None, **how: Any) -> str:
        """What would run for such a call, and why; how long it took, if it has run."""
        if collective == "all_reduce" and is_scheme(how.get("codec")):
            return compress.explain(self, x, CallOptions(**how))
        return explain.explain(self.core, collective, x, **how)

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent to others here, in calls that are done.

        Counted from the schedules that ran and the sizes they had: what a message on a
        wire would carry, though ranks of one host read each other's memory. Headers
        and barriers carry nothing. Calls on CUDA arrays count when they are launched.
        """
        return self.core.native.sent_bytes() + self.core.device.sent_bytes(self.core)

    def records(self) -> list[dict[str, Any]]:
        """The last 2,000 calls of this rank, as its flight recorder has them."""
        return recorder.records(self.core.session.logbook)

    def __enter__(self) -> Communicator:
        """For `with unisono.init() as comm:`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()
