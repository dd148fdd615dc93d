"""Schedules as MSCCL XML: written for Microsoft's runtime, read and verified from it.

    algo   the collective, the number of GPUs, of chunks
    gpu    one rank: how many chunks its input, output and scratch have
    tb     a thread block: at most one peer to send to and one to receive from, on a
           channel; its steps run one after the other
    step   s send, r receive, rrc receive and add, cpy and re the same locally, rcs, rrs
           and rrcs receive and pass on; each may wait for a step of another block

We write one block for each peer that a rank sends to, and one for each that it receives
from. What a step waits for follows from the slots it touches. We read any file; sends
and receives are matched in their order, and steps are as early as what they wait for
allows. Buffers are taken as in place: input and output of an all_reduce are one, the
input of an all_gather is a part of its output, and so on.

The format is that of msccl-tools; see github.com/microsoft/msccl and Cowan et al.,
"MSCCLang: Microsoft collective communication language", ASPLOS 2023.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import BadArgument, NotOffered
from unisono.interop.msccl.read import read
from unisono.interop.msccl.slots import NAMES, Slots
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, Transfer

Slot = tuple[str, int]
"""A buffer ("i", "o" or "s") and a place in it."""


@dataclass(eq=False)
class _BlockStep:
    """One step of a thread block."""

    kind: str
    src: Slot
    dst: Slot
    count: int
    waits: list[tuple[int, int]] = field(default_factory=list)
    awaited: bool = False


@dataclass(eq=False)
class _RankBlocks:
    """The thread blocks of one rank, and who touched each slot last."""

    blocks: dict[tuple[int, int], list[_BlockStep]] = field(default_factory=dict)
    wrote: dict[Slot, list[tuple[int, int]]] = field(default_factory=dict)
    read: dict[Slot, list[tuple[int, int]]] = field(default_factory=dict)

    def add(
        self, peers: tuple[int, int], op: _BlockStep, waits: set[tuple[int, int]]
    ) -> None:
        """Append a step to the block with these peers, behind all it waits for."""
        mine = self.blocks.setdefault(peers, [])
        number = list(self.blocks).index(peers)
        op.waits = sorted(w for w in waits if w[0] != number)
        for block, step in op.waits:
            self.ops(block)[step].awaited = True
        # A step can wait for one other only; more are waited for by steps before it.
        mine.extend(
            _BlockStep("nop", ("i", 0), ("i", 0), 0, [w]) for w in op.waits[:-1]
        )
        op.waits = op.waits[-1:]
        mine.append(op)

    def act(
        self,
        peers: tuple[int, int],
        op: _BlockStep,
        reads: Slot | None,
        writes: Slot | None,
    ) -> None:
        """Add a step that waits for all who wrote what it reads or touched what it
        writes.
        """
        sources = _span(reads, op.count) if reads else []
        targets = _span(writes, op.count) if writes else []
        waits = {w for slot in (*sources, *targets) for w in self.wrote.get(slot, ())}
        waits |= {w for slot in targets for w in self.read.get(slot, ())}
        self.add(peers, op, waits)
        place = list(self.blocks).index(peers), len(self.blocks[peers]) - 1
        for slot in targets:
            self.wrote[slot], self.read[slot] = [place], []
        for slot in sources:
            self.read.setdefault(slot, []).append(place)

    def ops(self, number: int) -> list[_BlockStep]:
        """The steps of the block with this number."""
        return list(self.blocks.values())[number]


def dumps(schedule: Schedule, *, protocol: str = "Simple") -> str:
    """The schedule, once verified, as MSCCL XML."""
    if schedule.collective.name not in NAMES:
        known = ", ".join(NAMES)
        raise NotOffered(f"MSCCL has no {schedule.collective.name}; it has {known}")
    if schedule.root:
        raise NotOffered("MSCCL's collectives have rank 0 as their root")
    schedule.verify()
    slots = Slots(schedule.contract)
    gpus = [_RankBlocks() for _ in range(schedule.n)]
    for step in schedule:
        _lower(step, slots, gpus)
    root = ET.Element("algo", _head(schedule, slots, protocol))
    for rank, gpu in enumerate(gpus):
        inputs, outputs = slots.sizes
        sizes = {
            "i_chunks": inputs,
            "o_chunks": outputs,
            "s_chunks": slots.scratch[rank],
        }
        attributes = {"id": str(rank)} | {
            key: str(value) for key, value in sizes.items()
        }
        root.append(_element(ET.Element("gpu", attributes), gpu))
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode") + "\n"
    read(text).verify()  # what others will run is proven, not only what it came from
    return text


def save(schedule: Schedule, path: Path) -> None:
    """Write the schedule to a file."""
    path.write_text(dumps(schedule), encoding="utf-8")


def loads(text: str, *, verify: bool = True) -> Schedule:
    """The schedule that MSCCL XML describes, verified."""
    schedule = read(text)
    if verify:
        schedule.verify()
    return schedule


def load(path: Path, *, verify: bool = True) -> Schedule:
    """Read a schedule from a file, and verify it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise BadArgument(f"{path}: cannot be read: {why}") from why
    return loads(text, verify=verify)


def _lower(step: Step, slots: Slots, gpus: list[_RankBlocks]) -> None:
    """All sends of a step, then what stays on its rank, then all receives.

    So everything is read before it is written. Several that add to one slot wait for
    each other.
    """
    runs = list(_runs(step, slots))
    for run, src, dst in runs:
        if run.src != run.dst:
            gpus[run.src].act(
                (run.dst, -1), _BlockStep("s", src, dst, run.count), src, None
            )
    for run, src, dst in runs:
        if run.src == run.dst:
            kind = "re" if run.reduces else "cpy"
            gpus[run.src].act((-1, -1), _BlockStep(kind, src, dst, run.count), src, dst)
    for run, _, dst in runs:
        if run.src != run.dst:
            kind = "rrc" if run.reduces else "r"
            gpus[run.dst].act(
                (-1, run.src), _BlockStep(kind, dst, dst, run.count), None, dst
            )


@dataclass(frozen=True)
class _ChunkRun:
    """Transfers with the same ends, of chunks that lie side by side on both."""

    src: int
    dst: int
    reduces: bool
    count: int


def _runs(step: Step, slots: Slots) -> Iterator[tuple[_ChunkRun, Slot, Slot]]:
    begun: tuple[Transfer, Slot, Slot] | None = None
    count = 0
    for t in sorted(step, key=lambda t: (t.src, t.dst, t.reduces, t.chunk)):
        src, dst = slots.place(t.src, t.chunk), slots.place(t.dst, t.into)
        if begun is not None:
            first, a, b = begun
            same = (first.src, first.dst, first.reduces) == (t.src, t.dst, t.reduces)
            if same and src == (a[0], a[1] + count) and dst == (b[0], b[1] + count):
                count += 1
                continue
            yield _ChunkRun(first.src, first.dst, first.reduces, count), a, b
        begun, count = (t, src, dst), 1
    if begun is not None:
        first, a, b = begun
        yield _ChunkRun(first.src, first.dst, first.reduces, count), a, b


def _span(slot: Slot, count: int) -> list[Slot]:
    return [(slot[0], slot[1] + k) for k in range(count)]


def _head(schedule: Schedule, slots: Slots, protocol: str) -> dict[str, str]:
    return {
        "name": schedule.name,
        "proto": protocol,
        "nchannels": "1",
        "nchunksperloop": str(max(slots.sizes)),
        "ngpus": str(schedule.n),
        "coll": NAMES[schedule.collective.name],
        "inplace": "0" if schedule.collective.name == "all_to_all" else "1",
    }


def _element(element: ET.Element, gpu: _RankBlocks) -> ET.Element:
    for number, ((send, recv), ops) in enumerate(gpu.blocks.items()):
        peers = {"id": number, "send": send, "recv": recv, "chan": 0}
        block = ET.SubElement(element, "tb", {k: str(v) for k, v in peers.items()})
        for place, op in enumerate(ops):
            wait = op.waits[0] if op.waits else (-1, -1)
            attributes: dict[str, object] = {"s": place, "type": op.kind}
            attributes |= {"srcbuf": op.src[0], "srcoff": op.src[1]}
            attributes |= {"dstbuf": op.dst[0], "dstoff": op.dst[1], "cnt": op.count}
            attributes |= {"depid": wait[0], "deps": wait[1], "hasdep": int(op.awaited)}
            ET.SubElement(block, "step", {k: str(v) for k, v in attributes.items()})
    return element
