"""Dense codecs: by name, with a block and a way of rounding, and their error.

    get("fp8")                    e4m3, block 128, a float32 scale before each block
    get("int8:block=64")          other blocks: multiples of 32
    get("int4:stochastic")        stochastic rounding, by a key of step and slot

Every element is sent, in fewer bits, so sizes are known beforehand and codes can be
cut at any multiple of the block. Native code does the work, with the widest vectors
that the machine has; without it NumPy does (reference.py): slower, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.codecs import reference
from unisono.dtypes import DTYPES, DType, dtype_of, numpy_dtype
from unisono.errors import BadArgument, unknown, whole_number

try:
    from unisono import _native
except ImportError:  # built without a compiler: NumPy does it
    _native = None  # type: ignore[assignment]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

LARGEST_BLOCK = 1 << 16

_SOURCES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _CodeLayout:
    """What a code is made of; a `block` of 1 means that there is no scale."""

    bits: int
    scale_bytes: int
    block: int
    any_block: bool = True
    stochastic: bool = True


_FORMS = {
    "fp16": _CodeLayout(16, 0, 1, any_block=False),
    "bf16": _CodeLayout(16, 0, 1, any_block=False),
    "fp8": _CodeLayout(8, 4, 128),
    "fp8_e5m2": _CodeLayout(8, 4, 128),
    "mxfp8": _CodeLayout(8, 1, 32, any_block=False),
    "int8": _CodeLayout(8, 4, 128),
    "int4": _CodeLayout(4, 4, 128),
    "onebit": _CodeLayout(1, 4, 128, stochastic=False),
}

NAMES: tuple[str, ...] = tuple(_FORMS)
"""The dense codecs there are."""


def get(spec: str | Codec) -> Codec:
    """The codec of that name, with options after a colon: fp8, int8:block=64."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        what = type(spec).__name__
        raise BadArgument(f"codec: a {what}: expected a name such as 'fp8'")
    return _get(spec)


@cache
def _get(spec: str) -> Codec:
    name, _, options = spec.partition(":")
    form = _FORMS.get(name)
    if form is None:
        raise unknown("codec", name, NAMES)
    block, stochastic = form.block, False
    for option in options.split(",") if options else ():
        what, _, value = option.strip().partition("=")
        if what == "block" and value:
            block = _block(spec, name, value)
        elif what == "stochastic" and not value:
            stochastic = True
        else:
            raise BadArgument(
                f"codec {spec!r}: unknown option {option!r}; there are block=64 and "
                "stochastic, with a comma between them"
            )
    return Codec(name, block, stochastic)


def _block(spec: str, name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise BadArgument(
            f"codec {spec!r}: block {value!r}: expected a whole number, "
            f"such as {name}:block=64"
        ) from None


def key(step: int, slot: int) -> int:
    """The key of one stochastic rounding: that of buffer `slot` in step `step`.

    Another step or slot rounds differently; the same ones round equally, everywhere.
    """
    step, slot = whole_number("step", step), whole_number("slot", slot)
    if not (0 <= step < 1 << 64 and 0 <= slot < 1 << 64):
        raise BadArgument(f"key: step {step}, slot {slot}: expected 0 or more")
    z, ones = step * 0x9E3779B97F4A7C15 & (1 << 64) - 1, (1 << 64) - 1
    for more in (slot, 0):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ones
        z = (z ^ z >> 27) * 0x94D049BB133111EB & ones
        z = (z ^ z >> 31) + more & ones
    return z or 1


@cache
def ways() -> tuple[str, ...]:
    """How this machine can encode, the fastest first; NumPy is always the last."""
    return (*(_native.instruction_sets() if _native else ()), "numpy")


_LONG = 1 << 20
"""Elements of an array in which what is left of the last block does not count."""


@dataclass(frozen=True)
class Codec:
    """One dense codec: a name, the elements that share a scale, a way of rounding."""

    name: str
    block: int
    stochastic: bool = False

    def __post_init__(self) -> None:
        """Refuse blocks and roundings that this codec does not have."""
        form = _FORMS.get(self.name)
        if form is None:
            raise unknown("codec", self.name, NAMES)
        if self.stochastic and not form.stochastic:
            raise BadArgument(
                f"codec {self.name}: a sign is not rounded, so there is no {self.name}:"
                f"stochastic; use {self.name}"
            )
        block = whole_number(f"codec {self.name}: block", self.block)
        if not form.any_block and block != form.block:
            has = "its block is 32" if self.name == "mxfp8" else "it has no blocks"
            raise BadArgument(
                f"codec {self.name}: block {block}: {has}; use {self.name} alone, "
                "or fp8:block=... for blocks of another size"
            )
        if form.any_block and not (block % 32 == 0 and 32 <= block <= LARGEST_BLOCK):
            near = min(max(round(block / 32), 1) * 32, LARGEST_BLOCK)
            raise BadArgument(
                f"codec {self.name}: block {block}: expected a multiple of 32, from 32 "
                f"to {LARGEST_BLOCK}; nearest: {self.name}:block={near}"
            )

    def __str__(self) -> str:
        """The name with its options, as `get` takes it."""
        options = []
        if self.block != _FORMS[self.name].block:
            options.append(f"block={self.block}")
        if self.stochastic:
            options.append("stochastic")
        return self.name + (":" + ",".join(options) if options else "")

    def share(self, itemsize: int) -> float:
        """The part of the bytes of a long array that is sent, by elements' bytes."""
        return self.nbytes(_LONG) / (_LONG * itemsize)

    def nbytes(self, count: int) -> int:
        """How many bytes the code of `count` elements has."""
        count = whole_number(f"codec {self}: count", count)
        if count < 0:
            raise BadArgument(f"codec {self}: count {count}: expected 0 or more")
        form = _FORMS[self.name]
        whole, rest = divmod(count, self.block)
        total = whole * (form.scale_bytes + self.block * form.bits // 8)
        return total + (form.scale_bytes + -(-rest * form.bits // 8) if rest else 0)

    @property
    def error(self) -> float:
        """The relative root mean square error of one encoding of Gaussian values."""
        return _measured_error(self)

    def encode(
        self, x: Array, key: int = 0, *, out: Bytes | None = None, by: str = ""
    ) -> Bytes:
        """The code of all elements of `x`, in order: float32, bfloat16 or float16.

        Key 0 rounds to nearest. With another chance decides, by the key and the place
        of an element; `codecs.key(step, slot)` makes one. `by` is one of `ways()`.
        """
        dtype = self._source("encode", x)
        key = self._key(key)
        x = np.ascontiguousarray(x)
        out = self._code(out, x.size, create=True)
        implementation = _way(by)
        if implementation == len(ways()) - 1:
            # Some machines take offence at a signalling NaN on the way.
            with np.errstate(invalid="ignore"):
                wide = x.reshape(-1).astype(np.float32)
            out[:] = reference.encode(self.name, wide, self.block, key)
        else:
            what = dtype.code, self.block, key, implementation
            _native.codec_encode(self.name, out, _raw(x), *what)
        return out

    def decode(
        self,
        code: Bytes,
        count: int,
        dtype: str = "float32",
        *,
        out: Array | None = None,
        by: str = "",
    ) -> Array:
        """The `count` values that `code` stands for, rounded to `dtype`."""
        code = self._code(code, count)
        if out is None:
            name = str(dtype if isinstance(dtype, str) else np.dtype(dtype))
            out = np.empty(count, numpy_dtype(name))
        self._target("decode", out, count)
        implementation = _way(by)
        if implementation == len(ways()) - 1:
            values = reference.decode(self.name, code, count, self.block)
            with np.errstate(all="ignore"):
                out[...] = values.reshape(out.shape).astype(out.dtype)
        else:
            what = dtype_of(out).code, self.block, implementation
            _native.codec_decode(self.name, _raw(out), code, *what)
        return out

    def add(self, into: Array, code: Bytes, *, by: str = "") -> Array:
        """Decode and add to `into`, in float32; returns it, rounded once."""
        self._target("add", into, into.size if isinstance(into, np.ndarray) else 0)
        code = self._code(code, into.size)
        implementation = _way(by)
        if implementation == len(ways()) - 1:
            values = reference.decode(self.name, code, into.size, self.block)
            with np.errstate(all="ignore"):
                wide = into.astype(np.float32) + values.reshape(into.shape)
                into[...] = wide.astype(into.dtype)
        else:
            what = dtype_of(into).code, self.block, implementation
            _native.codec_add(self.name, _raw(into), code, *what)
        return into

    def _source(self, where: str, x: object) -> DType:
        if not isinstance(x, np.ndarray):
            what = type(x).__name__
            raise BadArgument(
                f"codec {self}: {where}: a {what}: expected a NumPy array"
            )
        name = str(x.dtype)
        if name in _SOURCES:
            return DTYPES[name]
        advice = (
            "convert it to float32 first"
            if x.dtype.kind == "f"
            else "send it without a codec, or as float32"
        )
        raise BadArgument(
            f"codec {self}: {where}: {name}: expected {', '.join(_SOURCES[:-1])} or "
            f"{_SOURCES[-1]}; {advice}"
        )

    def _target(self, where: str, out: object, count: int) -> None:
        self._source(where, out)
        assert isinstance(out, np.ndarray)
        if out.size != count:
            raise BadArgument(
                f"codec {self}: {where}: a result of {out.size} elements, expected "
                f"{count}"
            )
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise BadArgument(
                f"codec {self}: {where}: the result must be contiguous and writable"
            )

    def _code(self, code: Bytes | None, count: int, *, create: bool = False) -> Bytes:
        nbytes = self.nbytes(count)
        if code is None and create:
            return np.empty(nbytes, np.uint8)
        fits = (
            isinstance(code, np.ndarray)
            and code.dtype == np.uint8
            and code.shape == (nbytes,)
            and code.flags.c_contiguous
            and (code.flags.writeable or not create)
        )
        if not fits or code is None:
            got = (
                f"{code.dtype}{list(code.shape)}"
                if isinstance(code, np.ndarray)
                else f"a {type(code).__name__}"
            )
            raise BadArgument(
                f"codec {self}: the code of {count} elements is a contiguous uint8 "
                f"array of {nbytes} bytes, got {got}"
            )
        return code

    def _key(self, key: int) -> int:
        key = whole_number(f"codec {self}: key", key)
        if not 0 <= key < 1 << 64:
            raise BadArgument(
                f"codec {self}: key {key}: expected 64 bits; codecs.key(step, slot) "
                "makes one"
            )
        if self.stochastic and key == 0:
            raise BadArgument(
                f"codec {self}: rounds stochastically and needs a key other than 0: "
                "encode(x, key=codecs.key(step, slot))"
            )
        return key


def _way(by: str) -> int:
    known = ways()
    if by and by not in known:
        raise unknown("way to encode", by, known)
    return known.index(by) if by else 0


def _raw(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


@cache
def _measured_error(codec: Codec) -> float:
    """Measured once, on values from a fixed seed: all ranks get the same."""
    x = np.random.default_rng(8).standard_normal(1 << 17).astype(np.float32)
    code = codec.encode(x, key=1 if codec.stochastic else 0)
    lost = codec.decode(code, x.size).astype(np.float64) - x
    return float(
        f"{np.sqrt(np.mean(lost**2) / np.mean(np.square(x, dtype=float))):.3g}"
    )
