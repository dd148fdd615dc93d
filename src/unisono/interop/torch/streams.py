"""The streams of calls on CUDA tensors: which one a call runs on, and who waits for it.

A blocking call runs on the current stream of its device. An asynchronous one runs on a
stream of its group, which first waits for the current one; what torch does for the call
(copies of tensors that do not lie in one piece) is on that stream as well. The host
waits for neither.

Only `torch.cuda` is asked, and only when there is a CUDA tensor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Held = list[object]
"""What a call in flight keeps alive."""


class StreamPosition:
    """A place in a stream. Without an event it is wherever the stream has come to."""

    def __init__(self, stream: Any, event: Any = None) -> None:
        """`event` was recorded there."""
        self.stream = stream
        self._event = event

    def order(self) -> None:
        """Have the current stream wait until it is reached; the host does not."""
        current = torch.cuda.current_stream(self.stream.device)
        if current == self.stream:
            return
        if self._event is None:
            current.wait_stream(self.stream)
        else:
            current.wait_event(self._event)

    def reached(self) -> bool:
        """Whether everything before it has ended."""
        place = self.stream if self._event is None else self._event
        return bool(place.query())


class CallStreams:
    """The streams of one group's calls on one device."""

    def __init__(self, like: Tensor) -> None:
        """`like` is on the device. The stream is made for the first that needs it."""
        self.device = like.device
        self.mark = like.detach().new_empty(0, dtype=torch.uint8)
        self._own: Any = None
        self._in_flight: deque[tuple[StreamPosition, Held]] = deque()
        self._lock = threading.Lock()

    @property
    def own(self) -> Any:
        """The stream of asynchronous calls."""
        if self._own is None:
            with self._lock:
                if self._own is None:
                    cuda: Any = torch.cuda
                    self._own = cuda.Stream(self.device)
        return self._own

    def turn(self, *, asynchronous: bool) -> CallTurn:
        """A call that is about to be made."""
        return CallTurn(self, asynchronous=asynchronous)

    def here(self) -> Any:
        """An event behind what the current stream has been given."""
        return torch.cuda.current_stream(self.device).record_event()

    def keep(self, position: StreamPosition, held: Held) -> None:
        """Keep what a call uses until it has ended, or somebody waited for it.

        A call that is captured for a graph is kept by whoever keeps the graph, and its
        event cannot be asked.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            while self._in_flight and _is_over(*self._in_flight[0]):
                self._in_flight.popleft()
            self._in_flight.append((position, held))

    def clear(self) -> None:
        """The group has ended, and with it all its calls."""
        with self._lock:
            self._in_flight.clear()


def _is_over(position: StreamPosition, held: Held) -> bool:
    return not held or position.reached()


class CallTurn:
    """While a call is made: what torch does meanwhile is on the call's stream."""

    def __init__(self, streams: CallStreams, *, asynchronous: bool) -> None:
        """Nothing happens before it is entered."""
        self._streams = streams
        self._asynchronous = asynchronous
        self._inside: AbstractContextManager[Any] = nullcontext()
        self.stream: Any = None

    def __enter__(self) -> CallTurn:
        """Take the stream: the current one, or the group's behind the current one."""
        current = torch.cuda.current_stream(self._streams.device)
        self.stream = current
        if self._asynchronous:
            self.stream = self._streams.own
            self.stream.wait_stream(current)
            self._inside = torch.cuda.stream(self.stream)
        self._inside.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the stream."""
        self._inside.__exit__(kind, error, trace)

    def ended(self, held: Held, *, marked: bool = False) -> StreamPosition:
        """Everything has been queued: where it ends, and what must live until then.

        `marked`: the host will wait for it, and for nothing that comes after.
        Tensors of a call on the current stream may go: whoever gets their memory next
        is behind the call on that stream.
        """
        if not self._asynchronous:
            held.clear()
            event = self.stream.record_event() if marked else None
            return StreamPosition(self.stream, event)
        position = StreamPosition(self.stream, self.stream.record_event())
        self._streams.keep(position, held)
        return position


def barrier_device(
    opts: Any, served: Collection[str], used: torch.device | None
) -> torch.device | None:
    """The device whose streams a barrier waits for; None if it is the host's alone.

    One that is named; or the one that the group has used, for then all ranks have; or
    the current one, if the group serves no other.
    """
    if "cuda" not in served:
        return None
    if opts.device_ids:
        return torch.device("cuda", opts.device_ids[0])
    given = getattr(opts, "device", None)
    if given is not None and given.type == "cuda" and given.index is not None:
        return torch.device(given)
    if used is not None:
        return used
    if "cpu" not in served or (given is not None and given.type == "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return None
