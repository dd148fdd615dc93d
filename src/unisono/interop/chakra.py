"""Chakra execution traces: read any, and write schedules for ASTRA-sim.

A file has the trace of one rank: a message with the version, then one for each node,
each after its length. Nodes compute, send, receive or take part in a collective, and
wait for other nodes of the file. Which node was called by which is another matter: an
operator may wait for a kernel that it has started. The numbers of fields and kinds are
those of the schema of MLCommons (et_def.proto, version 0.0.4). They are few, so
protobuf is read and written here, without its library.

    nodes = chakra.load("step.0.et")
    chakra.save(schedule, "ring", nbytes=1 << 20)      ring.0.et, ring.1.et, ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import BadArgument, whole_number
from unisono.schedule.schedule import Schedule

VERSION = "0.0.4"
"""Of the schema, as it is written into files."""
KINDS = (
    "invalid",
    "metadata",
    "load",
    "store",
    "compute",
    "send",
    "recv",
    "collective",
)
"""What a node does, by the number of its type; others are read as "other"."""
COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast"),
    *("all_to_all", "reduce_scatter", "reduce_scatter", "barrier"),
)
"""By the number of `comm_type`."""
TYPES = {
    "double": 3,
    "float": 5,
    "int32": 7,
    "int64": 9,
    "uint32": 11,
    "uint64": 13,
    "sint32": 15,
    "sint64": 17,
    "fixed32": 19,
    "fixed64": 21,
    "sfixed32": 23,
    "sfixed64": 25,
    "bool": 27,
    "string": 29,
}
"""The types of values, and the field of an attribute that holds a value of each."""
USUAL_TYPES = {
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag", "comm_priority"), "int32"),
    "tensor_size": "uint64",
}
"""Whole numbers that are not int64. Who reads one in another field finds 0."""
_TYPE_OF = {number: name for name, number in TYPES.items()}
_FORMATS = {"double": "<d", "float": "<f", "fixed32": "<I", "fixed64": "<Q"} | {
    "sfixed32": "<i",
    "sfixed64": "<q",
}

Value = int | float | bool | str
"""Of an attribute; lists are not read."""
Attributes = dict[str, Value]
"""What is known of a node, by name."""


@dataclass(frozen=True)
class ChakraNode:
    """One node: what it does, what it waits for, and for how long it ran."""

    id: int
    name: str
    kind: str
    after: tuple[int, ...] = ()
    """Nodes whose end it waits for: `data_deps`."""
    start: float = 0.0
    seconds: float = 0.0
    attributes: Attributes = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    """Of `attributes`, in `TYPES`, where it is not what `type_of` tells."""
    parents: tuple[int, ...] = ()
    """Nodes that called it: `ctrl_deps`. It does not wait for their end."""
    unread: bytes = b""
    """What is not told here, as it is in the file: lists, inputs, outputs."""


def type_of(name: str, value: Value) -> str:
    """The type that an attribute is written as if its node names no other."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return USUAL_TYPES.get(name, "int64")
    return "double" if isinstance(value, float) else "string"


def load(path: Path | str) -> list[ChakraNode]:
    """The nodes of a file, in its order."""
    path = Path(path)
    try:
        parts = list(_delimited(path.read_bytes()))
        return [_node(part) for part in parts[1:]]
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as broken:
        raise BadArgument(
            f"{path}: this is not a Chakra execution trace, or it is cut ({broken})"
        ) from broken


def dumps(nodes: list[ChakraNode]) -> bytes:
    """Nodes as the bytes of a file."""
    parts = [_text(1, VERSION), *(_node_bytes(node) for node in nodes)]
    return b"".join(_varint(len(part)) + part for part in parts)


def save(schedule: Schedule, stem: Path | str, nbytes: int) -> list[Path]:
    """Write a schedule, once verified, as one file for each rank: STEM.RANK.et.

    Each message is a send on one rank and a receive on another, with a tag of its own.
    What waits for what follows from the schedule's dependencies, each written on the
    rank where it can be.
    """
    written = []
    for rank, nodes in enumerate(nodes_of(schedule, nbytes)):
        path = Path(f"{stem}.{rank}.et")
        path.write_bytes(dumps(nodes))
        written.append(path)
    return written


def nodes_of(schedule: Schedule, nbytes: int) -> list[list[ChakraNode]]:
    """The nodes of each rank, as `save` writes them."""
    if whole_number("nbytes", nbytes) < 0:
        raise BadArgument(f"nbytes = {nbytes}: cannot be negative")
    schedule.verify()
    size = schedule.contract.chunk_sizes(nbytes).tolist()
    number: dict[tuple[int, int, int], int] = {}
    sent: list[int] = []
    owner: list[int] = []
    for at, step in enumerate(schedule):
        for t in step:
            message = number.setdefault((at, t.src, t.dst), len(number))
            if message == len(sent):
                sent.append(0)
            sent[message] += size[t.chunk % len(size)]
            owner.append(message)
    waits: dict[int, set[int]] = {}
    due = schedule.dependencies()
    for before, after in zip(due.before.tolist(), due.after.tolist(), strict=True):
        waits.setdefault(owner[after], set()).add(owner[before])
    ends = [(src, dst) for _, src, dst in number]
    nodes: list[list[ChakraNode]] = [[] for _ in range(schedule.n)]
    for message, (src, dst) in enumerate(ends):
        for rank in dict.fromkeys((src, dst)):
            before = (m for m in waits.get(message, ()) if rank in ends[m])
            after = tuple(sorted(before))
            nodes[rank].append(_message(message, src, dst, rank, sent[message], after))
    return nodes


def _message(
    number: int, src: int, dst: int, rank: int, nbytes: int, after: tuple[int, ...]
) -> ChakraNode:
    """What one message is on a rank; what stays there is computing."""
    kind = "compute" if src == dst else "send" if rank == src else "recv"
    facts: Attributes = {"is_cpu_op": False}
    if src == dst:
        facts |= {"num_ops": 0, "tensor_size": nbytes}
    else:
        facts |= {"comm_src": src, "comm_dst": dst, "comm_tag": number}
        facts |= {"comm_size": nbytes}
    name = f"{kind} {number}: {src} to {dst}"
    return ChakraNode(number, name, kind, after, attributes=facts)


# --- protobuf


def _node(part: bytes) -> ChakraNode:
    facts: Attributes = {}
    types: dict[str, str] = {}
    found: dict[int, int] = {}
    name, unread = "", b""
    others: dict[int, list[int]] = {4: [], 5: []}
    for number, value in _fields(part):
        if number == 2 and isinstance(value, bytes):
            name = value.decode()
        elif number in others:
            others[number] += [value] if isinstance(value, int) else _varints(value)
        elif number == 10 and isinstance(value, bytes):
            if (read := _attribute(value)) is None:
                unread += _text(number, value)
            else:
                what, types[what], facts[what] = read
        elif number in (8, 9) and isinstance(value, bytes):
            unread += _text(number, value)
        elif isinstance(value, int):
            found[number] = value
    kind = found.get(3, 0)
    return ChakraNode(
        found.get(1, 0),
        name,
        KINDS[kind] if kind < len(KINDS) else "other",
        tuple(others[5]),
        found.get(6, 0) / 1e6,
        found.get(7, 0) / 1e6,
        facts,
        {
            name: kind
            for name, kind in types.items()
            if kind != type_of(name, facts[name])
        },
        tuple(others[4]),
        unread,
    )


def _attribute(part: bytes) -> tuple[str, str, Value] | None:
    """A name, the type of its value, and that; nothing for a list."""
    name, found = "", list[tuple[str, Value]]()
    for number, value in _fields(part):
        if number == 1 and isinstance(value, bytes):
            name = value.decode()
        elif number in _TYPE_OF:
            kind = _TYPE_OF[number]
            found = [(kind, _value(kind, value))]
    return (name, *found[0]) if found else None


def _value(kind: str, value: int | bytes) -> Value:
    if isinstance(value, int) == (kind in _FORMATS or kind == "string"):
        raise ValueError(f"a value of type {kind} in the form of another")
    if isinstance(value, int):
        return bool(value) if kind == "bool" else _number(kind, value)
    if kind == "string":
        return value.decode()
    found: int | float = struct.unpack(_FORMATS[kind], value)[0]
    return found


def _number(kind: str, value: int) -> int:
    if kind in ("sint32", "sint64"):
        return value >> 1 ^ -(value & 1)
    if kind in ("int32", "int64") and value >= 1 << 63:
        return value - (1 << 64)
    return value


def _fields(part: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: numbers as they are, all else as bytes."""
    at = 0
    while at < len(part):
        key, at = _read_varint(part, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(part, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError(f"a field of the unknown kind {kind}")
            size, at = _read_varint(part, at)
        if at + size > len(part):
            raise ValueError("a field goes beyond the end")
        yield key >> 3, part[at : at + size]
        at += size


def _delimited(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = _read_varint(data, at)
        if at + size > len(data):
            raise ValueError("a message goes beyond the end")
        yield data[at : at + size]
        at += size


def _varints(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number has too many bytes")


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(number: int, text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _whole(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value) if value else b""


def _list(number: int, values: tuple[int, ...]) -> bytes:
    data = b"".join(_varint(value) for value in values)
    return _text(number, data) if data else b""


def _node_bytes(node: ChakraNode) -> bytes:
    parts = [
        _whole(1, node.id),
        _text(2, node.name) if node.name else b"",
        _whole(3, KINDS.index(node.kind)),
        _list(4, node.parents),
        _list(5, node.after),
        _whole(6, round(node.start * 1e6)),
        _whole(7, round(node.seconds * 1e6)),
        node.unread,
        *(_text(10, one) for one in _attributes_bytes(node)),
    ]
    return b"".join(parts)


def _attributes_bytes(node: ChakraNode) -> Iterator[bytes]:
    for name, value in node.attributes.items():
        kind = node.types.get(name) or type_of(name, value)
        yield _attribute_bytes(name, kind, value)


def _attribute_bytes(name: str, kind: str, value: Value) -> bytes:
    number = TYPES.get(kind)
    try:
        if number is None:
            raise ValueError(f"there is no type {kind!r}")
        return _text(1, name) + _value_bytes(number, kind, value)
    except (struct.error, OverflowError, ValueError) as wrong:
        raise BadArgument(
            f"chakra: the attribute {name} = {value!r} cannot be written as {kind} "
            f"({wrong}); give `types` of its node another of {', '.join(TYPES)}"
        ) from wrong


def _value_bytes(number: int, kind: str, value: Value) -> bytes:
    if isinstance(value, str) or kind == "string":
        if not isinstance(value, str) or kind != "string":
            raise ValueError("text is a string, and nothing else is")
        return _text(number, value)
    if kind in _FORMATS:
        data = struct.pack(_FORMATS[kind], value)
        return _varint(number << 3 | (1 if len(data) == 8 else 5)) + data
    return _varint(number << 3) + _varint(_coded(kind, value))


def _coded(kind: str, value: int | float) -> int:
    """A whole number as the format has it, once it is known to fit."""
    if kind == "bool":
        lowest, highest = 0, 1
    else:
        bits = int(kind[-2:])
        lowest = 0 if kind.startswith("uint") else -(1 << bits - 1)
        highest = lowest + (1 << bits) - 1
    if not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"it holds whole numbers of {lowest} to {highest}")
    if kind.startswith("sint"):
        return value << 1 if value >= 0 else ~(value << 1)
    return int(value)
