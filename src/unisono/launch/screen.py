"""What ranks print, on the launcher's own standard output and error.

Whole lines get the rank in front: `[2] loss 0.31`. On a terminal two things are added.
A progress bar, text that a rank rewrites after a carriage return, is shown below the
lines while it changes: that of the lowest rank which has one. And a traceback that
several ranks print is shown once, with a line that says which ranks printed the same.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from unisono.units import format_ranks

TRACEBACK = "Traceback (most recent call last)"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_HEAD = f"{TRACEBACK}:".encode()
_CHAIN = (b"During handling of the above exception", b"The above exception was")
_COLOURS = (36, 33, 32, 35, 34, 31)
_ERASE = b"\r\x1b[K"


@dataclass(frozen=True)
class OutputOptions:
    """How output of ranks is shown and kept.

    `only` are the ranks that are shown; logs, one file for each rank in `log_dir`, are
    written for all. `tag` names the stream, `timestamps` the time of each line.
    """

    only: Container[int] | None = None
    log_dir: Path | None = None
    tag: bool = False
    timestamps: bool = False


class Screen:
    """Standard output and error of the launcher, shared by the ranks that are shown."""

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        """Nothing is written yet."""
        self.out, self.err = out, err
        self._bars: dict[tuple[int, bool], tuple[BinaryIO, bytes]] = {}
        self._drawn: BinaryIO | None = None
        self._first: dict[bytes, set[int]] = {}  # who has printed a traceback
        self._same: tuple[int, list[int]] | None = None  # not yet told

    def write(self, stream: BinaryIO, text: bytes) -> None:
        """Write lines, above a progress bar if there is one."""
        self._erase()
        self.tell_folded()
        stream.write(text)
        stream.flush()
        self._draw()

    # --- tracebacks

    def is_folded(self, rank: int, traceback: bytes) -> bool:
        """Whether another rank has printed the same traceback; then it is noted."""
        ranks = self._first.setdefault(traceback, set())
        if not ranks or rank in ranks:
            self._first[traceback] = {rank}
            return False
        first = min(ranks) if self._same is None else self._same[0]
        if self._same is not None and first not in ranks:
            self.tell_folded()
            first = min(ranks)
        ranks.add(rank)
        noted = self._same[1] if self._same else []
        self._same = first, noted if rank in noted else [*noted, rank]
        return True

    def tell_folded(self) -> None:
        """Say which ranks have printed a traceback that was shown before."""
        if self._same is None:
            return
        (first, ranks), self._same = self._same, None
        several = "s" if len(ranks) > 1 else ""
        who = f"rank{several} {format_ranks(ranks)}"
        text = f"unisono: {who}: the same traceback as rank {first}\n"
        self._erase()
        self.err.write(text.encode())
        self.err.flush()

    # --- progress bars

    def show_progress(self, key: tuple[int, bool], text: bytes) -> None:
        """The progress bar of a rank's stdout or stderr; empty when it has ended."""
        if text:
            self._bars[key] = self.err if key[1] else self.out, text
        elif self._bars.pop(key, None) is None:
            return
        self._erase()
        self._draw()

    def _erase(self) -> None:
        if self._drawn is not None:
            self._drawn.write(_ERASE)
            self._drawn.flush()
            self._drawn = None

    def _draw(self) -> None:
        if not self._bars:
            return
        stream, text = self._bars[min(self._bars)]
        stream.write(_clipped(text, stream))
        stream.flush()
        self._drawn = stream


class ShownStream:
    """One output stream of a rank, as the screen shows it."""

    def __init__(
        self, screen: Screen, rank: int, options: OutputOptions, *, is_error: bool
    ) -> None:
        """Nothing is shown yet."""
        self._screen, self._rank, self._options = screen, rank, options
        self._is_error = is_error
        self._stream = screen.err if is_error else screen.out
        self._is_terminal = is_terminal(self._stream)
        self._block: list[bytes] = []  # a traceback that is not complete
        self._gap: list[bytes] | None = None  # lines after a folded traceback

    def write_lines(self, lines: bytes) -> None:
        """Show whole lines."""
        if self._is_terminal:
            self._screen.show_progress((self._rank, self._is_error), b"")
            if b"\r" in lines:
                lines = b"".join(
                    last_state(line) + b"\n" for line in lines[:-1].split(b"\n")
                )
        if self._is_error and (self._block or self._gap is not None or _HEAD in lines):
            lines = b"".join(map(self._unfolded, lines.splitlines(keepends=True)))
        self._show(lines)

    def show_progress(self, text: bytes) -> None:
        """Show the state of a line that is rewritten, on terminals only."""
        if self._is_terminal:
            key = self._rank, self._is_error
            self._screen.show_progress(key, self._label() + text)

    def finish(self) -> None:
        """Show what was held back."""
        self._show(b"".join([*(self._gap or []), *self._block]))
        self._block, self._gap = [], None

    def _show(self, lines: bytes) -> None:
        if lines:
            label = self._label()
            text = label + lines[:-1].replace(b"\n", b"\n" + label) + b"\n"
            self._screen.write(self._stream, text)

    def _unfolded(self, line: bytes) -> bytes:
        """What is to be shown of one line, now or with those held back before it."""
        if self._block:
            self._block.append(line)
            return b"" if line[:1].isspace() else self._end_of_traceback()
        if line.startswith(_HEAD):
            self._block = [line]
            return b""
        if self._gap is None:
            return line
        self._gap.append(line)
        if not line.strip() or line.startswith(_CHAIN):
            return b""
        held, self._gap = b"".join(self._gap), None
        return held

    def _end_of_traceback(self) -> bytes:
        text, self._block = b"".join(self._block), []
        if self._screen.is_folded(self._rank, text):
            self._gap = []
            return b""
        text, self._gap = b"".join(self._gap or []) + text, None
        return text

    def _label(self) -> bytes:
        label = f"[{self._rank}]"
        if self._options.tag:
            label += "<stderr>" if self._is_error else "<stdout>"
        if self._is_terminal and not os.environ.get("NO_COLOR"):
            label = f"\x1b[{_COLOURS[self._rank % len(_COLOURS)]}m{label}\x1b[0m"
        if self._options.timestamps:
            now = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            label = f"{clock}.{int(now % 1 * 1000):03d} {label}"
        return f"{label} ".encode()


def is_terminal(stream: IO[Any]) -> bool:
    """Whether a stream is a terminal that can erase a line and has colours."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def last_state(line: bytes) -> bytes:
    """What is left to see of a line in which carriage returns rewrite the text."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _clipped(text: bytes, stream: BinaryIO) -> bytes:
    """A progress bar in one line of the terminal."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 80
    shown = text.decode(errors="replace")
    plain = ESCAPES.sub("", shown)
    if len(plain) < columns:
        return text
    return plain[: max(columns - 1, 1)].encode()
