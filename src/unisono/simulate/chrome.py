"""A simulation as a trace in Chrome's format, for Perfetto or chrome://tracing.

Each rank is a process with two threads: what it sends, and what arrives. Messages are
slices with an arrow from one to the other; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from unisono.errors import BadArgument
from unisono.simulate.result import Result

MOST = 200_000
"""More messages than that no viewer shows."""


def to_chrome(result: Result) -> str:
    """The JSON text of a trace; BadArgument if there is nothing to show or too much."""
    line = result.timeline
    if line is None or line.src.size > MOST:
        count = result.messages or "no"
        raise BadArgument(
            f"trace of {result.algorithm} on {result.topology.name}: {count} messages "
            f"with times; expected up to {MOST} (fewer ranks, or steps or events)"
        )
    told = {
        "traceEvents": [*_names(result), *_slices(result)],
        "displayTimeUnit": "ns",
        "otherData": {
            "collective": result.collective.name,
            "algorithm": result.algorithm,
            "topology": result.topology.name,
            "bytes": result.nbytes,
            "fidelity": result.fidelity,
        },
    }
    return msgspec.json.encode(told).decode()


def _names(result: Result) -> Iterator[dict[str, object]]:
    for rank in range(result.topology.n):
        about = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": about}
        for thread, name in enumerate(("sends", "receives")):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": thread,
                "args": {"name": name},
            }


def _slices(result: Result) -> Iterator[dict[str, object]]:
    line = result.timeline
    assert line is not None
    columns = (line.step, line.src, line.dst, line.nbytes, line.start, line.end)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (step, src, dst, nbytes, start, end) in enumerate(rows):
        about = {"step": step, "src": src, "dst": dst, "bytes": nbytes}
        times = {"ts": start * 1e6, "dur": max(0.0, end - start) * 1e6}
        common = {"cat": "message", "ph": "X", "args": about, **times}
        yield {"name": f"to {dst}", "pid": src, "tid": 0, **common}
        yield {"name": f"from {src}", "pid": dst, "tid": 1, **common}
        arrow = {"name": "message", "cat": "message", "id": number}
        yield {**arrow, "ph": "s", "pid": src, "tid": 0, "ts": start * 1e6}
        ends = {"ph": "f", "bp": "e", "pid": dst, "tid": 1, "ts": end * 1e6}
        yield {**arrow, **ends}
