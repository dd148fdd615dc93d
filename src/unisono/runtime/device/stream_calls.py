"""What calls on CUDA arrays have in common: their streams, their Works, their arrays.

Below it a call is one kernel launch, where all ranks are on one host (`plane.py`), or
work of a thread, where they are not (`between_hosts.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

from unisono import _native
from unisono.algorithms import Spec
from unisono.devices.arrays import DeviceArray, current_stream, stream_handle
from unisono.errors import BadArgument, UnisonoError
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import CallsInFlight
from unisono.runtime.device.work import DeviceWork
from unisono.runtime.observe.failures import describe_on_device
from unisono.runtime.plan.plans import CallKind
from unisono.transports.session import Session

LEGACY_DEFAULT = (0, 1)
"""CUDA's handles of the default stream that all threads of a process share."""


class HostHalf(Protocol):
    """The part of a communicator's core that its device half uses."""

    native: _native.Comm
    session: Session
    world_ranks: tuple[int, ...]
    position: Position
    rank: int
    world_size: int
    hosts_if_several: tuple[int, ...]
    exceeded_s: float
    in_flight: CallsInFlight

    @property
    def timeout_s(self) -> float:
        """The timeout of calls without one of their own."""

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Run a call on arrays of the host."""

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with its files as they were when it was first used here."""

    def check_usable(self, what: str, words: Callable[[], str] = ...) -> None:
        """Raise the error of the communicator if it has failed."""

    def failure(
        self, timeout_s: float | None = None, refused: str = ""
    ) -> UnisonoError:
        """Why the latest call failed, or why one is refused."""

    def close(self) -> None:
        """Close it."""

    def refuse_other_orders(self, kind: CallKind) -> None:
        """Raise BadArgument if an algorithm does not reduce in the order of ranks."""


class StreamCalls(ABC):
    """Calls on the streams of one device."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """The calls of a communicator, to which it refers weakly."""
        self._host = ref(host)
        self.ordinal = ordinal
        self._stream: _native.CudaStream | None = None
        # Arrays of calls in flight, and the numbers of these.
        self.kept: deque[tuple[int, object]] = deque()
        self._released = 0  # the calls whose arrays were released

    @abstractmethod
    def launch(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        stream: int,
        current: int,
    ) -> int:
        """Start a call on a stream, after what is on the current one.

        The number of the call; 0 if it was captured for a graph instead.
        """

    @abstractmethod
    def check(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if the communicator has failed; `words` describe a refused call."""

    @abstractmethod
    def ranks_here(self) -> int:
        """How many ranks are threads of this process."""

    @abstractmethod
    def ended(self) -> int:
        """How many calls have ended at least."""

    @abstractmethod
    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""

    @property
    def host(self) -> HostHalf:
        """The core of the communicator, which is there as long as calls are made."""
        host = self._host()
        assert host is not None
        return host

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Start a call on the caller's current stream, or beside it (async_op)."""
        self._refuse(call, how)
        self.check(call.collective, lambda: describe_on_device(call, reduction.op))
        given = None if how.stream is None else stream_handle(how.stream)
        current = self._current_stream(call, given)
        stream = current if given is None else given
        self._refuse_shared_stream(call, stream)
        if how.async_op:
            stream = self.own_stream()
        number = self.launch(call, reduction, how, stream, current)
        if how.async_op:
            return self.work(
                call.collective,
                lambda: self._current_stream(call, given),
                call.result,
                call.finish,
                captured=number == 0,
            )
        beside = call.finish is not None and stream != current
        if beside:  # the result is finished on the current stream
            _native.CudaEvent(self.ordinal, stream).order(current)
        result = call.finished()
        if beside:
            _native.CudaEvent(self.ordinal, current).order(stream)
        return result

    def work(
        self,
        collective: str,
        current: Callable[[], int],
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        *,
        captured: bool,
    ) -> DeviceWork:
        """The handle of the call that was just started on the plane's own stream."""
        event = _native.CudaEvent(self.ordinal, self.own_stream())
        check = self.check
        return DeviceWork(
            collective, event, current, check, result, finish, captured=captured
        )

    def own_stream(self) -> int:
        """The stream of calls that run beside that of their caller."""
        if self._stream is None:
            self._stream = _native.CudaStream(self.ordinal)
        return self._stream.handle

    def _current_stream(self, call: Call, given: int | None) -> int:
        """That of the array's library; if it has none, the given or the default one."""
        some = call.input or call.output
        assert some is not None
        found = current_stream(some.array, call.collective)
        return found if found is not None else given or 0

    def _refuse_shared_stream(self, call: Call, stream: int) -> None:
        if stream in LEGACY_DEFAULT and self.ranks_here() > 1:
            raise BadArgument(
                f"{call.collective}: {self.ranks_here()} ranks are threads of "
                "this process, and their kernels wait for each other: on the default "
                "stream, which all threads share, they would wait for ever. Give each "
                "rank a stream of its own, with torch.cuda.stream() or stream="
            )

    def _refuse(self, call: Call, how: CallOptions) -> None:
        if call.device != self.ordinal:
            raise BadArgument(
                f"{call.collective}: the array is on cuda:{call.device}, this "
                f"communicator uses cuda:{self.ordinal}; a rank has one device"
            )
        how.refuse_codec_options(call.collective)
        if how.codec is not None:
            raise BadArgument(
                f"{call.collective}: codec= is not supported on CUDA arrays"
            )

    def release_some(self) -> None:
        """Release the arrays of calls that have ended, if there are more of these."""
        if self.ended() > self._released:
            self.release()

    def release(self) -> None:
        """Release the arrays of calls that have ended; threads may do it together."""
        self._released = self.ended()
        with suppress(IndexError):  # there are no more
            while (first := self.kept.popleft())[0] <= self._released:
                pass
            self.kept.appendleft(first)


def held_bytes(call: Call, *, beside: bool) -> int:
    """The bytes that are not freed while the arrays of a call are kept.

    DeviceArrays are kept; other libraries free memory by stream, so their arrays are
    kept only if the call runs beside the current stream.
    """
    both = [b for b in (call.input, call.output) if b is not None]
    held = sum(b.array.facts.held for b in both if isinstance(b.array, DeviceArray))
    return max(1, held + sum(b.nbytes for b in both)) if beside else held
