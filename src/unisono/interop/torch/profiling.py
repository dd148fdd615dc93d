"""Calls as torch's profiler shows them: `unisono:all_reduce`, from its call to its end.

Nothing is recorded, and hardly anything done, where no profiler is at work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def begun(collective: str) -> Any:
    """The record of a call that begins now; None without a profiler."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    enter = torch.ops.profiler._record_function_enter_new
    return enter(f"unisono:{collective}", None)


def end_of(record: Any, *, elsewhere: bool) -> Callable[[], None]:
    """What to do when the call has ended, before its waiters are woken.

    The profiler calls asynchronous what ends on another thread than it began on.
    """
    future: Any = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, future)

    def end() -> None:
        if not elsewhere:
            future.set_result(None)
            return
        thread = threading.Thread(target=future.set_result, args=(None,))
        thread.start()
        thread.join()

    return end
