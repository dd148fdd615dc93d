"""What every call of a communicator goes through, whatever its collective.

A kind of call that has been made before finds its plan by a key and starts at once. The
native core keeps the plans of plain calls itself, so that these hardly touch Python.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import finalize

import numpy as np

from unisono import _native
from unisono.algorithms import Spec, read
from unisono.dtypes import DType
from unisono.errors import BadArgument, TransportError, whole_number
from unisono.runtime.buffers import Buffer
from unisono.runtime.calls import Call, Place
from unisono.runtime.coded_plans import coded_plan
from unisono.runtime.connecting import connecting
from unisono.runtime.failures import in_words
from unisono.runtime.operations import Reduction, as_reduction
from unisono.runtime.options import How as How
from unisono.runtime.options import Options as Options
from unisono.runtime.plans import CODES, Kind, lowered, make_plan
from unisono.runtime.select import choose
from unisono.runtime.verdicts import Verdicts
from unisono.runtime.work import InFlight, Work
from unisono.transports.base import Known, Peer, Transport

if TYPE_CHECKING:
    from unisono.runtime.membership import Membership

TIMEOUT_S = 300.0
LATE_S = 5.0


class Base(Verdicts):
    """The state of a communicator, and how a call is carried out."""

    def __init__(
        self,
        transport: Transport,
        native: _native.Comm,
        ranks: Sequence[int],
        *,
        agreed: int,
        timeout_s: float = TIMEOUT_S,
        name: str = "world",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Not for users: `unisono.init`, `split` and `testing.world` make them."""
        self._transport = transport
        self._native = native
        self._ranks = tuple(ranks)
        self._agreed = agreed
        self._splits = 0
        numbers: dict[int, int] = {}
        places = [transport.hosts[r] for r in ranks]
        self.hosts = tuple(numbers.setdefault(h, len(numbers)) for h in places)
        self._hosts = self.hosts if any(self.hosts) else ()
        self._plans: dict[object, _native.Plan] = {}
        self._once: deque[object] = deque(maxlen=256)  # keys of plans not kept
        self._specs: dict[str, Spec] = {}  # of algorithms that are files
        self._inflight = InFlight(native)
        self._on_close = on_close
        self._closed = False
        self._member: Membership | None = None  # of the world alone
        self.left_out: tuple[int, ...] = ()
        self.rank = self._ranks.index(transport.rank)
        self.world_size = len(self._ranks)
        self.name = name
        self._at = Place(self.rank, self.world_size)
        native.set_patience(
            *transport.patience, int(LATE_S * 1e9), nanoseconds(timeout_s)
        )
        self.timeout_s = timeout_s
        self._quick = _native.quick_of(native)
        transport.admit(self, native.id(), Known(name, agreed, self._ranks))
        self._dropped = finalize(
            self, transport.give_back, native, agreed, on_close, self._inflight
        )
        self._dropped.atexit = False  # then all are closed

    @classmethod
    def joined(
        cls,
        transport: Transport,
        ranks: Sequence[int],
        segment: int,
        *,
        agreed: int,
        timeout_s: float,
        meeting_s: float,
        name: str,
        in_vain: Callable[[], bool] = bool,
    ) -> Self:
        """The communicator of these ranks, in memory that the first here made.

        `agreed` is a number by which all of them know it, and no other.
        """
        native = transport.communicator(
            ranks, segment, agreed=agreed, timeout_s=meeting_s, in_vain=in_vain
        )

        def release() -> None:
            if transport.owner(ranks) == transport.rank:
                transport.engine.drop(segment)

        return cls(
            transport,
            native,
            ranks,
            agreed=agreed,
            timeout_s=timeout_s,
            name=name,
            on_close=release,
        )

    @property
    def timeout_s(self) -> float:
        """How long a call may take that is given no limit of its own; can be set."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._native.set_timeout(nanoseconds(seconds))  # of calls that skip Python
        self._timeout_s = seconds

    @property
    def peers(self) -> list[Peer]:
        """Who the ranks are: process and host, by rank here."""
        world = self._transport.peers
        return [Peer(r, world[w].pid, world[w].host) for r, w in enumerate(self._ranks)]

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks that these are in the world, by rank here."""
        return self._ranks

    def __repr__(self) -> str:
        """One line, for debuggers and logs."""
        state = ", closed" if self._closed else ""
        who = f"rank {self.rank} of {self.world_size}"
        return f"<Communicator {self.name!r}: {who}{state}>"

    def _go(
        self,
        call: Call,
        reduction: Reduction,
        how: How,
        quick: tuple[int, Any, Any, Any, int] | None = None,
    ) -> Any:
        """Carry out a call, or begin it; `quick` is what to find it by next time."""
        self._refuse_unusable(call.collective, lambda: in_words(call, reduction.op))
        plan = self._plan(call, reduction, how)
        input_at = 0 if call.input is None else call.input.address
        output_at = 0 if call.output is None else call.output.address
        timeout = self._nanoseconds(how.timeout_s)
        if how.async_op:
            native = self._native.submit(plan, input_at, output_at, timeout)
            return self._work(native, call, how.timeout_s)
        if self._native.run(plan, input_at, output_at, timeout, call):
            if quick is not None and call.finish is None and how == _PLAIN:
                self._native.remember(*quick, plan)
            return call.result if call.finish is None else call.finish(call.result)
        raise self._failure(how.timeout_s)

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
        """A collective on bare addresses, for those who have checked their arrays.

        `keep` is whatever must live until it is done. A blocking call returns None.
        """
        self._refuse_unusable(collective)
        key = collective, dtype.code, counts, op, root
        plan = self._plans.get(key)
        if plan is None:
            nothing = Buffer(None, 0, (), dtype)
            call = Call(collective, counts, nothing, nothing, None, None, root)
            plan = self._made_plan(call, as_reduction(op), _PLAIN)
            self._remember(key, plan)
        timeout = self._nanoseconds(timeout_s)
        if async_op:
            native = self._native.submit(plan, input_at, output_at, timeout)
            self._inflight.add(native, keep)
            return Work(
                native,
                None,
                explain=lambda failed: self._explained(failed, timeout_s),
                call=collective,
            )
        if self._native.run(plan, input_at, output_at, timeout, keep):
            return None
        raise self._failure(timeout_s)

    def _plan(self, call: Call, reduction: Reduction, how: How) -> _native.Plan:
        dtype = call.dtype
        # What a plan follows from, before an algorithm is chosen. Made anew only when
        # one of them is.
        if how.timeout_s is not None or how.async_op:
            how = how._replace(timeout_s=None, async_op=False)
        sizes = call.counts, call.shape
        key = (call.collective, dtype.code, reduction.op, call.root, *sizes, how)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._made_plan(call, reduction, how)
            self._remember(key, plan)
        return plan

    def _remember(self, key: object, plan: _native.Plan) -> None:
        if len(self._plans) > 4096:
            self._plans.clear()
        self._plans[key] = plan

    def _made_plan(self, call: Call, reduction: Reduction, how: How) -> _native.Plan:
        dtype = call.dtype
        reduction.check(dtype)
        if how.codec is not None:
            plan, reached = coded_plan(
                *(call, reduction, how, self._at, self._spec),
                window=self._transport.window,
                hosts=self._hosts,
            )
            self._reach(reached, call.collective)
            return plan
        how.refuse_idle(call.collective)
        kind = self._kind(call, reduction, how)
        if how.reproducible:
            self._refuse_other_orders(kind)
        plan, reached = make_plan(
            kind,
            self.world_size,
            self.rank,
            window=self._transport.window,
            hosts=self._hosts,
            reaches=self._transport.reaches,
        )
        self._reach(reached, call.collective)
        return plan

    def _kind(self, call: Call, reduction: Reduction, how: How) -> Kind:
        """What the ranks must agree on in a call without a codec."""
        choice = choose(
            *(call.collective, call.total * call.dtype.itemsize, self.world_size),
            named=how.algorithm,
            reproducible=how.reproducible,
            hosts=self._hosts or None,
            tuned=self._transport.tuned,
            itemsize=call.dtype.itemsize,
        )
        what = call.collective, call.dtype, reduction, call.root, call.counts
        spec = self._spec(choice.algorithm)
        return Kind(*what, spec, how.label, shape=call.shape)

    def _spec(self, algorithm: str) -> Spec:
        """An algorithm with what its files held when this communicator first used it.

        So an edited file does not change what a job that runs is doing, on one rank
        before it does on another; who makes a new communicator gets the new one.
        """
        found = self._specs.get(algorithm)
        if found is None:
            found = read(algorithm)
            if found.files:  # other names always mean the same
                self._specs[algorithm] = found
        return found

    def _reach(
        self, ranks: Sequence[int], what: str, *, messages: bool = False
    ) -> None:
        """Open the streams to these ranks, if they are on other hosts."""
        streams = self._transport.streams
        for rank in ranks:
            if streams is None or self._native.leads_to(rank, messages):
                continue  # it is on this host, or reached already
            deadline = time.monotonic() + self.timeout_s
            patience_s = min(LATE_S, self.timeout_s)
            try:
                with connecting(self._native, self.rank, rank, patience_s):
                    streams.reach(
                        self._agreed, rank, timeout_s=self.timeout_s, messages=messages
                    )
            except TransportError as why:
                late = time.monotonic() >= deadline - 0.1 * self.timeout_s
                raise self._out_of_reach(rank, what, late=late) from why

    def _refuse_other_orders(self, kind: Kind) -> None:
        made = lowered(kind.collective, kind.algorithm, self.world_size, kind.root, 0)
        if not made.canonical:
            raise BadArgument(
                f"{kind.collective}: {kind.algorithm} adds in an order of its own; "
                "reproducible=True needs one pass in rank order, as direct and naive do"
            )

    def _work(self, native: _native.Work, call: Call, timeout_s: float | None) -> Work:
        self._inflight.add(native, (call.input, call.output))
        return Work(
            native,
            call.result,
            explain=lambda failed: self._explained(failed, timeout_s),
            finish=call.finish,
            call=call.collective,
        )

    def _transfer(
        self,
        name: str,
        buffer: Buffer,
        peer: int | None,
        tag: int,
        how: How,
        result: Any = None,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Send or receive one message."""
        self._refuse_unusable(name)
        how.refuse_codec(name, "encode the message yourself, with unisono.codecs")
        if peer is not None:
            peer = whole_number("dst" if name == "send" else "src", peer)
            if not 0 <= peer < self.world_size:
                raise BadArgument(
                    f"{name}: rank {peer}: ranks are 0..{self.world_size - 1}"
                )
        tag = whole_number("tag", tag)
        if not -(1 << 31) <= tag < 1 << 31:
            raise BadArgument(f"{name}: tag = {tag}: expected a number of 32 bits")
        if name == "send" and peer is not None and self._hosts:
            self._reach([peer], name, messages=True)
        native = self._native.transfer(
            name == "send",
            -1 if peer is None else peer,
            tag,
            buffer.address,
            buffer.nbytes,
            buffer.dtype.code,
            CODES[name],
            buffer.dtype.code,
            buffer.count,
            self._nanoseconds(how.timeout_s),
            how.async_op,
        )
        call = Call(name, buffer.count, buffer, buffer, result, finish)
        work = self._work(native, call, how.timeout_s)
        return work if how.async_op else work.wait()

    def _nanoseconds(self, timeout_s: float | None) -> int:
        return nanoseconds(self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Leave. Others that still wait for this rank raise PeerLost."""
        if self._closed:
            return
        self._leave()
        if self._on_close is not None:
            self._on_close()
        self._transport.users.discard(self)
        if self._member is not None:
            self._member.let_go()
        if not self._transport.users:
            self._transport.close()

    def _give_up(self) -> None:
        """Use it no more, but leave the world as it is: others may still be met."""
        self._leave()
        self._transport.users.discard(self)

    def _leave(self) -> None:
        self._closed = True
        self._dropped.detach()
        self._native.close()
        if self._transport.streams is not None:
            self._transport.streams.leave(self._agreed)
        self._inflight.end()


_PLAIN = How()
_PROBE = np.zeros((2, 3))
_native.learn_arrays(np.ndarray, _PROBE, _PROBE.ctypes.data, list(_PROBE.shape))


def agreed_number(told: str) -> int:
    """A number for what all ranks can tell alike."""
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest())


def nanoseconds(timeout_s: float) -> int:
    """A deadline as the native core counts it; more than 30 years is for ever."""
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise BadArgument(f"timeout_s = {timeout_s!r}: expected a positive number")
    return int(min(timeout_s, 1e9) * 1e9)


def default_timeout_s() -> float:
    """From UNISONO_TIMEOUT_S, or five minutes."""
    told = os.environ.get("UNISONO_TIMEOUT_S", "")
    try:
        seconds = float(told) if told else TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise BadArgument(f"UNISONO_TIMEOUT_S={told}: expected a positive number")
    return seconds
