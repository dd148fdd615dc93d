"""One direction of one connection through the proxy, and what may be done to it.

Bytes go through three stations: they are *changed* as they come in (cut off, flipped,
frames doubled or swapped), they *queue* until they are due, and they *leave* as fast as
is allowed. Where no rule is set, each is a glance, and a piece goes straight on.

What is changed depends on the place of a byte in its stream and on nothing else: not on
the pieces in which the bytes happen to arrive. So a seed and an offset mean the same in
every run.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

_MOST_QUEUED = 16 << 20
"""A stream stops reading while this many bytes are queued."""

_SLICE_S = 0.005
"""A throttled stream sends its allowance for this time, and then waits."""

Note = Callable[[str, int], None]
"""Logs a fault and its byte offset in the stream."""


@dataclass
class FaultSelection:
    """Where a fault is injected: at these offsets, and at random with a probability."""

    at: frozenset[int] = frozenset()
    probability: float = 0.0

    def __bool__(self) -> bool:
        """Whether it selects anything."""
        return bool(self.at) or self.probability > 0


@dataclass
class FaultRules:
    """The faults of all streams of one direction; changed while they run."""

    delay_s: float = 0.0
    nbytes_per_s: float = math.inf
    frozen: bool = False
    truncate_at: int | None = None
    corrupt: FaultSelection = field(default_factory=FaultSelection)
    corrupt_next: bool = False
    bit: int = 0
    frame_nbytes: int = 0
    first_frame: int = 0
    duplicate: FaultSelection = field(default_factory=FaultSelection)
    reorder: FaultSelection = field(default_factory=FaultSelection)

    @property
    def change_bytes(self) -> bool:
        """Whether any of them changes bytes."""
        return bool(
            self.truncate_at is not None
            or self.corrupt
            or self.corrupt_next
            or self.frame_nbytes
        )


class ProxyStream:
    """Forwards bytes from one socket to another."""

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        rules: FaultRules,
        seed: str,
        note: Note,
    ) -> None:
        """`seed` is that of all random faults."""
        self.source, self.sink, self.rules = source, sink, rules
        self.connected = True  # whether the sink can take bytes
        self.taken = self.sent = 0
        self.ended = False  # no more will be taken in
        self.finished = False  # and the sink knows it
        self._note = note
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._queued = 0
        self._allowed, self._allowed_at = 0.0, time.monotonic()
        self._flips, self._fates = Random(f"{seed} flips"), Random(f"{seed} frames")
        self._next_flip: int | None = None
        self._copy, self._held = bytearray(), bytearray()
        self._fate = ""

    # --- state for the event loop

    @property
    def wants_to_read(self) -> bool:
        """Whether to read now."""
        return not (self.ended or self.rules.frozen or self._queued >= _MOST_QUEUED)

    def waits_until(self, now: float) -> float:
        """When something can be sent: now or earlier, at a later time, or never."""
        if self.rules.frozen or not self.connected or self.finished:
            return math.inf
        if not self._queue:
            return now if self.ended and not self._held else math.inf
        due = self._queue[0][0]
        if self.rules.nbytes_per_s < math.inf:
            short = self._slice() - self._allowance(now)
            due = max(due, now + short / self.rules.nbytes_per_s)
        return due

    # --- reading

    def take(self, buffer: memoryview) -> None:
        """Read once, and queue or forward it; OSError if there is no peer."""
        count = self.source.recv_into(buffer)
        if not count:
            self.end()
            return
        data = buffer[:count]
        parts = self._changed(data) if self.rules.change_bytes else [data]
        self.taken += count
        due = time.monotonic() + self.rules.delay_s if self.rules.delay_s else 0.0
        for part in parts:
            self._put(part, due)

    def end(self) -> None:
        """The source has ended; send what was held back."""
        self.ended = True
        self.release()

    def release(self) -> None:
        """Send a frame that waits for the next one."""
        if self._held:
            self._put(memoryview(bytes(self._held)), 0.0)
            self._held.clear()
        self._fate = ""

    def _put(self, data: memoryview, due: float) -> None:
        at_once = not (self._queue or due) and self.connected
        if at_once and self.rules.nbytes_per_s == math.inf:
            data = data[self._send(data) :]
        if data:  # the buffer is reused, so copy
            self._queue.append((due, memoryview(bytes(data))))
            self._queued += len(data)

    # --- sending

    def leave(self, now: float) -> None:
        """Send what is due and allowed; OSError if the sink is gone."""
        while self._queue and self.waits_until(now) <= now:
            due, data = self._queue.popleft()
            limited = self.rules.nbytes_per_s < math.inf
            most = max(int(self._allowance(now)), 1) if limited else len(data)
            sent = self._send(data[:most])
            if limited:
                self._allowed -= sent
            self._queued -= sent
            if sent < len(data):
                self._queue.appendleft((due, data[sent:]))
            if sent < min(most, len(data)):
                return
        if self.ended and not self._queue and not self.finished and self.connected:
            self.finished = True
            self.sink.shutdown(socket.SHUT_WR)

    def _send(self, data: memoryview) -> int:
        try:
            count = self.sink.send(data)
        except BlockingIOError:
            return 0
        self.sent += count
        return count

    def _allowance(self, now: float) -> float:
        rate = self.rules.nbytes_per_s
        earned = (now - self._allowed_at) * rate
        self._allowed = min(self._allowed + earned, self._slice())
        self._allowed_at = now
        return self._allowed

    def _slice(self) -> float:
        return max(self.rules.nbytes_per_s * _SLICE_S, 1.0)

    # --- faults

    def _changed(self, data: memoryview) -> list[memoryview]:
        at, last = self.taken, self.rules.truncate_at
        if last is not None and at + len(data) >= last:
            data = data[: max(last - at, 0)]
            self.ended = True
        self._flip(data, at)
        parts = self._framed(data, at) if self.rules.frame_nbytes else [data]
        if self.ended:
            self._note("truncate", at + len(data))
            parts.append(memoryview(bytes(self._held)))
            self._held.clear()
        return parts

    def _flip(self, data: memoryview, at: int) -> None:
        rules = self.rules
        places = [k - at for k in rules.corrupt.at if at <= k < at + len(data)]
        if rules.corrupt_next and data:
            rules.corrupt_next = False
            places.append(0)
        if rules.corrupt.probability:
            if self._next_flip is None or self._next_flip < at:
                self._next_flip = at + self._gap()
            while self._next_flip < at + len(data):
                places.append(self._next_flip - at)
                self._next_flip += 1 + self._gap()
        for place in sorted(set(places)):
            data[place] ^= 1 << rules.bit
            self._note("corrupt", at + place)

    def _gap(self) -> int:
        """The number of unchanged bytes before the next changed one."""
        p = self.rules.corrupt.probability
        if p >= 1.0:
            return 0
        return int(math.log(1.0 - self._flips.random()) / math.log(1.0 - p))

    def _framed(self, data: memoryview, at: int) -> list[memoryview]:
        """The data with some frames duplicated, and some swapped with the next one."""
        parts = []
        while data:
            index, within = divmod(at - self.rules.first_frame, self.rules.frame_nbytes)
            left = self.rules.frame_nbytes - within
            piece, data = data[:left], data[left:]
            if within == 0 and index >= 0:
                self._fate = self._decided(index)
            if self._fate == "reorder":
                self._held += piece
            else:
                parts.append(piece)
            if self._fate == "duplicate":
                self._copy += piece
            at += len(piece)
            if len(piece) == left:
                parts += self._frame_done(at - self.rules.frame_nbytes)
        return parts

    def _decided(self, index: int) -> str:
        if self._held:  # the held frame waits for this one
            return ""
        for fate in ("duplicate", "reorder"):
            chance: FaultSelection = getattr(self.rules, fate)
            drawn = chance.probability and self._fates.random() < chance.probability
            if drawn or index in chance.at:
                return fate
        return ""

    def _frame_done(self, at: int) -> list[memoryview]:
        """What to send at the end of the frame that began at `at`."""
        extra = []
        if self._fate == "duplicate":
            self._note("duplicate", at)
            extra.append(memoryview(bytes(self._copy)))
            self._copy.clear()
        elif self._fate != "reorder" and self._held:
            self._note("reorder", at)
            extra.append(memoryview(bytes(self._held)))
            self._held.clear()
        self._fate = ""
        return extra
