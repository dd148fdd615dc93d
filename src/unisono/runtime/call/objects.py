"""Python objects as bytes and back: plain data, without pickle.

Unpickling runs code that the sender chose. Here bytes only become data:

    None  bool  int  float  complex  str  bytes  bytearray
    list  tuple  dict  set  frozenset                          nested up to 100 deep
    NumPy arrays and scalars, those of ml_dtypes too; torch tensors on the CPU

Types come back exactly, a tuple as a tuple; arrays come back contiguous and writable,
tensors without their gradients. Anything else is refused with its path in the object,
or embedded as a pickle where both sides allow it.

The first byte is a version. Then each value is a byte for its type, and what the type
needs: sizes, and raw bytes. Every size is compared with the number of bytes left before
it is used, so that a sender cannot cause larger allocations than it sends.
"""

from __future__ import annotations

import pickle
import reprlib
import struct
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import numpy as np

from unisono.errors import BadArgument, Corrupted
from unisono.runtime.call.object_arrays import (
    ARRAY,
    SCALAR,
    TENSOR,
    ArrayParts,
    Bytes,
    Shape,
    described,
    find_dtype,
    parts_of,
    restored,
)
from unisono.units import format_bytes

VERSION = 1
MOST_DEPTH = 100
MOST_BYTES = 1 << 36
MOST_AXES = 64
MOST_LETTERS = 64


Leaf = tuple[bytes, bytes]
"""A value that contains no others: its head, and its bytes if they may be large."""

_FLOAT, _COMPLEX = struct.Struct("<d"), struct.Struct("<dd")


def encode(obj: object, *, allow_pickle: bool = False) -> bytes:
    """`obj` as bytes; BadArgument has the path of what cannot be sent."""
    writer = _Writer(allow_pickle)
    try:
        writer.put(obj, 0)
    except _UnsupportedValue as refused:
        raise BadArgument(f"{refused.where()}: {refused.why}") from refused.__cause__
    return b"".join(writer.parts)


def decode(data: bytes | bytearray | memoryview, *, allow_pickle: bool = False) -> Any:
    """The inverse of `encode`; Corrupted if the bytes are invalid."""
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = memoryview(view.tobytes())
    reader = _Reader(view, allow_pickle)
    version = reader.byte()
    if version != VERSION:
        raise reader.corrupted(
            f"version {version} of the encoding, expected {VERSION}: do all ranks run "
            "the same unisono?"
        )
    value = reader.value(0)
    if reader.left():
        raise reader.corrupted(f"{reader.left()} bytes are left over")
    return value


class _UnsupportedValue(Exception):
    """A value cannot be sent; callers add its path."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str] = []

    def where(self) -> str:
        steps = self.path[::-1]
        if len(steps) > 10:
            steps = [*steps[:4], "...", *steps[-4:]]
        return f"object at {''.join(steps)}" if steps else "object"


class _Writer:
    """Collects encoded pieces; large ones are copied only when they are joined."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.parts: list[Any] = [bytes((VERSION,))]  # of buffers
        self.nbytes = 1

    def add(self, head: bytes, raw: bytes | Bytes) -> None:
        self.nbytes += len(head) + len(raw)
        if self.nbytes > MOST_BYTES:
            raise _UnsupportedValue(
                f"more than {format_bytes(MOST_BYTES)} in one object"
            )
        self.parts.append(head)
        if len(raw):
            self.parts.append(raw)

    def put(self, obj: Any, depth: int) -> None:
        """Add one value, by its exact type: subclasses are not plain data."""
        kind = type(obj)
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            self.add(*leaf(obj))
        elif kind in _SEQUENCES:
            self.open(_SEQUENCES[kind], len(obj), depth)
            self.items(obj, depth + 1)
        elif kind is dict:
            self.open(b"d", len(obj), depth)
            self.pairs(obj, depth + 1)
        else:
            self.foreign(obj)

    def open(self, tag: bytes, count: int, depth: int) -> None:
        if depth >= MOST_DEPTH:
            raise _UnsupportedValue(
                f"nested deeper than {MOST_DEPTH}, or contains itself"
            )
        self.add(tag + _size(count), b"")

    def items(self, items: Iterable[Any], depth: int) -> None:
        index = 0
        try:
            for index, item in enumerate(items):  # noqa: B007
                self.put(item, depth)
        except _UnsupportedValue as refused:
            is_set = isinstance(items, set | frozenset)
            refused.path.append("<member>" if is_set else f"[{index}]")
            raise

    def pairs(self, items: dict[Any, Any], depth: int) -> None:
        step = ""
        try:
            for key, value in items.items():
                step = "<key>"
                self.put(key, depth)
                step = ""
                self.put(value, depth)
        except _UnsupportedValue as refused:
            refused.path.append(step or f"[{reprlib.repr(key)}]")
            raise

    def foreign(self, obj: Any) -> None:
        """Add an array, a tensor, or a pickle of anything else."""
        found = parts_of(obj)
        if found is not None:
            sizes = [_size(k) for k in found.shape]
            title = _size(len(found.name)) + found.name.encode("ascii")
            head = b"".join([found.kind, title, _size(len(sizes)), *sizes])
            self.add(head, found.raw)
        elif self.allow_pickle:
            self.embed(obj)
        else:
            raise _UnsupportedValue(
                f"{described(obj)} cannot be sent without pickle; pass "
                "allow_pickle=True if all ranks are trusted"
            )

    def embed(self, obj: Any) -> None:
        try:
            raw = pickle.dumps(obj, protocol=5)
        except Exception as error:  # pickling runs the object's own code
            raise _UnsupportedValue(
                f"a {type(obj).__name__} cannot be pickled either: {error}"
            ) from error
        self.add(b"p" + _size(len(raw)), raw)


class _Reader:
    """Reads values from bytes, with bounds checks."""

    def __init__(self, view: memoryview, allow_pickle: bool) -> None:
        self.view = view
        self.at = 0
        self.allow_pickle = allow_pickle

    def left(self) -> int:
        return len(self.view) - self.at

    def corrupted(self, what: str) -> Corrupted:
        return Corrupted(f"object, byte {self.at} of {len(self.view)}: {what}")

    def take(self, count: int) -> memoryview:
        if count > self.left():
            raise self.corrupted(f"{count} bytes are announced, {self.left()} are left")
        taken = self.view[self.at : self.at + count]
        self.at += count
        return taken

    def byte(self) -> int:
        if self.at >= len(self.view):
            raise self.corrupted("truncated")
        self.at += 1
        return self.view[self.at - 1]

    def size(self) -> int:
        short = self.byte()
        return short if short < 255 else int.from_bytes(self.take(8), "little")

    def sized(self) -> memoryview:
        return self.take(self.size())

    def value(self, depth: int) -> Any:
        tag = self.byte()
        read = _READERS.get(tag)
        if read is None:
            return self.container(tag, depth)
        try:
            return read(self)
        except BadArgument:
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise self.corrupted(f"{error}") from error

    def container(self, tag: int, depth: int) -> Any:
        make = _MAKERS.get(tag)
        if make is None:
            raise self.corrupted(f"unknown type byte {tag}")
        count = self.size()
        if depth >= MOST_DEPTH:
            raise self.corrupted(f"nested deeper than {MOST_DEPTH}")
        total = 2 * count if tag == ord("d") else count
        if total > self.left():
            raise self.corrupted(f"{count} items in the {self.left()} bytes left")
        items: list[Any] = []
        for _ in range(total):
            items.append(self.value(depth + 1))  # noqa: PERF401 (one frame less)
        try:
            made = make(items)
        except (TypeError, ValueError) as error:
            raise self.corrupted(f"{error}") from error
        if len(made) != count:
            raise self.corrupted("the same key or member twice")
        return made

    def header(self) -> tuple[str, Shape]:
        letters, axes = self.sized(), self.size()
        if len(letters) > MOST_LETTERS or axes > MOST_AXES:
            raise self.corrupted(f"a type name of {len(letters)} letters, {axes} axes")
        name = str(letters, "ascii")
        return name, tuple([self.size() for _ in range(axes)])

    def array(self, kind: bytes) -> Any:
        name, shape = self.header()
        dtype = find_dtype(kind, name)
        raw = self.take(dtype.itemsize * prod(shape))
        return restored(
            ArrayParts(kind, name, shape, np.frombuffer(raw, np.uint8).copy())
        )

    def pickled(self) -> Any:
        raw = self.sized()
        if not self.allow_pickle:
            raise BadArgument(
                f"object, byte {self.at - len(raw)}: a pickle, which may run any code; "
                "pass allow_pickle=True if all ranks are trusted"
            )
        try:
            return pickle.loads(raw)
        except Exception as error:  # unpickling runs arbitrary code
            raise self.corrupted(f"a pickle cannot be read: {error}") from error


def _size(count: int) -> bytes:
    return bytes((count,)) if count < 255 else b"\xff" + count.to_bytes(8, "little")


def _int(number: int) -> Leaf:
    nbytes = number.bit_length() // 8 + 1
    return b"i" + _size(nbytes) + number.to_bytes(nbytes, "little", signed=True), b""


def _str(tag: bytes, text: str) -> Leaf:
    return _bytes(tag, text.encode("utf-8", "surrogatepass"))


def _bytes(tag: bytes, raw: bytes) -> Leaf:
    return tag + _size(len(raw)), raw


def _to_str(raw: memoryview) -> str:
    return str(raw, "utf-8", "surrogatepass")


_LEAVES: dict[type, Callable[[Any], Leaf]] = {
    type(None): lambda _: (b"N", b""),
    bool: lambda truth: (b"T" if truth else b"F", b""),
    int: _int,
    float: lambda number: (b"f" + _FLOAT.pack(number), b""),
    complex: lambda number: (b"c" + _COMPLEX.pack(number.real, number.imag), b""),
    str: lambda text: _str(b"s", text),
    bytes: lambda raw: _bytes(b"b", raw),
    bytearray: lambda raw: _bytes(b"B", bytes(raw)),
    np.str_: lambda text: _str(b"S", text),
    np.bytes_: lambda raw: _bytes(b"Y", bytes(raw)),
}
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"u", set: b"e", frozenset: b"z"}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    ord("l"): list,
    ord("u"): tuple,
    ord("e"): set,
    ord("z"): frozenset,
    ord("d"): lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}
_READERS: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda r: None,
    ord("T"): lambda r: True,
    ord("F"): lambda r: False,
    ord("i"): lambda r: int.from_bytes(r.sized(), "little", signed=True),
    ord("f"): lambda r: _FLOAT.unpack(r.take(8))[0],
    ord("c"): lambda r: complex(*_COMPLEX.unpack(r.take(16))),
    ord("s"): lambda r: _to_str(r.sized()),
    ord("b"): lambda r: bytes(r.sized()),
    ord("B"): lambda r: bytearray(r.sized()),
    ord("S"): lambda r: np.str_(_to_str(r.sized())),
    ord("Y"): lambda r: np.bytes_(bytes(r.sized())),
    ord(ARRAY): lambda r: r.array(ARRAY),
    ord(SCALAR): lambda r: r.array(SCALAR),
    ord(TENSOR): lambda r: r.array(TENSOR),
    ord("p"): _Reader.pickled,
}
