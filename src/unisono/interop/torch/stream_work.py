"""Work on CUDA tensors as torch wants to see it.

As with NCCL: to wait for it lets the current stream wait, not the host. A call that
fails later ends normally on its device; its error is raised by the next call, or by a
wait() after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.errors import for_torch, text_for_future
from unisono.interop.torch.streams import CallStreams, Held, StreamPosition
from unisono.interop.torch.work import Completer, PendingCall
from unisono.runtime.call.work import Work as Part
from unisono.runtime.device.work import await_device

_NO_LIMIT = timedelta(0)


class StreamWork(PendingCall):
    """Calls of the device plane that are one call of torch's, behind one another."""

    def __init__(
        self,
        outputs: Any,
        position: StreamPosition,
        held: Held,
        check: Callable[[], None],
        *,
        blocks: bool = False,
        name: str = "",
    ) -> None:
        """`check` raises if the group has failed; `blocks`: wait() blocks the host."""
        super().__init__(outputs)
        self._position = position
        self._held = held
        self._check = check
        self._blocks = blocks
        self._name = name

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Have the current stream wait; with a timeout, and in a barrier, the host."""
        limit = timeout.total_seconds()
        self._position.order()
        self._held.clear()  # who gets the memory next is behind the call
        try:
            if self._blocks or limit > 0:
                limit_s = limit if limit > 0 else None
                await_device(self._position.reached, limit_s, self._name)
            self._check()
        except UnisonoError as error:
            raise for_torch(error) from None
        return True

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return self._position.reached()

    def exception(self) -> Any:
        """What went wrong, if it has ended."""
        if not self.is_completed():
            return None
        try:
            self._check()
        except UnisonoError as error:
            return for_torch(error)
        return None

    def settle(self) -> None:
        """Nothing is left to do: results are brought home on the call's stream."""

    def rest(self) -> None:
        """Sleep until the device has done it."""
        await_device(self._position.reached, None, self._name)

    def failure(self) -> str | None:
        """What went wrong, for the adapter in C++."""
        error = self.exception()
        return None if error is None else text_for_future(error)

    def stream_place(self) -> tuple[int, int] | None:
        """torch's numbers of the stream and its device, for the adapter in C++."""
        stream = self._position.stream
        return stream.stream_id, stream.device_index

    def get_future(self) -> Any:
        """A future that is complete already, for whoever waits for it on a stream."""
        with self._lock:
            if self._future is None:
                self._future = _future_on(self._position.stream.device)
                with torch.cuda.stream(self._position.stream):
                    self._future.set_result(self._outputs)
        return self._future


class StagedMessage(PendingCall):
    """A message of a CUDA tensor, by way of the host's memory.

    The host waits for a message; the rest is as with `StreamWork`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        part: Part,
        streams: CallStreams,
        completer: Completer,
        staged: Tensor | None = None,
    ) -> None:
        """`staged` is where the host receives it."""
        self._streams = streams
        self._position: StreamPosition | None = None
        copies: Callable[[], None] | None = None
        if staged is not None:
            self._begun = streams.here()  # until then others may use the tensor
            copies = self._copy_of(tensors[0], staged)
        super().__init__(tensors, [part], copies, completer)

    def _copy_of(self, tensor: Tensor, staged: Tensor) -> Callable[[], None]:
        def to_device() -> None:
            own = self._streams.own
            own.wait_event(self._begun)
            with torch.cuda.stream(own), torch.no_grad():
                tensor.detach().copy_(staged, non_blocking=True)
            position = StreamPosition(own, own.record_event())
            self._streams.keep(position, [tensor, staged])
            self._position = position

        return to_device

    def _noted(self) -> None:
        """Remember the sender."""
        self._source = self._parts[0].source

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for the message; then the current stream waits for its copy."""
        super().wait(timeout)
        if self._position is not None:
            self._position.order()
        return True

    def is_completed(self) -> bool:
        """Whether the message has arrived, and the device has copied it."""
        arrived = super().is_completed()
        return arrived and (self._position is None or self._position.reached())

    def _source_rank(self) -> int:
        found = getattr(self, "_source", None)
        return super()._source_rank() if found is None else found

    def stream_place(self) -> tuple[int, int] | None:
        """torch's numbers of the stream that its copy is on, and of the device."""
        own = self._streams.own
        return own.stream_id, own.device_index

    def _new_future(self) -> Any:
        return _future_on(self._streams.device)

    def complete(self, raw: Any) -> None:
        """Give the future its value, behind the copy."""
        with torch.cuda.stream(self._streams.own):
            super().complete(raw)


class SeveralWorks(PendingCall):
    """Works that are waited for as one, some of them on streams."""

    def __init__(self, works: Sequence[PendingCall]) -> None:
        """In the order in which they were made."""
        super().__init__([])
        self._works = works

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for each of them."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        """What went wrong with the first that failed."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def rest(self) -> None:
        """Sleep until all have ended."""
        for work in self._works:
            work.rest()

    def stream_place(self) -> tuple[int, int] | None:
        """That of the last work, behind which the others are."""
        places = [work.stream_place() for work in self._works]
        return next((place for place in reversed(places) if place is not None), None)

    def failure(self) -> str | None:
        """What went wrong, for the adapter in C++."""
        error = self.exception()
        return None if error is None else text_for_future(error)

    def get_future(self) -> Any:
        """A future that is complete when all of them are; it has no value."""
        all_of = torch.futures.collect_all([work.get_future() for work in self._works])
        return all_of.then(_waited_for)


def together(works: Sequence[PendingCall]) -> PendingCall | None:
    """One work for all if one is on a stream; None if all are the host's."""
    on_streams = (StreamWork, StagedMessage)
    return (
        SeveralWorks(works)
        if any(isinstance(work, on_streams) for work in works)
        else None
    )


def _waited_for(all_of: Any) -> list[Tensor]:
    for future in all_of.value():
        future.wait()  # of the stream that this runs on
    return []


def _future_on(device: torch.device) -> Any:
    return torch.futures.Future(devices=[device])


leave_out(StreamWork, StagedMessage, SeveralWorks)
