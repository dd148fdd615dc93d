"""A simulation as a trace in Chrome's format, for Perfetto or chrome://tracing.

Each rank is a process with two threads: what it sends, and what arrives. Messages are
slices with an arrow from one to the other; times are microseconds. What was measured
is written by the same sheet, so that both open side by side.
"""

from __future__ import annotations

import msgspec

from unisono.chrome import Sheet
from unisono.errors import BadArgument
from unisono.simulate.result import Result, Timeline

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
    sheet = Sheet()
    for rank in range(result.topology.n):
        sheet.rank(rank)
    _draw(sheet, result, line)
    document = sheet.document(
        distributedInfo={
            "backend": "unisono-simulation",
            "rank": 0,
            "world_size": result.topology.n,
        },
        otherData={
            "collective": result.collective.name,
            "algorithm": result.algorithm,
            "topology": result.topology.name,
            "bytes": result.nbytes,
            "fidelity": result.fidelity,
        },
    )
    return msgspec.json.encode(document).decode()


def _draw(sheet: Sheet, result: Result, line: Timeline) -> None:
    columns = (line.step, line.src, line.dst, line.nbytes, line.start, line.end)
    about = {"collective": result.collective.name, "algorithm": result.algorithm}
    for step, src, dst, nbytes, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        args = {**about, "step": step, "bytes": nbytes}
        begin, until = start * 1e6, end * 1e6
        sent = sheet.slice(
            src, "sends", f"to {dst}", begin, until, args={**args, "peer": dst}
        )
        came = sheet.slice(
            dst, "receives", f"from {src}", begin, until, args={**args, "peer": src}
        )
        sheet.arrow(sent, came, nbytes)
