"""Calls that are made of several collectives, each after what the last one brought.

A function that `yield`s the Work of every collective it begins, and goes on when that
is done, is such a call. Its first collective runs while the caller does other things;
the others begin in `wait`, on the caller's own thread. So ranks must wait for them in
the same order, as for everything that begins collectives.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import How
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import Work
from unisono.runtime.collectives import Collectives

Stages = Generator[Work, None, Any]
_COPIES = Reduction("sum")


class Staged(Work):
    """The handle of such a call; what the function returns is not its result."""

    def __init__(self, stages: Stages, result: Any, call: str) -> None:
        """Begin the first collective."""
        super().__init__(None, result, call=call)
        self._stages = stages
        self._flying: Work | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._flying = next(self._stages)
        except StopIteration:
            self._flying = None
        except BaseException as error:
            self._flying, self._error = None, error

    def wait(self, timeout_s: float | None = None) -> Any:
        """Run all that is left; the result. `timeout_s` is for each collective."""
        while self._flying is not None:
            self._flying.wait(timeout_s)
            self._advance()
        return super().wait()

    def rest(self) -> None:
        """There is nobody else to run what is left."""
        self.wait()

    def done(self) -> bool:
        """Whether all of it has ended, well or not."""
        return self._flying is None


def once(comm: Collectives, call: Call, label: str) -> Work:
    """Begin a call whose sizes depend on data: its plan is not worth keeping."""
    comm.core.check_usable(call.collective)
    how = How(label=label)
    plan = comm.core.new_plan(call, _COPIES, how)
    what = call.collective, call.dtype.code, _COPIES.op, call.root, call.counts
    comm.core.single_use.append((*what, call.shape, how))
    input_at = 0 if call.input is None else call.input.address
    output_at = 0 if call.output is None else call.output.address
    limit = comm.core.limit_ns(None)
    native = comm.core.native.submit(plan, input_at, output_at, limit)
    return comm.core.work(native, call, None)
