"""Calls that consist of several collectives, each depending on the one before.

Such a call is a generator that yields the Work of every collective it starts, and
continues when that is done. Its first collective runs while the caller does other
work; the others start in `wait`, on the caller's thread. So ranks must wait for them in
the same order, as for anything that starts collectives.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import Work
from unisono.runtime.collectives import Collectives

Stages = Generator[Work, None, Any]
_COPIES = Reduction("sum")


class StagedWork(Work):
    """The handle of such a call; the generator's return value is not its result."""

    def __init__(self, stages: Stages, result: Any, call: str) -> None:
        """Start the first collective."""
        super().__init__(None, result, call=call)
        self._stages = stages
        self._current: Work | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._current = next(self._stages)
            self._current.allow_drop()  # this handle is the one to wait for
            self._caller = self._current.caller
        except StopIteration:
            self._current = None
        except BaseException as error:
            self._current, self._error = None, error

    def wait(self, timeout_s: float | None = None) -> Any:
        """Run the remaining collectives; the result. `timeout_s` is for each one."""
        self._watched = True
        while self._current is not None:
            self._current.wait(timeout_s)
            self._advance()
        return super().wait()

    def rest(self) -> None:
        """Run the remaining collectives: no other thread does."""
        self.wait()

    def _ended(self) -> bool:
        return self._current is None


def once(comm: Collectives, call: Call, label: str) -> Work:
    """Start a call whose sizes depend on data, so its plan is not cached."""
    comm.core.check_usable(call.collective)
    how = CallOptions(label=label)
    plan = comm.core.new_plan(call, _COPIES, how)
    what = call.collective, call.dtype.code, _COPIES.op, call.root, call.counts
    comm.core.single_use.append((*what, call.shape, how))
    return comm.core.submit(plan, call)
