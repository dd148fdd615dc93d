"""Engines that were measured: times of calls as straight lines, piece by piece.

`unisono fit` makes such a file from logs of nccl-tests, and `unisono simulate --engine
FILE` uses it. It holds for the collectives and the numbers of ranks that were measured,
and for nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from unisono.errors import BadArgument, NotOffered


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of `from_bytes` to `upto_bytes`: seconds, and seconds per byte."""

    from_bytes: int
    upto_bytes: int
    latency: float
    byte: float


class MeasuredCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective on so many ranks; the last line holds for all above, too."""

    collective: str
    ranks: int
    lines: tuple[Line, ...]
    source: str = ""
    error: float = 0.0
    """The typical distance of a measured time from its line, as a part of it."""

    def at(self, nbytes: float) -> float:
        """Seconds for a call of so many bytes."""
        for line in self.lines:
            if nbytes <= line.upto_bytes:
                return line.latency + line.byte * nbytes
        return self.lines[-1].latency + self.lines[-1].byte * nbytes


class MeasuredEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was measured of one library on one machine."""

    name: str
    calls: tuple[MeasuredCalls, ...]

    def find(self, collective: str, ranks: int) -> MeasuredCalls:
        """What was measured of this collective on so many ranks; or NotOffered."""
        for one in self.calls:
            if (one.collective, one.ranks) == (collective, ranks):
                return one
        known = ", ".join(f"{c.collective} on {c.ranks}" for c in self.calls)
        raise NotOffered(
            f"engine {self.name}: {collective} on {ranks} ranks was not measured "
            f"(measured: {known})"
        )


def load(file: Path) -> MeasuredEngine:
    """A file that `unisono fit` has written."""
    try:
        made = msgspec.json.decode(file.read_bytes(), type=MeasuredEngine)
    except OSError as why:
        raise BadArgument(f"engine {file}: cannot be read: {why.strerror}") from why
    except msgspec.DecodeError as why:
        raise BadArgument(
            f"engine {file}: not a file that `unisono fit` has written: {why}"
        ) from why
    if not made.calls or not all(one.lines for one in made.calls):
        raise BadArgument(f"engine {file}: nothing was measured")
    return made


def dump(engine: MeasuredEngine) -> bytes:
    """The text of such a file."""
    return msgspec.json.format(msgspec.json.encode(engine), indent=1) + b"\n"
