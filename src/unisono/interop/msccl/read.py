"""Reading MSCCL XML: which step feeds which, and in what order all of them happen.

A step comes after the one before it in its block, after the step it waits for,
and, if it receives, after the send it is matched with. Its level is the longest such
chain. What is received at one level makes one step of ours. Where a slot is overwritten
between a send and its reception, the send is a copy into a temporary, as it is into the
runtime's buffers. Where two steps touch one slot of one rank, one of them writes, and
neither comes after the other, the file leaves open what happens, and is refused.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from unisono.errors import BadArgument
from unisono.interop.msccl.slots import OURS, Slots
from unisono.schedule.collective import Contract
from unisono.schedule.schedule import Schedule, from_steps
from unisono.schedule.step import Step, copy_step, reduce_step, together

SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rrc", "rcs", "rrs", "rrcs")
ADDS = ("rrc", "rrs", "rrcs")
LOCAL = ("cpy", "re")
MOST = 1 << 22
MOST_STEPS = 30_000


@dataclass(eq=False)
class _XmlStep:
    """One <step>, with the slots that it reads and writes on its rank."""

    where: str
    kind: str
    rank: int
    src: list[int]
    dst: list[int]
    before: list[_XmlStep] = field(default_factory=list)
    source: _XmlStep | None = None
    passes: list[int] = field(default_factory=list)
    level: int = -1

    @property
    def reads(self) -> list[int]:
        """The slots that it reads."""
        return self.src

    @property
    def writes(self) -> list[int]:
        """The slots that it writes."""
        return self.dst


def read(text: str) -> Schedule:
    """The schedule of a file, not verified."""
    try:
        root = ET.fromstring(text)
    except ET.ParseError as why:
        raise BadArgument(f"MSCCL: not XML: {why}") from why
    if root.tag != "algo":
        raise BadArgument(f"MSCCL: expected <algo>, got <{root.tag}>")
    coll = root.get("coll", "")
    if coll not in OURS:
        raise BadArgument(f"MSCCL: coll={coll!r}: expected one of {', '.join(OURS)}")
    gpus = root.findall("gpu")
    n = _number(root, "ngpus")
    if sorted(_number(gpu, "id") for gpu in gpus) != list(range(n)) or n < 1:
        raise BadArgument(
            f"MSCCL: ngpus={n}, but there are other <gpu> than 0..{n - 1}"
        )
    contract = Contract(OURS[coll], n, 0, _chunks(coll, gpus, n))
    program = _XmlProgram(Slots(contract))
    for gpu in gpus:
        program.add(gpu)
    steps = program.steps()
    return from_steps(
        contract.collective,
        n,
        steps,
        num_chunks=contract.num_chunks,
        num_temporaries=program.temporaries,
        name=root.get("name") or "msccl",
        about="Read from MSCCL XML.",
    )


def _chunks(coll: str, gpus: list[ET.Element], n: int) -> int:
    inputs = max(_number(gpu, "i_chunks") for gpu in gpus)
    outputs = max(_number(gpu, "o_chunks") for gpu in gpus)
    if coll == "alltoall":
        return n * max(inputs, outputs)
    return max(inputs, outputs)


def _number(element: ET.Element, name: str) -> int:
    text = element.get(name)
    try:
        number = int(text) if text is not None else None
    except ValueError:
        number = None
    if number is None or not -1 <= number <= MOST:
        raise BadArgument(f"MSCCL: <{element.tag}>: {name}={text!r}: expected a number")
    return number


class _XmlProgram:
    """All steps of all ranks, and how they hang together."""

    def __init__(self, slots: Slots) -> None:
        """Nothing is known yet."""
        self.slots = slots
        self.all: list[_XmlStep] = []
        self.sent: dict[tuple[int, int, int], list[_XmlStep]] = defaultdict(list)
        self.due: dict[tuple[int, int, int], list[_XmlStep]] = defaultdict(list)
        self.temporaries = 0

    def add(self, gpu: ET.Element) -> None:
        """The blocks of one rank, and what their steps wait for."""
        rank = _number(gpu, "id")
        self.temporaries = max(self.temporaries, _number(gpu, "s_chunks"))
        blocks: dict[int, list[tuple[ET.Element, _XmlStep]]] = {}
        for block in gpu.findall("tb"):
            number = _number(block, "id")
            where = f"gpu {rank}, block {number}"
            rows = [(step, self._step(step, rank, where)) for step in block]
            blocks[number] = rows
            for (_, earlier), (_, later) in pairwise(rows):
                later.before.append(earlier)
            self._connect(block, [step for _, step in rows], rank, where)
        for rows in blocks.values():
            for element, step in rows:
                _wait(element, step, blocks)
        if len(self.all) > MOST_STEPS:
            raise BadArgument(f"MSCCL: more than {MOST_STEPS} steps are not read")

    def _connect(
        self, block: ET.Element, steps: list[_XmlStep], rank: int, where: str
    ) -> None:
        """Put sends and receives in line with others on the same connection."""
        channel = _number(block, "chan")
        for step in steps:
            if step.kind in SENDS:
                peer = self._peer(block, "send", where)
                self.sent[rank, peer, channel].append(step)
            if step.kind in RECEIVES:
                peer = self._peer(block, "recv", where)
                self.due[peer, rank, channel].append(step)

    def _peer(self, block: ET.Element, name: str, where: str) -> int:
        peer = _number(block, name)
        if not 0 <= peer < self.slots.contract.n:
            raise BadArgument(f"MSCCL: {where}: {name}={peer}: there is no such gpu")
        return peer

    def _step(self, element: ET.Element, rank: int, where: str) -> _XmlStep:
        kind = element.get("type", "")
        where = f"{where}, step {element.get('s')}"
        if kind not in (*SENDS, *RECEIVES, *LOCAL, "nop"):
            raise BadArgument(f"MSCCL: {where}: type={kind!r} is none of MSCCL's")
        parsed = _XmlStep(where, kind, rank, [], [])
        if kind != "nop":
            count = _number(element, "cnt")
            uses_src = kind in ("s", "rrs", "rrc", "rrcs", *LOCAL)
            if uses_src:
                parsed.src = self._places(element, "src", rank, count)
            if kind not in ("s", "rrs"):
                parsed.dst = self._places(element, "dst", rank, count)
        if kind == "cpy":  # from input to output, which are one: nothing moves
            apart = [i for i, a in enumerate(parsed.src) if a != parsed.dst[i]]
            parsed.src = [parsed.src[i] for i in apart]
            parsed.dst = [parsed.dst[i] for i in apart]
        self.all.append(parsed)
        return parsed

    def _places(
        self, element: ET.Element, end: str, rank: int, count: int
    ) -> list[int]:
        buffer, place = element.get(f"{end}buf", ""), _number(element, f"{end}off")
        if buffer not in ("i", "o", "s") or place < 0:
            raise BadArgument(f"MSCCL: gpu {rank}: no such place {buffer}[{place}]")
        return [self.slots.slot(rank, buffer, place + k) for k in range(count)]

    def steps(self) -> list[Step]:
        """The transfers, level by level."""
        self._match()
        order = self._level()
        _refuse_races(order)
        written: dict[tuple[int, int], list[int]] = defaultdict(list)
        for step in order:
            for slot in step.writes:
                written[step.rank, slot] += [2 * step.level, 2 * step.level + 1]
        levels: dict[int, list[Step]] = defaultdict(list)
        for step in order:
            for at, transfer in self._transfers(step, written):
                levels[at].append(transfer)
        return [together(levels[at]) for at in sorted(levels)]

    def _match(self) -> None:
        for key in {*self.sent, *self.due}:
            sent, due = self.sent[key], self.due[key]
            if len(sent) != len(due):
                raise BadArgument(
                    f"MSCCL: gpu {key[0]} sends {len(sent)} times to gpu {key[1]}, "
                    f"which receives {len(due)} times"
                )
            for one, other in zip(sent, due, strict=True):
                other.source = one
                other.before.append(one)

    def _level(self) -> list[_XmlStep]:
        """Each step after all it waits for, in this order; a circle is a deadlock."""
        after: dict[int, list[_XmlStep]] = defaultdict(list)
        open_ = {id(step): len(step.before) for step in self.all}
        for step in self.all:
            for earlier in step.before:
                after[id(earlier)].append(step)
        ready = [step for step in self.all if not step.before]
        order = []
        while ready:
            step = ready.pop()
            order.append(step)
            step.level = 1 + max((s.level for s in step.before), default=-1)
            for later in after[id(step)]:
                open_[id(later)] -= 1
                if not open_[id(later)]:
                    ready.append(later)
        if len(order) < len(self.all):
            stuck = next(step for step in self.all if open_[id(step)] > 0)
            raise BadArgument(f"MSCCL: {stuck.where}: waits for itself: a deadlock")
        return sorted(order, key=lambda step: step.level)

    def _transfers(
        self, step: _XmlStep, written: Mapping[tuple[int, int], list[int]]
    ) -> Iterator[tuple[int, Step]]:
        """What a step moves, with its time: two for each level, the first for copies
        that it needs.
        """
        at, rank = 2 * step.level + 1, step.rank
        if step.kind in LOCAL:
            yield from _moved(at, step.kind == "re", rank, step.src, rank, step.dst)
        if step.source is None:
            return
        sender = step.source
        leaves, target = self._leaves(sender), step.dst
        if step.kind == "rrs":
            target = self._leaves(step)
        if len(leaves) != len(target):
            raise BadArgument(
                f"MSCCL: {step.where}: takes {len(target)} chunks, {len(leaves)} are "
                "sent"
            )
        left = 2 * sender.level + 1
        if any(left < w < at for slot in leaves for w in written[sender.rank, slot]):
            kept = self._aside(len(leaves))
            yield from _moved(left + 1, False, sender.rank, leaves, sender.rank, kept)
            leaves = kept
        adds = step.kind in ADDS
        if adds:  # to what is there, in a place of its own
            yield from _moved(at - 1, False, rank, step.src, rank, target)
        yield from _moved(at, adds, sender.rank, leaves, rank, target)

    def _leaves(self, step: _XmlStep) -> list[int]:
        """The slots that a send takes its data from."""
        if step.kind == "rrs":  # the sum is kept nowhere: a place of its own for it
            step.passes = step.passes or self._aside(len(step.src))
            return step.passes
        return step.src if step.kind == "s" else step.dst

    def _aside(self, count: int) -> list[int]:
        """Temporaries that nothing else uses."""
        first = self.slots.contract.num_chunks + self.temporaries
        self.temporaries += count
        return list(range(first, first + count))


def _moved(
    at: int, adds: bool, src: int, from_: list[int], dst: int, into: list[int]
) -> Iterator[tuple[int, Step]]:
    """A transfer at a time, unless a slot would be copied onto itself."""
    pairs = [(a, b) for a, b in zip(from_, into, strict=True) if src != dst or a != b]
    if pairs:
        move = reduce_step if adds else copy_step
        yield at, move([a for a, _ in pairs], src, dst, into=[b for _, b in pairs])


def _wait(
    element: ET.Element,
    step: _XmlStep,
    blocks: Mapping[int, list[tuple[ET.Element, _XmlStep]]],
) -> None:
    """Note what a step waits for."""
    number, place = _number(element, "depid"), _number(element, "deps")
    if number < 0:
        return
    if number not in blocks or not 0 <= place < len(blocks[number]):
        raise BadArgument(
            f"MSCCL: {step.where}: waits for step {place} of block {number}, which "
            "does not exist"
        )
    step.before.append(blocks[number][place][1])


def _refuse_races(order: list[_XmlStep]) -> None:
    """Of two steps that touch a slot and do not both read it, one comes first."""
    past: dict[int, int] = {}  # for each step a bit for every one that comes before
    wrote: dict[tuple[int, int], _XmlStep] = {}
    read: dict[tuple[int, int], list[_XmlStep]] = defaultdict(list)
    bit = {id(step): 1 << i for i, step in enumerate(order)}
    for step in order:
        mask = 0
        for earlier in step.before:
            mask |= past[id(earlier)] | bit[id(earlier)]
        past[id(step)] = mask
        touched = [(slot, [wrote.get((step.rank, slot))]) for slot in step.reads]
        for slot in step.writes:
            place = step.rank, slot
            touched.append((slot, [wrote.get(place), *read[place]]))
        for slot, others in touched:
            for other in others:
                if (
                    other is not None
                    and other is not step
                    and not mask & bit[id(other)]
                ):
                    raise BadArgument(
                        f"MSCCL: {step.where} and {other.where} touch slot {slot}, and "
                        "neither waits for the other"
                    )
        for slot in step.writes:
            wrote[step.rank, slot] = step
            read[step.rank, slot].clear()
        for slot in step.reads:
            read[step.rank, slot].append(step)
