"""What every engine of calls on CUDA arrays does: streams, handles, and the order.

An engine carries out whole calls on the device of its rank. `DevicePlane` runs
unisono's own kernel, `BetweenHosts` does so within hosts and sends between them, and
`NcclEngine` hands calls to NCCL. A call runs on the current stream
of its array's library, on a given one, or beside these on a stream of the engine's; the
host does not wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

from unisono import _native
from unisono.devices.arrays import DeviceArray, current_stream, stream_handle
from unisono.errors import BadArgument
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.device.work import DeviceWork, Reached
from unisono.runtime.observe.failures import describe_on_device

LEGACY_DEFAULT = (0, 1)
"""CUDA's handles of the default stream that all threads of a process share."""


class StreamEngine(ABC):
    """Starts calls of one communicator on one device."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """It refers to its communicator weakly."""
        self._host = ref(host)
        self.ordinal = ordinal
        self._stream: _native.CudaStream | None = None

    @property
    def host(self) -> HostHalf:
        """The core of the communicator, which is there as long as calls are made."""
        host = self._host()
        assert host is not None
        return host

    @abstractmethod
    def check(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if the communicator has failed, on the host or on a device.

        `words` then describes the call that is refused.
        """

    @abstractmethod
    def launch(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        stream: int,
        current: int,
    ) -> bool:
        """Start a call on a stream, after what is on the current one.

        Whether it was captured for a graph instead.
        """

    def refuse_stream(self, call: Call, stream: int) -> None:  # noqa: B027
        """Raise BadArgument if a call cannot run on this stream; it can on any."""

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Start a call on the caller's current stream, or beside it (async_op)."""
        self._refuse(call, how)
        self.check(call.collective, lambda: describe_on_device(call, reduction.op))
        stream, current = self.streams_of(call, how)
        captured = self.launch(call, reduction, how, stream, current)
        if how.async_op:
            return self.work(
                call.collective,
                lambda: self._current_stream(call, how),
                call.result,
                call.finish,
                captured=captured,
            )
        beside = call.finish is not None and stream != current
        if beside:  # the result is finished on the current stream
            _native.CudaEvent(self.ordinal, stream).order(current)
        result = call.finished()
        if beside:
            _native.CudaEvent(self.ordinal, current).order(stream)
        return result

    def streams_of(self, call: Call, how: CallOptions) -> tuple[int, int]:
        """The stream that a call runs on, and the current one."""
        current = self._current_stream(call, how)
        stream = current if how.stream is None else stream_handle(how.stream)
        self.refuse_stream(call, stream)
        return self.own_stream() if how.async_op else stream, current

    def work(
        self,
        collective: str,
        current: Callable[[], int],
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        *,
        captured: bool,
    ) -> DeviceWork:
        """The handle of the call that was just started on the engine's own stream."""
        event, check = self.end_of_call(), self.check
        return DeviceWork(
            collective, event, current, check, result, finish, captured=captured
        )

    def end_of_call(self) -> Reached:
        """That of the call that was just started on the engine's own stream."""
        return _native.CudaEvent(self.ordinal, self.own_stream())

    def own_stream(self) -> int:
        """The stream of calls that run beside that of their caller."""
        if self._stream is None:
            self._stream = _native.CudaStream(self.ordinal)
        return self._stream.handle

    def _current_stream(self, call: Call, how: CallOptions) -> int:
        """That of the array's library; if it has none, the given or the default one."""
        some = call.input or call.output
        assert some is not None
        found = current_stream(some.array, call.collective)
        if found is not None:
            return found
        return 0 if how.stream is None else stream_handle(how.stream)

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


class NumberedCalls(StreamEngine):
    """An engine that numbers its calls, and keeps their arrays by these numbers."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """No call is in flight."""
        super().__init__(host, ordinal)
        # Arrays of calls in flight, and the numbers of these.
        self.kept: deque[tuple[int, object]] = deque()
        self._released = 0  # the calls whose arrays were released

    @abstractmethod
    def ranks_here(self) -> int:
        """How many ranks are threads of this process."""

    @abstractmethod
    def ended(self) -> int:
        """How many calls have ended at least."""

    def refuse_stream(self, call: Call, stream: int) -> None:
        """Ranks of one process must not share a stream."""
        if stream in LEGACY_DEFAULT and self.ranks_here() > 1:
            raise BadArgument(
                f"{call.collective}: {self.ranks_here()} ranks are threads of this "
                "process, and their kernels wait for each other: on the default "
                "stream, which all threads share, they would wait for ever. Give each "
                "rank a stream of its own, with torch.cuda.stream() or stream="
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
