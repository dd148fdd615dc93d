"""One file for all ranks: parts put together, written, read, and looked over.

merge(parts)          the document, with the keys that Kineto's has
write(doc, path)      JSON, packed if the name ends in .gz
read(path)            from a file, or from the folder where ranks left their parts
faults(doc)           what a strict reader would complain of; nothing, one hopes
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unisono.errors import BadArgument
from unisono.results import write_or_keep
from unisono.runtime.observe.tracing import SUFFIX, TracePart, read_part
from unisono.trace.draw import draw

Document = dict[str, Any]
"""A trace as it is in its file: the JSON of Chrome's trace format."""

Span = tuple[int, int]


def merge(parts: Sequence[TracePart]) -> Document:
    """What all ranks recorded, on rank 0's clock."""
    if not parts:
        raise BadArgument("merge: no parts of a trace, so there is nothing to show")
    sheet, base = draw(parts)
    first = min(parts, key=lambda p: p.rank)
    return sheet.document(
        baseTimeNanoseconds=base + first.wall,
        displayTimeUnit="ns",
        traceName="unisono",
        distributedInfo=_world(parts, first),
        otherData={
            "ranks": sorted(part.rank for part in parts),
            "lost_calls": {p.rank: p.lost[0] for p in parts if p.lost[0]},
            "lost_moments": {p.rank: p.lost[1] for p in parts if p.lost[1]},
            "clock_doubt_ns": {p.rank: p.clock[1] for p in parts if p.clock[1]},
        },
    )


def _world(parts: Sequence[TracePart], first: TracePart) -> dict[str, object]:
    groups = {g.agreed: g for part in parts for g in part.groups.values()}
    return {
        "backend": "unisono",
        "rank": first.rank,
        "world_size": first.world_size,
        "pg_count": len(groups),
        "pg_config": [
            {
                "pg_name": str(group.agreed),
                "pg_desc": group.name,
                "backend_config": "cpu:unisono",
                "pg_size": len(group.ranks),
                "ranks": group.ranks,
            }
            for group in groups.values()
        ],
    }


def write(doc: Document, path: Path) -> None:
    """Write the file, or keep it elsewhere: then BadArgument says where."""
    text = msgspec.json.encode(doc)
    data = gzip.compress(text, 5) if path.suffix == ".gz" else text

    def write_there(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    write_or_keep(path, write_there)


def per_rank(doc: Document) -> dict[int, Document]:
    """The same as a document for each rank, as analysers of many ranks want them.

    Arrows between ranks have no place there.
    """
    documents: dict[int, Document] = {}
    for rank in sorted({event["pid"] for event in doc["traceEvents"]}):
        mine = [
            event
            for event in doc["traceEvents"]
            if event["pid"] == rank and event["ph"] not in ("s", "f")
        ]
        world = {**doc.get("distributedInfo", {}), "rank": rank}
        documents[rank] = {**doc, "distributedInfo": world, "traceEvents": mine}
    return documents


def read_parts(folder: Path) -> list[TracePart]:
    """The parts in a folder, by rank."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise BadArgument(
            f"{folder}: no parts of a trace there (*{SUFFIX}); "
            "record one with unisono trace run, or with UNISONO_TRACE=folder"
        )
    return sorted((read_part(file) for file in files), key=lambda part: part.rank)


def read(path: Path) -> Document:
    """A trace from a file, or from the folder where the ranks left theirs."""
    if path.is_dir():
        return merge(read_parts(path))
    try:
        text = path.read_bytes()
        if text[:2] == b"\x1f\x8b":
            text = gzip.decompress(text)
        doc = msgspec.json.decode(text)
    except OSError as why:
        raise BadArgument(f"{path}: cannot be read: {why}") from why
    except (msgspec.DecodeError, EOFError, zlib.error) as why:
        raise BadArgument(f"{path}: not a trace in JSON: {why}") from why
    if not isinstance(doc, dict) or not isinstance(doc.get("traceEvents"), list):
        raise BadArgument(f"{path}: JSON, but no trace: it has no traceEvents")
    return doc


def faults(doc: Document) -> list[str]:
    """What is wrong with a trace by the rules of Chrome's format and of Perfetto.

    Slices of a thread nest and last, flows come in pairs that hold on to slices, and
    counters do not fall below nothing.
    """
    events = doc["traceEvents"]
    threads: dict[tuple[int, int], list[Span]] = defaultdict(list)
    faults = []
    for event in events:
        if event["ph"] == "X":
            span = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
            threads[event["pid"], event["tid"]].append(span)
            if not event["dur"] > 0 or event["ts"] < 0:
                faults.append(f"{event['name']} at {event['ts']} lasts {event['dur']}")
        elif event["ph"] == "C" and event["args"]["bytes"] < 0:
            faults.append(f"{event['name']} of rank {event['pid']} below nothing")
    for where, spans in threads.items():
        faults.extend(f"{where}: {fault}" for fault in _crossed(spans))
    faults.extend(_loose_ends(events, threads))
    return faults


def _ns(us: float) -> int:
    return round(us * 1e3)


def _crossed(spans: list[Span]) -> Iterator[str]:
    """Slices that overlap without one being inside the other."""
    ends: list[int] = []
    for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end > ends[-1]:
            times = f"{begin} to {end} ns"
            yield f"a slice from {times} crosses one that ends at {ends[-1]}"
        ends.append(end)


def _loose_ends(
    events: Sequence[dict[str, Any]],
    threads: dict[tuple[int, int], list[Span]],
) -> Iterator[str]:
    """Flows without a partner, or outside every slice of their thread."""
    flows: dict[object, list[str]] = defaultdict(list)
    begins = {where: sorted(spans) for where, spans in threads.items()}
    for event in events:
        if event["ph"] not in ("s", "f"):
            continue
        flows[event["id"]].append(event["ph"])
        spans = begins.get((event["pid"], event["tid"]), [])
        if not _within(spans, _ns(event["ts"])):
            yield f"flow {event['id']}, {event['ph']}: no slice at {event['ts']}"
    for number, ends in flows.items():
        if sorted(ends) != ["f", "s"]:
            yield f"flow {number} has the ends {ends}"


def _within(spans: list[Span], at: int) -> bool:
    """Whether a slice is open at this time."""
    return any(begin <= at < end for begin, end in spans if begin <= at)
