"""Calls on a device that were made before: found by their arguments, and started.

What was checked and planned for one call holds for every other with arrays of the same
element types, shapes and device that overlap in the same way, the same operation and
root. Where the arrays are, and the stream, may change from call to call. Whatever is
not found goes the general way, which also raises the errors: a call that the native
core refuses, since the communicator has failed or is closed, is made there again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from unisono.devices.arrays import (
    ArrayFacts,
    current_stream,
    facts_of,
    stream_handle,
)
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallKey, CallOptions, Options
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.plane import (
    MOST_PLANS,
    DevicePlane,
    Prepared,
)
from unisono.runtime.device.stream_engine import LEGACY_DEFAULT
from unisono.runtime.device.work import DeviceWork
from unisono.runtime.plan.plans import CODES

OWN_LIMIT = -1
"""For the native core: the timeout of the communicator."""
NAMES = list(CODES)
"""The collectives, by their numbers."""
_OPTIONS = {"stream", "async_op"}
"""What a quick call may be given."""
_NOTHING = ArrayFacts(None, 0, 0, 0, None)


class Known(NamedTuple):
    """A kind of call: what it runs; which of (nothing, x, out) it reads and writes.

    `result` is which of these is returned; `apart` is how many bytes `out` begins after
    `x`, if they overlap.
    """

    prepared: Prepared
    input: int
    output: int
    result: int
    apart: int | None


class QuickCalls:
    """The kinds of calls that were made on a device, by their arguments."""

    def __init__(self, plane: DevicePlane) -> None:
        """No call was made yet."""
        self._plane = plane
        self._refuses_default = plane.native.ranks_here() > 1
        self._known: dict[Hashable, Known] = {}

    def start(
        self, kind: int, x: Any, out: Any, op: Any, root: int, how: Options
    ) -> int | DeviceWork:
        """Start a call: 1 or its Work; 0 if none like it was made, or it is refused."""
        if (how and not how.keys() <= _OPTIONS) or not _is_named(op, root):
            return 0
        one = facts_of(x)
        two = _NOTHING if out is None else facts_of(out)
        if one is None or two is None:
            return 0
        known = self._known.get((kind, op, root, one.kind, two.kind))
        if known is None or (out is not None and known.apart != _apart(one, two)):
            return 0
        arrays = None, x, out
        captured = self._launch(known, (_NOTHING, one, two), arrays, how)
        if captured is None:
            return 0
        if not how.get("async_op"):
            return 1
        some, given = arrays[known.input or known.output], how.get("stream")
        return self._plane.work(
            NAMES[kind],
            lambda: _streams(current_stream(some, NAMES[kind]), given)[1],
            arrays[known.result],
            captured=captured,
        )

    def _launch(
        self,
        known: Known,
        facts: tuple[ArrayFacts, ArrayFacts, ArrayFacts],
        arrays: object,
        how: Options,
    ) -> bool | None:
        """Whether it was captured; None if it was not started."""
        plane, given = self._plane, how.get("stream")
        source, target = facts[known.input], facts[known.output]
        some = facts[known.input or known.output]
        stream, current = _streams(some.stream, given)
        if self._refuses_default and stream in LEGACY_DEFAULT:
            return None
        queued = bool(how.get("async_op"))
        if queued:
            stream = plane.own_stream()
        _, one, two = facts
        held = one.held + two.held
        if stream != current:
            held += one.nbytes + two.nbytes
        number = plane.start(
            known.prepared,
            source.address,
            target.address,
            stream,
            current,
            OWN_LIMIT,
            held,
            arrays,
            queued=queued,
        )
        if number is None:
            return None
        host = plane.host
        host.exceeded_s = host.timeout_s  # for the error, if it is
        return number == 0

    def remember(
        self, call: Call, reduction: Reduction, how: CallOptions, key: CallKey
    ) -> None:
        """Such a call was made: the next one like it is found."""
        kind, x, out, op, root, options = key
        if call.finish is not None or not options.keys() <= _OPTIONS:
            return
        one = facts_of(x)
        two = _NOTHING if out is None else facts_of(out)
        if one is None or two is None or not _is_named(op, root):
            return
        places = _place(call.input, one, two), _place(call.output, one, two)
        named = enumerate((None, x, out))
        result = next((i for i, array in named if array is call.result), -1)
        if -1 in (*places, result) or one.nbytes == 0:
            return
        if len(self._known) >= MOST_PLANS:
            self._known.clear()
        self._known[kind, op, root, one.kind, two.kind] = Known(
            self._plane.prepared(call, reduction, how),
            *places,
            result,
            _apart(one, two),
        )

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


def _streams(current: int | None, given: Any) -> tuple[int, int]:
    """The stream of a call, and the current one: that of the array's library.

    If it has none, the given or the default one.
    """
    stream = (current or 0) if given is None else stream_handle(given)
    return stream, stream if current is None else current


def _is_named(op: Any, root: Any) -> bool:
    """Whether they can be compared with those of another call."""
    return type(root) is int and (op is None or isinstance(op, str))


def _place(buffer: Buffer | None, one: ArrayFacts, two: ArrayFacts) -> int:
    """Which of (nothing, x, out) a buffer is; -1 if it is a copy."""
    addresses = 0, one.address, two.address
    found = 0 if buffer is None else buffer.address
    return addresses.index(found) if found in addresses else -1


def _apart(one: ArrayFacts, two: ArrayFacts) -> int | None:
    """How many bytes the second begins after the first, if they overlap."""
    apart = two.address - one.address
    return apart if -two.nbytes < apart < one.nbytes else None
