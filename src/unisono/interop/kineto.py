"""Collectives of PyTorch's profiler (Kineto), and of others in Chrome's form.

A collective is an event with the argument `Collective name`: a kernel of NCCL on a GPU,
or without a GPU a call of PyTorch or of this library. Gloo's calls (`gloo:all_reduce`)
have a size only if the profiler ran with `record_shapes=True`.

    trace = kineto.load("step.pt.trace.json.gz")
    trace.calls, trace.seconds
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from unisono.errors import BadArgument

NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
}
"""Collectives by how others call them, without underscores and "coalesced"."""
SIZES = {
    **dict.fromkeys(("double", "long", "float64", "int64", "longint"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "c10::bfloat16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8"), 1),
}
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Call:
    """A collective of one rank: what, how much, for how long, and what hid it."""

    collective: str
    nbytes: int
    itemsize: int
    ranks: int
    """Ranks of its group; 0 if that is not known."""
    stride: int
    """How far apart these are."""
    seconds: float
    hidden: float = 0.0
    """Seconds of it during which this rank computed."""


@dataclass(frozen=True)
class ForeignTrace:
    """What is used of a trace: its collectives, and the time from begin to end."""

    calls: tuple[Call, ...]
    seconds: float
    left_out: int = 0
    """Collectives of which the size or the meaning is not known."""

    def with_times(self, seconds: list[float]) -> float:
        """The time if collectives took so long; what hid them hides them still."""
        before = sum(max(0.0, c.seconds - c.hidden) for c in self.calls)
        pairs = zip(self.calls, seconds, strict=True)
        after = sum(max(0.0, new - call.hidden) for call, new in pairs)
        return self.seconds - before + after


def load(path: Path | str) -> ForeignTrace:
    """The collectives of a trace of one rank, in .json or .json.gz."""
    path = Path(path)
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(data)
    except (OSError, EOFError, ValueError) as broken:
        raise BadArgument(f"{path}: not a trace in Chrome's form: {broken}") from broken
    listed = document if isinstance(document, list) else document.get("traceEvents", [])
    events = [e for e in listed if e.get("ph") == "X" and "dur" in e]
    if not events:
        raise BadArgument(f"{path}: there are no events with a duration in this trace")
    info = {} if isinstance(document, list) else document.get("distributedInfo") or {}
    return _trace(events, int(info.get("world_size", 0)))


def _trace(events: list[dict[str, Any]], world: int) -> ForeignTrace:
    called = [e for e in events if _name(e)]
    kernels = [e for e in called if e.get("cat") == "kernel"]
    called = kernels or called
    threads = {(e.get("pid"), e.get("tid")) for e in called}
    others = [e for e in events if not _name(e) and _computes(e, bool(kernels))]
    if not kernels:  # what a thread that communicates does is part of that
        others = [e for e in others if (e.get("pid"), e.get("tid")) not in threads]
    busy = _union([(e["ts"], e["ts"] + e["dur"]) for e in others])
    calls = [_call(e, world, busy) for e in called]
    known = tuple(call for call in calls if call is not None)
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in (*called, *others)] or [(0, 0)]
    span = max(end for _, end in ends) - min(start for start, _ in ends)
    return ForeignTrace(known, span / 1e6, len(calls) - len(known))


def _name(event: dict[str, Any]) -> str:
    """The collective of an event as it is written there; empty if it is none."""
    named = event.get("args", {}).get("Collective name")
    if named:
        return str(named)
    match = re.fullmatch(r"gloo:(\w+)", str(event.get("name", "")))
    return match[1] if match else ""


def _computes(event: dict[str, Any], on_gpu: bool) -> bool:
    if on_gpu:
        return event.get("cat") in _WORK
    return event.get("cat") == "cpu_op" and not event["name"].startswith("c10d::")


def _call(
    event: dict[str, Any], world: int, busy: list[tuple[float, float]]
) -> Call | None:
    args = event.get("args", {})
    plain = re.sub("_|coalesced", "", _name(event)).lower()
    collective = NAMES.get(plain)
    dtype = str(args.get("dtype", "") or next(iter(args.get("Input type", [])), ""))
    itemsize = SIZES.get(dtype.lower(), 0)
    elements = _elements(args, collective or "", world)
    if collective is None or not itemsize or not elements:
        return None
    listed = [int(r) for r in re.findall(r"\d+", str(args.get("Process Group Ranks")))]
    start, end = event["ts"], event["ts"] + event["dur"]
    hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
    return Call(
        collective,
        elements * itemsize,
        itemsize,
        int(args.get("Group size", 0)) or len(listed) or world,
        listed[1] - listed[0] if len(listed) > 1 else 1,
        event["dur"] / 1e6,
        hidden / 1e6,
    )


def _elements(args: dict[str, Any], collective: str, world: int) -> int:
    """Elements of a rank's whole buffer: of an all_gather, what it ends with."""
    which = "Out msg nelems" if collective == "all_gather" else "In msg nelems"
    if which in args:
        return int(args[which])
    shape: Any = next(iter(args.get("Input Dims", [])), [])
    while shape and isinstance(shape[0], list):
        shape = shape[0]
    times = world if collective == "all_gather" else 1
    return prod(shape) * times if shape else 0


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
