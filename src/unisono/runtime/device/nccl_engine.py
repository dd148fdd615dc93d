"""Calls on CUDA arrays by NCCL, with the errors of unisono.

NCCL compares nothing and has no time limit: ranks that call different things, or not at
all, wait for ever. So each call is announced by a call on the host that moves nothing,
whose fingerprint is that of the call on the device. It finds out if calls differ, who
has not come in time and who has died, in words and on all hosts, and is the call's
flight record. A thread looks, while calls are in flight, whether that has failed or
NCCL reports an error; then it aborts NCCL's communicator, which ends its kernels.

What NCCL cannot do is done by unisono's own kernel, in the same order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono import _native
from unisono.devices import driver
from unisono.devices.nccl import ID_BYTES, IN_PROGRESS, SUCCESS, Nccl
from unisono.errors import (
    CollectiveTimeout,
    DeviceError,
    UnisonoError,
    UnsupportedWorld,
)
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.device.announcements import Announcements
from unisono.runtime.device.explain import explain_nccl
from unisono.runtime.device.host_half import HostHalf, gather_bytes, together
from unisono.runtime.device.kernel_engine import KernelEngine
from unisono.runtime.device.nccl_calls import functions, lacks
from unisono.runtime.device.nccl_comm import Interrupted, Late, NcclComm
from unisono.runtime.device.stream_engine import StreamEngine
from unisono.runtime.device.work import await_device
from unisono.runtime.observe.failures import FailureCode
from unisono.runtime.observe.subject import DeviceCall
from unisono.schedule.collective import REDUCING
from unisono.service_threads import ServiceThread

_PERIOD_S = 0.01
_GRACE_S = 1.0
"""How long an error of NCCL's waits for the host to find out who has died."""
_CLOSE_S = 10.0
_GRAPHS_S = 0.5
"""How often it is looked for failures while only graphs make calls."""
_PENDING, _SUCCEEDED = 0, 1  # states of a call on the host
_LEFT = 4  # a field of the native core's state of a rank


@dataclass
class Flight:
    """A call that was started, until it has ended."""

    what: str
    announced: _native.Work
    begun: _native.CudaEvent
    ended: _native.CudaEvent
    limit_s: float
    arrays: object
    since: float | None = None
    """When it was first seen that all ranks have come, and it has begun."""

    def has_ended(self) -> bool:
        """Whether it has ended, on the host and on the device."""
        return self.announced.state() != _PENDING and _is_reached(self.ended)

    def is_stuck(self) -> bool:
        """Whether it has begun on all ranks, longer ago than its limit."""
        if self.since is None:
            if self.announced.state() == _SUCCEEDED and _is_reached(self.begun):
                self.since = time.monotonic()
            return False
        return time.monotonic() - self.since > self.limit_s


def _is_reached(event: _native.CudaEvent) -> bool:
    try:
        return event.query()
    except _native.CudaError:  # the device has failed: nothing runs there any more
        return True


class NcclEngine(StreamEngine):
    """Calls by NCCL, of one communicator with one GPU for each rank."""

    def __init__(self, host: HostHalf, ordinal: int, library: Nccl, why: str) -> None:
        """All ranks make it at the same time; `why` says who asked for NCCL."""
        super().__init__(host, ordinal)
        self._native = host.native
        self._rank, self._n = host.rank, host.world_size
        self._peers = host.session.engine, host.world_ranks
        self._process = os.getpid()
        self._why = why
        self._comm = self._connected(host, library)
        self._announcements = Announcements(host)
        self.kept: deque[Flight] = deque()
        self._launching = threading.Lock()
        self._last: _native.CudaEvent | None = None  # behind the last call
        self._own: KernelEngine | None = None
        self._error: UnisonoError | None = None
        self._failed: tuple[_native.Work, float] | None = None
        self._is_captured = False  # a graph may make calls at any time
        self._looking = threading.RLock()
        self._wake = threading.Condition()
        self._stopped = False
        self._watcher = ServiceThread(
            target=self._watch, name="unisono nccl", daemon=True
        )
        self._watcher.start()

    def _connected(self, host: HostHalf, library: Nccl) -> NcclComm:
        """NCCL's communicator; rank 0 makes the id by which the ranks find it."""
        nothing = bytes(ID_BYTES)
        mine = together(
            host, lambda: library.unique_id() if host.rank == 0 else nothing
        )
        unique_id = gather_bytes(host, mine)[0]
        made: list[NcclComm] = []

        def begin() -> None:
            where = self.ordinal, self._n, self._rank
            made.append(NcclComm(library, *where, unique_id, self._is_broken))

        try:
            together(host, begin)
            together(host, lambda: made[0].connect(host.timeout_s))
        except UnisonoError:
            for comm in made:
                comm.abort()
            raise
        return made[0]

    @property
    def calls(self) -> NcclEngine:
        """Those in flight."""
        return self

    def run(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
    ) -> Any:
        """Start a call, by NCCL or by unisono's own kernel if NCCL cannot."""
        if call.collective in REDUCING:
            reduction.check(call.dtype)
        if why := lacks(call.collective, call.dtype, reduction.op, how):
            return self._by_kernel(call, reduction, how, why)
        return super().run(call, reduction, how)

    def _by_kernel(
        self, call: Call, reduction: Reduction, how: CallOptions, why: str
    ) -> Any:
        """A call by unisono's own kernel, after those of NCCL and before the next."""
        if self.host.hosts_if_several:
            raise UnsupportedWorld(
                f"{call.collective}: {why}; on several hosts make such calls by a "
                "communicator of their own: comm.duplicate(), and engine = 'unisono'",
                n=self._n,
            )
        self.check(call.collective)
        if self._own is None:
            self._own = KernelEngine(self.host, self.ordinal)
        with self._launching:
            stream, _ = self._own.plane.streams_of(call, how)
            if self._last is not None and not driver.is_capturing(self.ordinal, stream):
                self._last.order(stream)
            result = self._own.run(call, reduction, how)
            if not driver.is_capturing(self.ordinal, stream):
                self._last = _native.CudaEvent(self.ordinal, stream)
        return result

    def launch(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        stream: int,
        current: int,
    ) -> bool:
        """Announce a call, and put NCCL's functions into a stream."""
        limit = self.host.timeout_s if how.timeout_s is None else how.timeout_s
        nanoseconds(limit)
        self.host.exceeded_s = limit  # for the error, if it is
        made = functions(call, reduction.op, self._rank, self._n)
        with self._launching:
            if stream != current:
                _native.CudaEvent(self.ordinal, current).order(stream)
            captured = driver.is_capturing(self.ordinal, stream)
            if self._last is not None and not captured:
                self._last.order(stream)
            announced = self._announcements.make(call, reduction, how.label, limit)
            if captured:
                self._put(call.collective, made, stream, limit, announced)
                self._is_captured = True
                return True
            begun = _native.CudaEvent(self.ordinal, stream)
            self._put(call.collective, made, stream, limit, announced)
            ended = self._last = _native.CudaEvent(self.ordinal, stream)
            arrays = call.input, call.output
            self.kept.append(
                Flight(call.collective, announced, begun, ended, limit, arrays)
            )
        with self._wake:
            self._wake.notify()
        return False

    def _put(
        self,
        what: str,
        made: list[Any],
        stream: int,
        limit_s: float,
        announced: _native.Work,
    ) -> None:
        try:
            self._comm.run(made, stream, limit_s)
        except Interrupted:
            self._failed = self._failed or (announced, limit_s)
            self._abort()
            self.check(what)
            raise
        except Late as late:
            self._failed = self._failed or (announced, limit_s)
            self._fail(_late(what, limit_s, str(late)))
            self.check(what)
        except DeviceError as error:
            self._fail(error)
            self.check(what)

    def check(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if the communicator has failed, on the host or on a device."""
        if self._error is None and not self._stopped:
            self._look()
        if self._error is not None:
            raise self._error
        if self._is_broken():
            self._find_failed()
            if self._failed is not None and self._failed[0].state() > _SUCCEEDED:
                raise self.host.error_of(*self._failed)
        self.host.check_usable(what, words)

    def _find_failed(self) -> None:
        """The first call in flight that has failed on the host, if there is one."""
        with self._looking:
            for flight in list(self.kept):
                if self._failed is None and flight.announced.state() > _SUCCEEDED:
                    self._failed = flight.announced, flight.limit_s

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        await_device(self.is_idle, timeout_s, "synchronize")
        if self._own is not None:
            self._own.synchronize(timeout_s)
        self.check("synchronize")

    def is_idle(self) -> bool:
        """Whether all calls that were made have ended."""
        self._release()
        return not self.kept

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        plane = None if self._own is None else self._own.plane
        words = f"{self._comm.library}: {self._why}"
        return explain_nccl(plane, call, words)

    def close(self) -> None:
        """Wait for the calls in flight, and leave NCCL's communicator."""
        if self._process != os.getpid():
            return  # a fork has none of the threads
        with self._wake:
            if self._stopped:
                return
            self._stopped = True
            self._wake.notify()
        self._watcher.join()
        while not self.is_idle():  # it ends, or it fails: no call has no limit
            self._look()
            time.sleep(_PERIOD_S)
        if self._is_broken():
            self._abort()
        else:
            self._comm.close(_CLOSE_S)
        if self._own is not None:
            self._own.close()

    # What the thread does

    def _watch(self) -> None:
        driver.relax_captures()
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._stopped or self.kept,
                    _GRAPHS_S if self._is_captured else None,
                )
                if self._stopped:
                    return
            self._look()
            time.sleep(_PERIOD_S)

    def _look(self) -> None:
        """Look for failures, and for calls that have ended."""
        with self._looking:
            self._look_once()

    def _look_once(self) -> None:
        if not self._comm.is_open:
            self._release()
            return
        self._report_deaths()
        if self._is_broken():
            self._find_failed()
            self._abort()
            return
        try:
            code = self._comm.state()
        except Interrupted:
            return
        if code not in (SUCCESS, IN_PROGRESS):
            self._fail(self._comm.error("a call", code))
            return
        self._release()
        head = self.kept[0] if self.kept else None
        if head is not None and head.is_stuck():
            words = "all ranks have made the call, and NCCL has not ended it"
            self._fail(_late(head.what, head.limit_s, words))

    def _report_deaths(self) -> None:
        """Break the communicator if a rank has died that had not left it."""
        engine, ranks = self._peers
        for rank, there in enumerate(ranks):
            if engine.dead(there) and not self._native.states()[rank][_LEFT]:
                self._native.abort_unreachable(rank, False)

    def _release(self) -> None:
        """Forget the calls that have ended, with their arrays."""
        with self._looking:
            while self.kept and self.kept[0].has_ended():
                first = self.kept.popleft()
                if first.announced.state() > _SUCCEEDED and self._failed is None:
                    self._failed = first.announced, first.limit_s

    def _is_broken(self) -> bool:
        return self._native.failure()[0] != FailureCode.NONE

    def _fail(self, error: UnisonoError) -> None:
        """NCCL has failed: break the communicator, unless it is known who has died."""
        until = time.monotonic() + _GRACE_S
        with self._looking:
            while not self._is_broken() and time.monotonic() < until:
                self._report_deaths()
                time.sleep(_PERIOD_S)
            if not self._is_broken():
                self._error = error
                self._native.abort_unreachable(self._rank, False)
            self._abort()

    def _abort(self) -> None:
        """End NCCL's kernels."""
        if self._comm.is_open:
            self._comm.abort()


def _late(what: str, limit_s: float, words: str) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{what}: not done after {limit_s:g} s: {words}; NCCL_DEBUG=INFO prints what "
        "it does",
        ranks=(),
        collective=what,
    )
