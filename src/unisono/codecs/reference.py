"""Codecs in NumPy: the definition of every bit that the native kernels write.

A code is a row of blocks. A block is a scale, then the codes of its elements; a value
is its code times the scale. The last block may be shorter. `encode` and `decode` take
whole arrays of float32, and everything between is in rows: one row for each block.

Rounding is to nearest, ties to even, or stochastic: then 32 random bits of each
element, which depend on the key and the element's index alone, decide between its
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = tuple[Array, Array]  # scales as bytes, codes as bytes; a row for each block

GROUP = 32
"""Elements that share 64 random bits, from which each derives its own 32."""

LEAST_SCALE = np.float32(2.0**-126)
"""Its inverse is finite; blocks below it lose precision, and then become zero."""


def encode(name: str, x: Array, block: int, key: int = 0) -> Array:
    """The code of float32s; with a `key` that is not 0 rounded stochastically."""
    random = draws(key, x.size) if key else None
    with np.errstate(all="ignore"):
        parts = [
            _CODECS[name].encode(
                x[begin:end].reshape(-1, size),
                None if random is None else random[begin:end].reshape(-1, size),
            )
            for begin, end, size in _pieces(x.size, block)
        ]
    wire = [np.concatenate(rows, axis=1).reshape(-1) for rows in parts]
    return np.concatenate([np.empty(0, np.uint8), *wire])


def decode(name: str, code: Array, count: int, block: int) -> Array:
    """The values of a code of `count` elements, as float32."""
    kind, values, at = _CODECS[name], [np.empty(0, np.float32)], 0
    with np.errstate(all="ignore"):
        for begin, end, size in _pieces(count, block):
            width = kind.scale_bytes + -(-size * kind.bits // 8)
            height = (end - begin) // size
            rows = code[at : at + width * height].reshape(height, width)
            scales, codes = rows[:, : kind.scale_bytes], rows[:, kind.scale_bytes :]
            values.append(kind.decode((scales, codes), size).reshape(-1))
            at += width * height
    return np.concatenate(values)


def draws(key: int, count: int) -> Array:
    """32 random bits for each element."""
    with np.errstate(over="ignore"):
        group = np.arange(-(-count // GROUP), dtype=np.uint64)
        z = np.uint64(key) + (group + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31)))[:, None]
        place = np.arange(GROUP, dtype=np.uint32)
        h = z.astype(np.uint32) + place * np.uint32(0x9E3779B9)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        h = h ^ (h >> np.uint32(16)) ^ (z >> np.uint64(32)).astype(np.uint32)
    return np.asarray(h.reshape(-1)[:count])


def _pieces(count: int, block: int) -> list[tuple[int, int, int]]:
    """The whole blocks, and the short one after them: (begin, end, size of each)."""
    whole = count - count % block
    pieces = [(0, whole, block), (whole, count, count - whole)]
    return [(begin, end, size) for begin, end, size in pieces if end > begin]


@dataclass(frozen=True)
class FloatFormat:
    """A small float: `exponent` and `mantissa` bits below the sign.

    What is finite but too large becomes the largest value if it `saturates`, and
    infinity if not. A format without infinity says NaN instead.
    """

    exponent: int
    mantissa: int
    has_infinity: bool = True
    saturates: bool = False

    @property
    def infinity(self) -> int:
        """The code of infinity, or of the topmost exponent."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def nan(self) -> int:
        """The code of NaN, without its sign."""
        all_ones = (1 << (self.exponent + self.mantissa)) - 1
        return (
            self.infinity | 1 << (self.mantissa - 1) if self.has_infinity else all_ones
        )

    @property
    def largest(self) -> int:
        """The code of the largest finite value."""
        return self.infinity - 1 if self.has_infinity else self.nan - 1

    @property
    def lowest(self) -> int:
        """The exponent of the smallest normal value."""
        return 2 - (1 << (self.exponent - 1))

    def value(self, code: Array) -> Array:
        """The values of codes, in float32."""
        code = code.astype(np.int64)
        size = code & ((1 << (self.exponent + self.mantissa)) - 1)
        field = size >> self.mantissa
        fraction = size & ((1 << self.mantissa) - 1)
        whole = np.where(field > 0, fraction + (1 << self.mantissa), fraction)
        power = np.maximum(field, 1) - 1 + self.lowest - self.mantissa
        values = np.ldexp(whole.astype(np.float64), power)
        if self.has_infinity:
            values = np.where(size >= self.infinity, np.inf, values)
            values = np.where(size > self.infinity, np.nan, values)
        else:
            values = np.where(size == self.nan, np.nan, values)
        return np.copysign(values, np.where(code > size, -1.0, 1.0)).astype(np.float32)

    def code(self, x: Array, random: Array | None) -> Array:
        """The codes of float32s, rounded."""
        size = np.abs(x.astype(np.float64))
        end = 2.0 ** (2 - self.lowest)
        if self.saturates:
            end = float(self.value(np.array([self.largest]))[0])
        size = np.where(np.isnan(size), 0.0, np.minimum(size, end))
        # The exponent as float32 has it, then the one that this format has.
        own = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, -126), -126)
        power = np.maximum(own, self.lowest)
        steps = np.ldexp(size, self.mantissa - power)  # exact, as is what follows
        if random is None:
            steps = np.rint(steps)
        else:
            steps = _up_by_chance(steps, random, 23 - self.mantissa + power - own)
        code = steps.astype(np.int64) + ((power - self.lowest) << self.mantissa)
        special = self.infinity if self.has_infinity else self.nan
        code = np.where(np.isinf(x), special, code)
        code = np.where(np.isnan(x), self.nan, code)
        sign = np.signbit(x).astype(np.int64) << (self.exponent + self.mantissa)
        return np.asarray(code | sign)


def _up_by_chance(steps: Array, random: Array, bits: Array) -> Array:
    """Up or down, where `bits` of each are behind the point; with too many, down."""
    kept = np.minimum(bits, 31)
    part = np.ldexp((random.astype(np.int64) >> (32 - kept)).astype(np.float64), -kept)
    return np.where(bits > 31, 0.0, np.floor(steps + part))


E4M3 = FloatFormat(4, 3, has_infinity=False, saturates=True)
E5M2 = FloatFormat(5, 2, saturates=True)


@dataclass(frozen=True)
class RowCoding:
    """How the rows of one codec are made; `bits` are those of an element."""

    bits: int
    scale_bytes: int
    encode: Callable[[Array, Array | None], Rows]
    decode: Callable[[Rows, int], Array]


def _float_scales(largest: Array, most: int) -> Array:
    """So that the largest value of a block becomes the largest code."""
    end = np.finfo(np.float32).max
    ceiling = np.float32(end / np.float64(most))
    while float(ceiling) * most > float(end):
        ceiling = np.nextafter(ceiling, np.float32(0))
    return np.clip(largest / np.float32(most), LEAST_SCALE, ceiling)


def _power_scales(largest: Array) -> Array:
    """The exponents of the least powers of two that make nothing larger than 448."""
    fraction, exponent = np.frexp(largest.astype(np.float64))
    power = exponent - 9 + (fraction > 448 / 512)
    return np.where(largest > 0, np.clip(power + 127, 1, 246), 1).astype(np.uint8)


def _bytes(values: Array) -> Array:
    rows = np.ascontiguousarray(values).reshape(len(values), -1)
    return rows.view(np.uint8).reshape(len(values), -1)


def _plain(form: FloatFormat) -> RowCoding:
    def encode(x: Array, random: Array | None) -> Rows:
        code = form.code(x, random).astype(np.uint16)
        return np.empty((len(x), 0), np.uint8), _bytes(code)

    def decode(rows: Rows, size: int) -> Array:
        return form.value(np.ascontiguousarray(rows[1]).view(np.uint16))

    return RowCoding(16, 0, encode, decode)


def _scaled_floats(form: FloatFormat, most: int) -> RowCoding:
    def encode(x: Array, random: Array | None) -> Rows:
        largest = np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(axis=1)
        scale = _float_scales(largest, most)
        code = form.code(x * (np.float32(1) / scale)[:, None], random)
        return _bytes(scale), code.astype(np.uint8)

    def decode(rows: Rows, size: int) -> Array:
        scale = np.ascontiguousarray(rows[0]).view(np.float32)
        return form.value(rows[1]) * scale

    return RowCoding(8, 4, encode, decode)


def _mx_encode(x: Array, random: Array | None) -> Rows:
    largest = np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(axis=1)
    exponent = _power_scales(largest)
    inverse = np.ldexp(np.float32(1), 127 - exponent.astype(np.int32))
    code = E4M3.code(x * inverse.astype(np.float32)[:, None], random)
    return exponent[:, None], code.astype(np.uint8)


def _mx_decode(rows: Rows, size: int) -> Array:
    scale = np.ldexp(1.0, rows[0].astype(np.int32) - 127).astype(np.float32)
    scale = np.where(rows[0] == 255, np.float32(np.nan), scale)
    return E4M3.value(rows[1]) * scale


def _whole(x: Array, most: int, random: Array | None) -> tuple[Array, Array]:
    """Scales, and whole numbers; the scale of a block with NaN or infinity is NaN."""
    largest = np.abs(x).max(axis=1)
    fine = np.isfinite(largest)
    scale = _float_scales(np.where(fine, largest, np.float32(0)), most)
    x = np.where(fine[:, None], x, np.float32(0)) * (np.float32(1) / scale)[:, None]
    if random is None:
        code = np.rint(x)
    else:
        sixteenths = np.rint(np.abs(x.astype(np.float64)) * 65536)
        up = np.floor((sixteenths + (random >> np.uint32(16))) / 65536)
        code = np.copysign(np.minimum(up, most), x)
    return np.where(fine, scale, np.float32(np.nan)), code.astype(np.int8)


def _int8_encode(x: Array, random: Array | None) -> Rows:
    scale, code = _whole(x, 127, random)
    return _bytes(scale), code.view(np.uint8)


def _int8_decode(rows: Rows, size: int) -> Array:
    scale = np.ascontiguousarray(rows[0]).view(np.float32)
    return rows[1].view(np.int8).astype(np.float32) * scale


def _int4_encode(x: Array, random: Array | None) -> Rows:
    scale, code = _whole(x, 7, random)
    bits, half = code.view(np.uint8) & 15, -(-x.shape[1] // 2)
    packed = bits[:, :half].copy()
    packed[:, : x.shape[1] - half] |= bits[:, half:] << 4
    return _bytes(scale), packed


def _int4_decode(rows: Rows, size: int) -> Array:
    scale = np.ascontiguousarray(rows[0]).view(np.float32)
    packed = rows[1].view(np.int8)
    low, high = packed << 4 >> 4, packed[:, : size // 2] >> 4
    return np.concatenate([low, high], axis=1).astype(np.float32) * scale


def _onebit_encode(x: Array, random: Array | None) -> Rows:
    lanes = 16  # sums side by side, then folded: one order for all machines
    size = x.shape[1]
    padded = np.zeros((len(x), -(-size // lanes) * lanes))
    padded[:, :size] = np.abs(x)
    sums = np.zeros((len(x), lanes))
    for at in range(0, padded.shape[1], lanes):
        sums += padded[:, at : at + lanes]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    scale = (sums / size).astype(np.float32)
    fine = np.isfinite(scale)
    signs = np.signbit(x) & fine
    bits = np.packbits(signs, axis=1, bitorder="little")
    return _bytes(np.where(fine, scale, np.float32(np.nan))), bits


def _onebit_decode(rows: Rows, size: int) -> Array:
    scale = np.ascontiguousarray(rows[0]).view(np.float32)
    negative = np.unpackbits(rows[1], axis=1, bitorder="little")[:, :size]
    return np.where(negative, -scale, scale)


_CODECS = {
    "fp16": _plain(FloatFormat(5, 10)),
    "bf16": _plain(FloatFormat(8, 7)),
    "fp8": _scaled_floats(E4M3, 448),
    "fp8_e5m2": _scaled_floats(E5M2, 57344),
    "mxfp8": RowCoding(8, 1, _mx_encode, _mx_decode),
    "int8": RowCoding(8, 4, _int8_encode, _int8_decode),
    "int4": RowCoding(4, 4, _int4_encode, _int4_decode),
    "onebit": RowCoding(1, 4, _onebit_encode, _onebit_decode),
}
