"""What ranks say, in whole lines.

The output of many processes on one screen is legible only if nobody is cut off in
the middle of a line. So the bytes of each stream are held back until their line is
whole, and go out together with the number of the rank in front: `[2] loss 0.31`. They
remain bytes all the way: what is no text passes through unharmed.

The last lines of every rank's stderr are kept. Should it fail, they hold its traceback,
and they tell whether it failed by itself or merely reports that another was lost.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import BinaryIO

from unisono.errors import BadArgument

_LONGEST_LINE = 1 << 20  # without a line end by then, one is made
_KEPT_LINES = 400
_SHOWN_LINES = 80
_SHOWN_WITHOUT_TRACEBACK = 10
_COLOURS = (36, 33, 32, 35, 34, 31)
_HEAD = "Traceback (most recent call last)"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PEER_LOST = re.compile(r"(?:[\w.]+\.)?PeerLost\b")


class Speaker:
    """One stream of one rank: bytes come in, whole lines go out."""

    def __init__(
        self, outlets: Iterable[tuple[BinaryIO, bytes]], *, keep: int = 0
    ) -> None:
        """Lines go to each outlet behind its prefix; the last `keep` are kept."""
        self._outlets = list(outlets)
        self._begun = bytearray()
        self.last: deque[bytes] = deque(maxlen=keep)

    def hear(self, data: bytes) -> None:
        """Take more bytes, and say what lines they complete."""
        end = data.rfind(b"\n") + 1
        if end:
            self._say(bytes(self._begun) + data[:end])
            self._begun.clear()
        self._begun += data[end:]
        if len(self._begun) > _LONGEST_LINE:
            self.finish()

    def finish(self) -> None:
        """Say what is left over, as a line."""
        if self._begun:
            self._say(bytes(self._begun) + b"\n")
            self._begun.clear()

    def _say(self, lines: bytes) -> None:
        if self.last.maxlen:
            self.last.extend(lines.split(b"\n")[-self.last.maxlen - 1 : -1])
        for outlet, prefix in self._outlets:
            if prefix:
                told = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
            else:
                told = lines
            outlet.write(told)
            outlet.flush()


class Stage:
    """Where the ranks are heard: standard output and error, and a log file for each.

    `only` are the ranks that are shown; the logs are written for all. The prefix is
    coloured on terminals, unless NO_COLOR is set.
    """

    def __init__(
        self,
        out: BinaryIO,
        err: BinaryIO,
        *,
        only: Container[int] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """Nothing is written before a rank speaks; the folder is made at once."""
        self._out, self._err, self._only, self._log_dir = out, err, only, log_dir
        self._logs: list[BinaryIO] = []
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as why:
                raise BadArgument(
                    f"{log_dir}: this folder cannot be made: {why.strerror}"
                ) from why

    def speakers(self, rank: int) -> tuple[Speaker, Speaker]:
        """Those for stdout and stderr of `rank`."""
        log = self._log(rank)
        told = []
        for stream, keep in ((self._out, 0), (self._err, _KEPT_LINES)):
            outlets = [] if log is None else [(log, b"")]
            if self._only is None or rank in self._only:
                outlets.append((stream, _prefix(rank, stream)))
            told.append(Speaker(outlets, keep=keep))
        return told[0], told[1]

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs:
            log.close()

    def _log(self, rank: int) -> BinaryIO | None:
        if self._log_dir is None:
            return None
        file = self._log_dir / f"rank{rank}.log"
        try:
            log = file.open("wb")
        except OSError as why:
            raise BadArgument(f"{file}: cannot be written: {why.strerror}") from why
        self._logs.append(log)
        return log


def _prefix(rank: int, stream: BinaryIO) -> bytes:
    label = f"[{rank}]"
    if stream.isatty() and not os.environ.get("NO_COLOR"):
        label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
    return f"{label} ".encode()


def last_words(stderr: Iterable[bytes]) -> str:
    """The last traceback and what follows it, or else the last few lines."""
    lines = [line.decode(errors="replace") for line in stderr]
    heads = [at for at, line in enumerate(lines) if _HEAD in line]
    if not heads:
        return "\n".join(lines[-_SHOWN_WITHOUT_TRACEBACK:])
    lines = lines[heads[-1] :]
    if len(lines) > _SHOWN_LINES:
        left_out = f"  ... ({len(lines) - _SHOWN_LINES} lines left out)"
        lines = [lines[0], left_out, *lines[1 - _SHOWN_LINES :]]
    return "\n".join(lines)


def reports_a_lost_peer(words: str) -> bool:
    """Whether a traceback ends in PeerLost: another rank failed, and this one saw it.

    The line that names the exception is the first one after the head that is not
    indented.
    """
    if _HEAD not in words:
        return False
    for line in _ESCAPES.sub("", words).splitlines()[1:]:
        if line and not line[0].isspace():
            return _PEER_LOST.match(line) is not None
    return False
