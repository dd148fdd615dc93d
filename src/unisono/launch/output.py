"""Output of ranks, in whole lines.

The output of many processes on one screen is legible only in whole lines. So the bytes
of each stream are held back until a line is complete. They stay bytes: what is not text
passes through unchanged. `screen` shows them, log files keep them.

The last lines of every rank's stderr are kept: if it fails they contain its traceback,
which shows whether it failed by itself or only reports that another was lost.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import BinaryIO, Protocol

from unisono.errors import BadArgument
from unisono.launch.screen import (
    ESCAPES,
    TRACEBACK,
    OutputOptions,
    Screen,
    ShownStream,
    last_state,
)

_LONGEST_LINE = 1 << 20  # longer ones are split
_LONGEST_BAR = 4096
_KEPT_LINES = 400
_SHOWN_LINES = 80
_SHOWN_WITHOUT_TRACEBACK = 10
_PEER_LOST = re.compile(r"(?:[\w.]+\.)?PeerLost\b")


class LineSink(Protocol):
    """Where lines of a stream go."""

    def write_lines(self, lines: bytes) -> None:
        """Take whole lines."""

    def show_progress(self, text: bytes) -> None:
        """Take the state of a line that carriage returns rewrite: a progress bar."""

    def finish(self) -> None:
        """The stream has ended."""


class LineStream:
    """One output stream of one rank, written on in whole lines."""

    def __init__(self, sinks: Iterable[LineSink], *, keep: int = 0) -> None:
        """Lines go to each sink; the last `keep` are kept."""
        self._sinks = list(sinks)
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
            self._write_partial()
        elif b"\r" in self._partial:
            text = last_state(bytes(self._partial[-_LONGEST_BAR:]))
            for sink in self._sinks:
                sink.show_progress(text)

    def finish(self) -> None:
        """Write what is left as a line."""
        self._write_partial()
        for sink in self._sinks:
            sink.finish()

    def _write_partial(self) -> None:
        if self._partial:
            self._write_lines(bytes(self._partial) + b"\n")
            self._partial.clear()

    def _write_lines(self, lines: bytes) -> None:
        if self.last.maxlen:
            last = lines.split(b"\n")[-self.last.maxlen - 1 : -1]
            self.last.extend(map(last_state, last))
        for sink in self._sinks:
            sink.write_lines(lines)


class _LogFile:
    """The log of one rank, which both its streams write to, as they are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write_lines(self, lines: bytes) -> None:
        self._file.write(lines)
        self._file.flush()

    def show_progress(self, text: bytes) -> None:
        """Nothing: the line is written when it is complete."""

    def finish(self) -> None:
        """Nothing: the other stream may go on."""


class RankOutput:
    """Where output of ranks goes: standard output and error, and a log file for each.

    Labels are coloured on terminals, unless NO_COLOR is set. With `append` logs go on
    where those of an earlier start of the job ended.
    """

    def __init__(
        self,
        out: BinaryIO,
        err: BinaryIO,
        options: OutputOptions | None = None,
        *,
        append: bool = False,
    ) -> None:
        """Nothing is written yet; the log folder is created."""
        self._screen, self._options = Screen(out, err), options or OutputOptions()
        self._mode = "ab" if append else "wb"
        self._logs: list[BinaryIO] = []
        folder = self._options.log_dir
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as why:
                raise BadArgument(
                    f"{folder}: this folder cannot be created: {why.strerror}"
                ) from why

    def streams(self, rank: int) -> tuple[LineStream, LineStream]:
        """The streams for stdout and stderr of `rank`."""
        log, only = self._log(rank), self._options.only
        streams = []
        for is_error, keep in ((False, 0), (True, _KEPT_LINES)):
            sinks: list[LineSink] = [] if log is None else [_LogFile(log)]
            if only is None or rank in only:
                sinks.append(
                    ShownStream(self._screen, rank, self._options, is_error=is_error)
                )
            streams.append(LineStream(sinks, keep=keep))
        return streams[0], streams[1]

    def close(self) -> None:
        """Close the logs."""
        self._screen.tell_folded()
        for log in self._logs:
            log.close()

    def _log(self, rank: int) -> BinaryIO | None:
        if self._options.log_dir is None:
            return None
        file = self._options.log_dir / f"rank{rank}.log"
        try:
            log: BinaryIO = file.open(self._mode)  # type: ignore[assignment]
        except OSError as why:
            raise BadArgument(f"{file}: cannot be written: {why.strerror}") from why
        self._logs.append(log)
        return log


def stderr_tail(stderr: Iterable[bytes]) -> str:
    """The last traceback and what follows it, or else the last few lines."""
    lines = [line.decode(errors="replace") for line in stderr]
    heads = [at for at, line in enumerate(lines) if TRACEBACK in line]
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
    if TRACEBACK not in stderr:
        return False
    for line in ESCAPES.sub("", stderr).splitlines()[1:]:
        if line and not line[0].isspace():
            return _PEER_LOST.match(line) is not None
    return False
