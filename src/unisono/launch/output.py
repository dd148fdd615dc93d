"""Output of ranks, in whole lines.

The output of many processes on one screen is legible only in whole lines. So the bytes
of each stream are held back until a line is complete, and written with the rank in
front: `[2] loss 0.31`. They stay bytes: what is not text passes through unchanged.

The last lines of every rank's stderr are kept: if it fails they contain its traceback,
which shows whether it failed by itself or only reports that another was lost.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import BinaryIO

from unisono.errors import BadArgument

_LONGEST_LINE = 1 << 20  # longer ones are split
_KEPT_LINES = 400
_SHOWN_LINES = 80
_SHOWN_WITHOUT_TRACEBACK = 10
_COLOURS = (36, 33, 32, 35, 34, 31)
_HEAD = "Traceback (most recent call last)"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PEER_LOST = re.compile(r"(?:[\w.]+\.)?PeerLost\b")


class LineStream:
    """One output stream of one rank, written on in whole lines."""

    def __init__(
        self, files: Iterable[tuple[BinaryIO, bytes]], *, keep: int = 0
    ) -> None:
        """Lines go to each file with its prefix; the last `keep` are kept."""
        self._files = list(files)
        self._partial = bytearray()
        self.last: deque[bytes] = deque(maxlen=keep)

    def write(self, data: bytes) -> None:
        """Add bytes, and write the lines that they complete."""
        end = data.rfind(b"\n") + 1
        if end:
            self._write_lines(bytes(self._partial) + data[:end])
            self._partial.clear()
        self._partial += data[end:]
        if len(self._partial) > _LONGEST_LINE:
            self.finish()

    def finish(self) -> None:
        """Write what is left as a line."""
        if self._partial:
            self._write_lines(bytes(self._partial) + b"\n")
            self._partial.clear()

    def _write_lines(self, lines: bytes) -> None:
        if self.last.maxlen:
            self.last.extend(lines.split(b"\n")[-self.last.maxlen - 1 : -1])
        for file, prefix in self._files:
            if prefix:
                text = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
            else:
                text = lines
            file.write(text)
            file.flush()


class RankOutput:
    """Where output of ranks goes: standard output and error, and a log file for each.

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
        """Nothing is written yet; the log folder is created."""
        self._out, self._err, self._only, self._log_dir = out, err, only, log_dir
        self._logs: list[BinaryIO] = []
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as why:
                raise BadArgument(
                    f"{log_dir}: this folder cannot be created: {why.strerror}"
                ) from why

    def streams(self, rank: int) -> tuple[LineStream, LineStream]:
        """The streams for stdout and stderr of `rank`."""
        log = self._log(rank)
        streams = []
        for stream, keep in ((self._out, 0), (self._err, _KEPT_LINES)):
            files = [] if log is None else [(log, b"")]
            if self._only is None or rank in self._only:
                files.append((stream, _prefix(rank, stream)))
            streams.append(LineStream(files, keep=keep))
        return streams[0], streams[1]

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


def stderr_tail(stderr: Iterable[bytes]) -> str:
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


def reports_a_lost_peer(stderr: str) -> bool:
    """Whether a traceback ends in PeerLost: another rank failed, and this one noticed.

    The line that names the exception is the first one after the head that is not
    indented.
    """
    if _HEAD not in stderr:
        return False
    for line in _ESCAPES.sub("", stderr).splitlines()[1:]:
        if line and not line[0].isspace():
            return _PEER_LOST.match(line) is not None
    return False
