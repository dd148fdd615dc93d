"""Calls on CUDA arrays of a communicator whose ranks are on several hosts.

A call is numbered, and its stream waits until a word in memory of the host has reached
the number. Meanwhile a thread of the communicator runs the call: inside a host by
kernels on its devices, between hosts by the engine of the CPU, through memory of the
host, in pieces (`levels.py`, `pipeline.py`). Behind the last copy a stream sets the
word. So the caller does not wait, as on one host. A call that fails sets the word, too:
its output is filled with bytes that are not a number.

To load a kernel CUDA waits for all streams, and lets no thread copy meanwhile. A
program that launches a new one behind such a stream would keep our thread from setting
the word. So no stream waits before the thread has put its last copy on a stream: the
caller waits for that, in the call or, if it is asynchronous, in `wait()`. A program
that loads no kernel in between can have it otherwise (UNISONO_CUDA_STREAMS_WAIT=1).
That CUDA is to load all kernels at the start (CUDA_MODULE_LOADING=EAGER) does not
suffice: libraries that are opened later load theirs then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple
from uuid import uuid4

from unisono import _native, cuda_queues
from unisono.errors import CollectiveTimeout, DeviceError, UnisonoError, UsageError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.explain_hosts import explain_between_hosts
from unisono.runtime.device.host_half import HostHalf, gather_bytes, together
from unisono.runtime.device.levels import GRACE_S, GroupFailed, Levels, Split
from unisono.runtime.device.pipeline import Pipeline, Wire, await_event, await_work
from unisono.runtime.device.routes import Route
from unisono.runtime.device.stream_engine import NumberedCalls, held_bytes
from unisono.runtime.device.watchdog import Watchdog
from unisono.runtime.device.work import Reached, await_device
from unisono.runtime.observe.failures import FailureCode
from unisono.runtime.observe.subject import DeviceCall
from unisono.service_threads import ServiceThread

_CLOSING_S = 1.0
"""How long calls that have failed may take to end."""


STREAMS_WAIT = "UNISONO_CUDA_STREAMS_WAIT"
"""1: callers do not wait; the program loads no kernel while calls are in flight."""


class Job(NamedTuple):
    """A call for the thread; `ready` is behind what its stream has before it."""

    number: int
    route: Route
    ready: _native.CudaEvent
    limit_s: float


class BetweenHosts(NumberedCalls):
    """Calls of one communicator on several hosts, on one device."""

    def __init__(
        self, host: HostHalf, ordinal: int, split: Split, why: str = ""
    ) -> None:
        """All ranks make it at the same time; `why` says who asked for it."""
        super().__init__(host, ordinal)
        self._why = why
        self._at = host.position
        self._ranks_here = _ranks_here(host)
        self.levels = Levels(host, ordinal, split)
        self._callers_wait, self._pipeline = together(
            host, lambda: (_callers_wait(), Pipeline(host, ordinal))
        )
        self._begun = 0
        self._issued = 0  # the calls whose last copies are on a stream
        self._issuing = threading.Condition()
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._watchdog = Watchdog(self._expire)

    def ranks_here(self) -> int:
        """How many ranks are threads of this process."""
        return self._ranks_here

    def ended(self) -> int:
        """How many calls have ended."""
        return self._pipeline.staging.ended

    def is_idle(self) -> bool:
        """Whether all calls that were made have ended."""
        return self.ended() == self._begun

    @property
    def calls(self) -> BetweenHosts:
        """Those in flight."""
        return self

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        return explain_between_hosts(call, f"unisono: {self._why}")

    def error(self) -> BaseException | None:
        """Why calls have failed, once the communicator has.

        The thread finds it out, if it has a call; else the group of all ranks tells.
        """
        with suppress(CollectiveTimeout):
            await_device(self._is_settled, 2 * GRACE_S, "error")
        if self._error is None:
            self._error = self.levels.error()
        return self._error

    def _is_settled(self) -> bool:
        return self._error is not None or self.is_idle()

    def check(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if the communicator has failed; `words` describe a refused call."""
        self.host.check_usable(what, words)

    def launch(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        stream: int,
        current: int,
    ) -> bool:
        """Give a call to the thread; the stream waits for it."""
        staging = self._pipeline.staging
        if staging.is_capturing(stream) or staging.is_capturing(current):
            raise UsageError(
                f"{call.collective}: a call on CUDA arrays between hosts cannot be "
                "captured for a CUDA graph, since a thread of the host takes part in "
                "it: make the call outside the capture"
            )
        limit = self.host.timeout_s if how.timeout_s is None else how.timeout_s
        self.host.exceeded_s = limit  # for the error, if it is
        route = self.levels.route(call, reduction, how._replace(timeout_s=limit))
        with self._lock:
            ready = self._ready(stream, current, queued=how.async_op)
            number = staging.begin()
            self._begun = number
            beside = stream != current
            if held_bytes(call, beside=beside) or route.scratch is not None:
                kept = call.input, call.output, route.scratch
                self.kept.append((number, kept))
            self._start_thread()
            self._jobs.put(Job(number, route, ready, limit))
            if not self._callers_wait:
                staging.wait_on(stream, number)
        if self._callers_wait and not how.async_op:
            self.order(stream, number)
        self.release_some()
        return False

    def order(self, stream: int, number: int) -> None:
        """Let a stream wait for a call, when the thread has no more to do for it."""
        with self._issuing:
            self._issuing.wait_for(lambda: self._issued >= number)
        self._pipeline.staging.wait_on(stream, number)

    def _issue(self, number: int) -> None:
        with self._issuing:
            self._issued = max(self._issued, number)
            self._issuing.notify_all()

    def end_of_call(self) -> Reached:
        """That of the call that was just made."""
        return (
            CallEnd(self, self._begun) if self._callers_wait else super().end_of_call()
        )

    def _ready(self, stream: int, current: int, *, queued: bool) -> _native.CudaEvent:
        """An event behind what a call comes after.

        Calls on the stream of our own are ordered by the thread.
        """
        event = _native.CudaEvent(self.ordinal, current)
        if stream == current or queued:
            return event
        event.order(stream)
        return _native.CudaEvent(self.ordinal, stream)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = ServiceThread(
                target=self._run_all, name="unisono cuda", daemon=True
            )
            self._thread.start()

    def _run_all(self) -> None:
        """The thread: one call after the other."""
        while (job := self._jobs.get()) is not None:
            self._watchdog.begin(job.limit_s + GRACE_S)
            self._run_one(job)
            self._watchdog.end()
            del job  # with its event, while it waits for the next

    def _run_one(self, job: Job) -> None:
        pipeline, route = self._pipeline, job.route
        try:
            try:
                if self._error is not None:
                    raise self._error
                pipeline.begin(job.ready)
                self._perform(route)
            except BaseException as error:
                self._fail(error)
                pipeline.begin(job.ready)
                pipeline.spoil(route.call, self._at)
            pipeline.staging.end_on(pipeline.up, job.number)
            if self._error is not None:
                self._end_surely(job)
        except BaseException as error:  # the driver fails
            self._fail(error)
            pipeline.staging.end_now(job.number)
        finally:
            self._issue(job.number)

    def _end_surely(self, job: Job) -> None:
        """End a call that has failed, even if streams of ours are held up by its own.

        Streams that share a queue of the device wait for each other.
        """
        with suppress(CollectiveTimeout):
            await_device(lambda: self.ended() >= job.number, GRACE_S, "end")
        if self.ended() < job.number:
            self._pipeline.staging.end_now(job.number)

    def _perform(self, route: Route) -> None:
        """Inside the host, between hosts, inside the host."""
        pipeline, levels = self._pipeline, self.levels
        told = None
        if route.announced is not None:
            told = levels.announce(route.announced)
            told.allow_drop()
        for launch in route.first:
            levels.launch(launch, pipeline.down)
        if route.wire is not None:
            self._send(route.wire, in_stages=told is not None)
        if told is not None:
            await_work(told, self._look)
        for launch in route.last:
            levels.launch(launch, pipeline.up)
        if route.first or route.last:
            # Whether a kernel has failed is known when it has ended.
            for stream in (pipeline.down, pipeline.up):
                await_event(_native.CudaEvent(self.ordinal, stream), self._look)
            self._look()

    def _send(self, wire: Wire, *, in_stages: bool) -> None:
        try:
            self._pipeline.send(wire, self._look)
        except UnisonoError as error:
            if in_stages:  # it numbers the ranks of a group
                raise GroupFailed(str(error)) from error
            raise

    def _look(self) -> None:
        """Raise if the communicator has failed, or a group of it."""
        host = self._host()
        self._watchdog.touch()
        if self._error is not None:
            raise self._error
        if host is None or self._closed:
            raise DeviceError("the communicator was closed while a call was in flight")
        if host.native.failure()[0] != FailureCode.NONE:
            # By a rank that knows more, perhaps; the group of all ranks says it.
            raise GroupFailed("the communicator has failed")
        self.levels.look()

    def _fail(self, error: BaseException) -> None:
        """The first failure: it is kept, and the communicator fails for all ranks."""
        if self._error is not None:
            return
        host = self._host()
        self._error = error if host is None else self.levels.explained(host, error)
        if host is not None:
            self.levels.fail(host)

    def _expire(self) -> None:
        """The thread is stuck in the driver: all calls that were made end."""
        if self._error is None:
            self._error = CollectiveTimeout(
                "a call on CUDA arrays between hosts: CUDA's driver did not return to "
                "the thread that runs it; if the program frees CUDA memory while such "
                "a call is in flight, wait for the call first",
                ranks=(),
                collective="a call between hosts",
            )
        if (host := self._host()) is not None:
            self.levels.fail(host)
        self._pipeline.staging.end_now(self._begun)
        self._issue(self._begun)

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        await_device(self.is_idle, timeout_s, "synchronize")
        self.release()
        self.check("synchronize")

    def close(self) -> None:
        """Wait for the calls in flight, and release what it has."""
        with self._lock:
            if self._closed:
                return
            limit = _CLOSING_S if self._error is not None else self.levels.timeout_s
            with suppress(CollectiveTimeout):
                await_device(self.is_idle, limit, "close")
            self._closed = True
        self._jobs.put(None)
        self._watchdog.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_S)
        self.levels.close()
        self._pipeline.close()
        self.kept.clear()


class CallEnd:
    """The end of a call, for streams that are to wait for it."""

    def __init__(self, engine: BetweenHosts, number: int) -> None:
        """Of the call with this number, or one after it."""
        self._engine, self._number = engine, number

    def order(self, stream: int) -> None:
        """Let a stream wait for it."""
        self._engine.order(stream, self._number)

    def query(self) -> bool:
        """Whether it has ended."""
        return self._engine.ended() >= self._number


def _callers_wait() -> bool:
    """Whether callers wait, not streams, as this process is told."""
    if os.environ.get(STREAMS_WAIT) != "1":
        return True
    if cuda_queues.count() < cuda_queues.FEWEST:
        raise DeviceError(
            f"{STREAMS_WAIT}=1: streams of this process have "
            f"{cuda_queues.words()} queues, where one that waits for a call between "
            f"hosts holds up others: set {cuda_queues.VARIABLE}={cuda_queues.DEFAULT} "
            f"before CUDA is used, or unset {STREAMS_WAIT}"
        )
    return False


_PROCESS: dict[int, bytes] = {}
"""A number of this process, by its pid: a fork has another."""


def _ranks_here(host: HostHalf) -> int:
    """How many ranks of a communicator are in this process."""
    mine = _PROCESS.setdefault(os.getpid(), uuid4().bytes)
    rows = gather_bytes(host, mine)
    return sum(row == mine for row in rows)
