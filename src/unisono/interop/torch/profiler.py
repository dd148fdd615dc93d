"""torch's profiler with unisono's trace: its ranges and operators on the same clock.

    from unisono.interop.torch.profiler import profiled

    with profiled():                              torch's own profiler, on the CPU
        with torch.profiler.record_function("forward"):
            loss = model(x)

What it saw on this rank is shown in the lanes "ranges" of the next trace that is
written (`unisono.trace`). torch tells times of day; they are turned into the clock that
all ranks of a host share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

from unisono.runtime.observe.tracing import Span, add_span, time_of_day

_KINDS = ("user_annotation", "cpu_op")


@contextmanager
def profiled(*, operators: bool = True, **options: Any) -> Iterator[profile]:
    """Run torch's profiler, and keep what it saw for the trace.

    Without `operators` only ranges that the user named are kept. `options` are those of
    torch.profiler.profile, which is what is yielded.
    """
    options.setdefault("activities", [ProfilerActivity.CPU])
    with profile(**options) as seen:
        yield seen
    wall = time_of_day()
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    for event in results.events() if results is not None else ():
        kind = event.activity_type()
        if kind not in _KINDS[: 1 + operators]:
            continue
        begin = event.start_ns() - wall
        thread = f"torch {event.start_thread_id()}"
        end = begin + event.duration_ns()
        add_span(Span(event.name(), begin, end, thread, kind))
