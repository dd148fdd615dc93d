"""The common path of all calls of a communicator.

A kind of call that was made before finds its plan by a key and starts at once. The
native core caches the plans of plain calls itself, so that these need little Python.
When a call fails, the native core's failure code becomes an error that names ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import finalize

import numpy as np

from unisono import _native
from unisono.algorithms import Spec, read
from unisono.dtypes import DType
from unisono.errors import (
    BadArgument,
    TransportError,
    UnisonoError,
    UsageError,
    whole_number,
)
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.connecting import connecting
from unisono.runtime.call.options import CallKey, CallOptions
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.call.registered import RegisteredArrays
from unisono.runtime.call.resizable import ResizableWorld
from unisono.runtime.call.timeouts import TIMEOUT_S, nanoseconds
from unisono.runtime.call.work import CallsInFlight, Work
from unisono.runtime.device.half import DeviceHalf
from unisono.runtime.observe import raising
from unisono.runtime.observe.failures import describe_call, late_hint
from unisono.runtime.plan.codec_plans import coded_plan
from unisono.runtime.plan.plans import CODES, CallKind, make_plan, rank_program
from unisono.runtime.plan.select import choose
from unisono.schedule.placement import numbered
from unisono.transports.session import Known, Peer, Session

LATE_S = 5.0


class Core:
    """The state of one communicator, and how a call is carried out.

    A `Communicator` has one and delegates to it; so do the packages of unisono that
    need more than the public methods. It is not for users.
    """

    def __init__(
        self,
        session: Session,
        native: _native.Comm,
        ranks: Sequence[int],
        *,
        agreed: int,
        timeout_s: float = TIMEOUT_S,
        name: str = "world",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`agreed` is a number that identifies this communicator on all its ranks."""
        self.session = session
        self.native = native
        self.world_ranks = tuple(ranks)
        self.agreed = agreed
        self.splits = 0
        self.hosts = numbered([session.hosts[r] for r in ranks])
        self.hosts_if_several = self.hosts if any(self.hosts) else ()
        self.plans: dict[object, _native.Plan] = {}
        # Keys of plans that are not cached.
        self.single_use: deque[object] = deque(maxlen=256)
        self._specs: dict[str, Spec] = {}  # of algorithms that are files
        self.in_flight = CallsInFlight(native)
        self.device = DeviceHalf()
        self.registered = RegisteredArrays(session)
        self._on_close = on_close
        self.closed = False
        self.membership: ResizableWorld | None = None  # only of a world's first one
        self.rank = self.world_ranks.index(session.rank)
        self.world_size = len(self.world_ranks)
        self.name = name
        self.position = Position(self.rank, self.world_size)
        late_ns, timeout_ns = nanoseconds(LATE_S), nanoseconds(timeout_s)
        native.set_wait_policy(*session.wait_policy, late_ns, timeout_ns)
        native.set_late_hint(late_hint())
        self.timeout_s = timeout_s
        self.quick = _native.quick_of(native, self.device.start)
        self.exceeded_s = -1.0  # the timeout of the call that broke it
        session.admit(self, native.id(), Known(name, agreed, self.world_ranks))
        self._dropped = finalize(
            self, session.close_dropped, native, agreed, on_close, self.in_flight
        )
        self._dropped.atexit = False  # at exit all are closed anyway

    @classmethod
    def joined(
        cls,
        session: Session,
        ranks: Sequence[int],
        segment: int,
        *,
        agreed: int,
        timeout_s: float,
        rendezvous_timeout_s: float,
        name: str,
        cancelled: Callable[[], bool] = bool,
    ) -> Self:
        """The core of these ranks, in shared memory that the first rank here made.

        `agreed` is a number that identifies it on all its ranks.
        """
        native = session.communicator(
            ranks,
            segment,
            agreed=agreed,
            timeout_s=rendezvous_timeout_s,
            cancelled=cancelled,
        )

        def release() -> None:
            if session.owner(ranks) == session.rank:
                session.engine.drop(segment)

        return cls(
            session,
            native,
            ranks,
            agreed=agreed,
            timeout_s=timeout_s,
            name=name,
            on_close=release,
        )

    @property
    def timeout_s(self) -> float:
        """The timeout of calls without one of their own; can be set."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        # Of calls that the native core runs alone.
        self.native.set_timeout(nanoseconds(seconds))
        self._timeout_s = seconds

    @property
    def peers(self) -> list[Peer]:
        """Process and host of each rank of this communicator."""
        world = self.session.peers
        return [
            Peer(r, world[w].pid, world[w].host) for r, w in enumerate(self.world_ranks)
        ]

    def run(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        quick: CallKey | None = None,
    ) -> Any:
        """Run a call, or start it; `quick` is by what it is found the next time."""
        if call.is_on_device:
            return self.device.run(self, call, reduction, how, quick)
        self.check_usable(call.collective, lambda: describe_call(call, reduction.op))
        plan = self._plan(call, reduction, how)
        if how.async_op:
            return self.submit(plan, call, how.timeout_s)
        timeout = self._limit_ns(how.timeout_s)
        if self.native.run(plan, *call.addresses, timeout, call):
            if quick is not None and call.finish is None and how == _PLAIN:
                self.native.remember(*quick[:5], plan)
            return call.finished()
        raise self.failure(how.timeout_s)

    def start(
        self,
        collective: str,
        dtype: DType,
        counts: int | tuple[int, ...],
        input_at: int,
        output_at: int,
        *,
        op: str = "sum",
        root: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
        keep: object = None,
    ) -> Work | None:
        """A collective on raw addresses, for callers that have checked their arrays.

        `keep` is an object that must live until it is done. A blocking call returns
        None.
        """
        self.check_usable(collective)
        plan = self.plan_of(collective, dtype, counts, op, root)
        timeout = self._limit_ns(timeout_s)
        if async_op:
            native = self.native.submit(plan, input_at, output_at, timeout)
            self.in_flight.add(native, keep)
            return Work(native, None, self, timeout_s, collective, droppable=True)
        if self.native.run(plan, input_at, output_at, timeout, keep):
            return None
        raise self.failure(timeout_s)

    def plan_of(
        self,
        collective: str,
        dtype: DType,
        counts: int | tuple[int, ...],
        op: str = "sum",
        root: int = 0,
    ) -> _native.Plan:
        """The plan of a call on raw addresses."""
        key = collective, dtype.code, counts, op, root
        plan = self.plans.get(key)
        if plan is None:
            nothing = Buffer(None, 0, (), dtype)
            call = Call(collective, counts, nothing, nothing, None, None, root)
            plan = self.new_plan(call, as_reduction(op), _PLAIN)
            self._remember(key, plan)
        return plan

    def _plan(self, call: Call, reduction: Reduction, how: CallOptions) -> _native.Plan:
        dtype = call.dtype
        # The key has everything that the plan depends on, except the algorithm.
        if how.timeout_s is not None or how.async_op:
            how = how._replace(timeout_s=None, async_op=False)
        sizes = call.counts, call.shape
        key = (call.collective, dtype.code, reduction.op, call.root, *sizes, how)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.new_plan(call, reduction, how)
            self._remember(key, plan)
        return plan

    def _remember(self, key: object, plan: _native.Plan) -> None:
        if len(self.plans) > 4096:
            self.plans.clear()
        self.plans[key] = plan

    def new_plan(
        self, call: Call, reduction: Reduction, how: CallOptions
    ) -> _native.Plan:
        """A plan of this call, not cached."""
        dtype = call.dtype
        reduction.check(dtype)
        if how.codec is not None:
            plan, destinations = coded_plan(
                call,
                reduction,
                how,
                self.position,
                self.spec,
                window=self.session.window,
                hosts=self.hosts_if_several,
                model=self.session.links_between(self.world_ranks),
            )
            self.connect(destinations, call.collective)
            return plan
        how.refuse_codec_options(call.collective)
        how.refuse_stream(call.collective)
        kind = self.kind(call, reduction, how)
        if how.reproducible:
            self.refuse_other_orders(kind)
        plan, destinations = make_plan(
            kind,
            self.world_size,
            self.rank,
            window=self.session.window,
            hosts=self.hosts_if_several,
            reaches=self.session.reaches,
        )
        self.connect(destinations, call.collective)
        return plan

    def kind(self, call: Call, reduction: Reduction, how: CallOptions) -> CallKind:
        """What the ranks must agree on in a call without a codec."""
        choice = choose(
            call.collective,
            call.total * call.dtype.itemsize,
            self.world_size,
            named=how.algorithm,
            reproducible=how.reproducible,
            hosts=self.hosts_if_several or None,
            tuned=self.session.tuned,
            itemsize=call.dtype.itemsize,
            model=self.session.links_between(self.world_ranks),
        )
        spec = self.spec(choice.algorithm)
        return CallKind.of(call, reduction, spec, how.label)

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with its files as they were when it was first used here.

        So editing a file does not change a running job, on one rank before another; a
        new communicator uses the new file.
        """
        found = self._specs.get(algorithm)
        if found is None:
            found = read(algorithm)
            if found.files:  # built-in algorithms do not change
                self._specs[algorithm] = found
        return found

    def connect(
        self, ranks: Sequence[int], what: str, *, messages: bool = False
    ) -> None:
        """Open the streams to these ranks, if they are on other hosts."""
        streams = self.session.streams
        for rank in ranks:
            if streams is None or self.native.is_connected_to(rank, messages):
                continue  # it is on this host, or connected already
            deadline = time.monotonic() + self.timeout_s
            warn_after_s = min(LATE_S, self.timeout_s)
            try:
                with connecting(self.native, self.rank, rank, warn_after_s):
                    streams.reach(
                        self.agreed, rank, timeout_s=self.timeout_s, messages=messages
                    )
            except TransportError as why:
                late = time.monotonic() >= deadline - 0.1 * self.timeout_s
                raise self._unreachable(rank, what, late=late) from why

    def refuse_other_orders(self, kind: CallKind) -> None:
        """Raise BadArgument if an algorithm does not reduce in the order of ranks."""
        key = kind.collective, kind.algorithm, self.world_size, kind.root
        if not rank_program(*key, 0, self.hosts_if_several, self.rank).canonical:
            raise BadArgument(
                f"{kind.collective}: {kind.algorithm} reduces in another order; "
                "reproducible=True needs one pass in rank order, as direct and naive do"
            )

    def submit(
        self, plan: _native.Plan, call: Call, timeout_s: float | None = None
    ) -> Work:
        """Start a call by this plan."""
        limit = self._limit_ns(timeout_s)
        native = self.native.submit(plan, *call.addresses, limit)
        return self._work(native, call, timeout_s)

    def _work(self, native: _native.Work, call: Call, timeout_s: float | None) -> Work:
        """The handle of a call in flight; its buffers are kept until it is done."""
        self.in_flight.add(native, (call.input, call.output))
        return Work(native, call.result, self, timeout_s, call.collective, call.finish)

    def transfer(
        self,
        name: str,
        buffer: Buffer,
        peer: int | None,
        tag: int,
        how: CallOptions,
        result: Any = None,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Send or receive one message."""
        self.check_usable(name)
        how.refuse_stream(name)
        how.refuse_codec(name, "encode the message yourself, with unisono.codecs")
        if peer is not None:
            peer = whole_number("dst" if name == "send" else "src", peer)
            if not 0 <= peer < self.world_size:
                raise BadArgument(
                    f"{name}: rank {peer}: ranks are 0..{self.world_size - 1}"
                )
        tag = whole_number("tag", tag)
        if not -(1 << 31) <= tag < 1 << 31:
            raise BadArgument(f"{name}: tag = {tag}: expected a 32-bit integer")
        if name == "send" and peer is not None and self.hosts_if_several:
            self.connect([peer], name, messages=True)
        native = self.native.transfer(
            name == "send",
            -1 if peer is None else peer,
            tag,
            buffer.address,
            buffer.nbytes,
            buffer.dtype.code,
            CODES[name],
            buffer.dtype.code,
            buffer.count,
            self._limit_ns(how.timeout_s),
            how.async_op,
        )
        call = Call(name, buffer.count, buffer, buffer, result, finish)
        work = self._work(native, call, how.timeout_s)
        return work if how.async_op else work.wait()

    def _limit_ns(self, timeout_s: float | None) -> int:
        """A call's own timeout, or the communicator's."""
        return nanoseconds(self.timeout_s if timeout_s is None else timeout_s)

    def outcome(self, state: object) -> object:
        """Of a quick call that is not done: its Work, or its error is raised."""
        if isinstance(state, int):
            raise self.failure()
        return state

    def failure(
        self, timeout_s: float | None = None, refused: str = ""
    ) -> UnisonoError:
        """Why the latest call failed, or why one is refused."""
        return raising.error_of_call(self, timeout_s, refused)

    def error_of(self, work: _native.Work, timeout_s: float | None) -> UnisonoError:
        """Why a call in flight failed."""
        return raising.error_of_work(self, work, timeout_s)

    def warn_of_dropped(self, work: Work) -> None:
        """The handle of a call was dropped that nobody has waited for."""
        raising.warn_of_dropped(self, work)

    def _unreachable(self, rank: int, what: str, *, late: bool) -> UnisonoError:
        """Break the communicator because a rank cannot be reached; the error.

        `late`: the timeout has passed; the rank might have answered later.
        """
        self.native.abort_unreachable(rank, late)
        raising.limit_of(self, None, self.native.failure()[3])
        return self.failure(refused=what)

    def check_usable(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if no call is possible any more; `words` then describes the call."""
        self._refuse_fork(what)
        self.check_open(what)
        if self.native.ends_next_call():
            known = self.device.error()
            raise known or raising.error_of_call(self, refused=what, words=words())

    def _refuse_fork(self, what: str) -> None:
        if self.session.engine.forked():
            raise UsageError(
                f"{what}: this process is a fork of rank {self.rank} and not itself a "
                "rank; start ranks with unisono.spawn or unisono run"
            )

    def check_open(self, what: str) -> None:
        """Raise UsageError if it is closed."""
        if self.closed:
            raise UsageError(f"{what}: the communicator {self.name!r} is closed")

    def changeable(self, what: str) -> ResizableWorld:
        """The world, to shrink or grow; UsageError if it cannot."""
        self._refuse_fork(what)
        if self.membership is None and self.agreed:
            raise UsageError(
                f"{what}: {self.name!r} is a group of a world, made by split or "
                f"duplicate; {what} the world, on all its ranks, and split that again"
            )
        if self.membership is None:
            raise UsageError(
                f"{what}: {self.name!r} was not made by unisono.init: its ranks are "
                "threads or belong to another library; only worlds from unisono.init "
                "can be resized"
            )
        return self.membership

    def close(self) -> None:
        """Close it. Ranks that still wait for this rank raise PeerLost."""
        if self.closed:
            return
        self._leave()
        if self._on_close is not None:
            self._on_close()
        self.session.users.discard(self)
        if self.membership is not None:
            self.membership.release()
        if not self.session.users:
            self.session.close()

    def abort(self) -> None:
        """Break it for all ranks, and leave."""
        self.native.abort_unreachable(self.rank, False)
        self.close()

    def abandon(self) -> None:
        """Close it, but keep the session: the ranks may form another world."""
        self._leave()
        self.session.users.discard(self)

    def _leave(self) -> None:
        self.closed = True
        self._dropped.detach()
        self.device.close()
        self.native.close()
        if self.session.streams is not None:
            self.session.streams.leave(self.agreed)
        self.in_flight.end()
        self.registered.close()


_PLAIN = CallOptions()
_PROBE = np.zeros((2, 3))
_native.learn_arrays(np.ndarray, _PROBE, _PROBE.ctypes.data, list(_PROBE.shape))
