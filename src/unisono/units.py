"""Sizes in and out: the only place that knows 1024 from 1000; and tables of text.

People type sizes the way benchmarks do (K, M, G are powers of 1024) and read them back
with the binary prefix spelled out. Rates of links are in bits, and powers of 1000; what
programs reach is in bytes, and powers of 1000 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from unisono.errors import BadArgument

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:iB|B)?", re.IGNORECASE)
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)bit(?:/s)?", re.IGNORECASE)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ns|us|ms|s)")


def parse_bytes(text: str) -> int:
    """The number of bytes that "8", "32M", "1.5G" or "64KiB" means."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise BadArgument(
            f"size {text!r}: expected a number with K, M, G or T, as in 32M"
        )
    nbytes = int(float(found[1]) * 1024 ** _POWERS[found[2].upper()])
    if nbytes >= 1 << 60:
        raise BadArgument(f"size {text}: more than any memory has")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """`nbytes` with three digits and a binary prefix: 1536 is "1.5 KiB"."""
    for prefix in ("", "Ki", "Mi", "Gi"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.{4 if abs(nbytes) >= 999.5 else 3}g} {prefix}B"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def parse_rate(text: str) -> int:
    """The bits per second that "1gbit", "20mbit" or "2.5 Gbit/s" means."""
    found = _RATE.fullmatch(text.strip())
    rate = int(float(found[1]) * 1000 ** _POWERS[found[2].upper()]) if found else 0
    if rate < 1:
        raise BadArgument(
            f"rate {text!r}: expected bits per second above 0, as in 20mbit or 1gbit"
        )
    return rate


def parse_seconds(text: str) -> float:
    """The seconds that "5ms", "200us" or "0.5s" means."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise BadArgument(f"duration {text!r}: expected ns, us, ms or s, as in 5ms")
    return float(found[1]) * _SECONDS[found[2]]


_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(B|b|bit)/s")


def parse_bandwidth(text: str) -> float:
    """The bytes per second that "25 GB/s", or in bits "100Gb/s", means."""
    found = _BANDWIDTH.fullmatch(text.strip())
    if not found:
        raise BadArgument(
            f"bandwidth {text!r}: expected as in 25GB/s, or 100Gb/s for bits"
        )
    rate = float(found[1]) * 1000.0 ** _POWERS[found[2].upper()]
    return rate if found[3] == "B" else rate / 8


def format_bandwidth(bytes_per_second: float) -> str:
    """Bytes per second with four digits and a decimal prefix: "12.5 GB/s"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(bytes_per_second) >= size:
            return f"{bytes_per_second / size:.4g} {prefix}B/s"
    return f"{bytes_per_second:.4g} B/s"


def format_seconds(seconds: float) -> str:
    """`seconds` with four digits, in the unit that suits: 0.00153 is "1.53 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def format_row(cells: Iterable[str], widths: Iterable[int]) -> str:
    """One line of a table; cells with a negative width are aligned to the right."""
    padded = (
        cell.rjust(-width) if width < 0 else cell.ljust(width)
        for cell, width in zip(cells, widths, strict=True)
    )
    return "  ".join(padded).rstrip()


def format_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False
) -> list[str]:
    """The lines of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    signed = [-width for width in widths] if right else widths
    return [format_row(row, signed) for row in (heads, *rows)]


def format_ranks(numbers: Sequence[int]) -> str:
    """Numbers in a row as ranges: 0, 3..9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        ", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}..{run[-1]}"
        for run in runs
    )


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """Facts as a table for notebooks: no style, and nothing that loads."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
