"""A launcher's connection to the agent on one host, and why it may not come about.

A link is one process, ssh as a rule, whose three pipes we hold: orders go in, reports
come out, and its stderr is kept to tell why, should it fail. Nothing is believed to be
there before the agent has greeted; what ssh, a shell or Python said instead is put into
plain words, each with what to do about it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

import unisono
from unisono.errors import BadArgument, ConnectFailed, UnisonoError
from unisono.launch import protocol as orders
from unisono.launch.hostfile import Host
from unisono.launch.output import Speaker
from unisono.launch.protocol import Hello

SSH = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 "
    "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)
_AGENT = "unisono.launch.agent"
_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126
_MOST_NOISE = 1 << 20  # before the greeting


class Link:
    """The agent of one host, from here."""

    def __init__(self, host: Host, ssh: Sequence[str], python: str) -> None:
        """Start it; the agent is there when `hello` is."""
        self.host = host
        self.hello: Hello | None = None
        self.done = False  # whether its ranks have ended as they should
        self._ssh, self._python = ssh, python
        self._greeted, self._noise = False, b""
        self._inbox = orders.Inbox()
        self._outbox: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._stderr = Speaker((), keep=20)
        try:
            self.process = subprocess.Popen(
                self._command(),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us to pass on
            )
        except OSError as why:
            raise BadArgument(
                f"host {host.name}: {self._command()[0]} cannot be run here: "
                f"{why.strerror}; install ssh, or name another command with --ssh"
            ) from why

    def _command(self) -> list[str]:
        if self.host.is_here:
            return [self._python, "-m", _AGENT]
        # ssh hands one line to a shell there, which makes way for Python.
        line = f"exec {shlex.quote(self._python)} -m {_AGENT}"
        return [*self._ssh, self.host.login, line]

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its reports, and its stderr."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def hear(self, data: bytes) -> Iterator[orders.AnyMessage]:
        """The messages in what was read from the first pipe; Hello is kept."""
        if not self._greeted:
            data = self._find_greeting(data)
        for message in self._inbox.take(data):
            if isinstance(message, Hello):
                self.hello = message
            else:
                yield message

    def _find_greeting(self, data: bytes) -> bytes:
        """What stands behind the greeting, once it is there."""
        self._noise += data
        if len(self._noise) > _MOST_NOISE:
            raise ConnectFailed(
                f"host {self.host.name}: its login prints without end instead of "
                f"starting the agent; try: {self._by_hand('true')}"
            )
        _, found, rest = self._noise.partition(b"\n" + orders.GREETING)
        if not found or b"\n" not in rest:
            return b""
        version, _, data = rest.partition(b"\n")
        self._greeted, self._noise = True, b""
        there = version.decode(errors="replace")
        if there != unisono.__version__:
            raise BadArgument(
                f"host {self.host.name}: unisono {there} there, "
                f"{unisono.__version__} here; "
                f"{self._by_hand(self._install())} makes them equal"
            )
        return data

    def hear_stderr(self, data: bytes) -> None:
        """Keep the last lines."""
        self._stderr.hear(data)

    def last_words(self) -> str:
        """The last lines of ssh and the agent, as one."""
        self._stderr.finish()
        told = b"\n".join(self._stderr.last).decode(errors="replace").strip()
        return told or self._noise.decode(errors="replace").strip()[-500:]

    def send(self, message: orders.Message) -> None:
        """From any thread, and from handlers of signals.

        Whoever finds nobody writing writes all there is; a handler that comes in
        between leaves its message to the one that it interrupted.
        """
        self._outbox.append(orders.frame(message))
        assert self.process.stdin is not None
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                while self._outbox:
                    orders.write(self.process.stdin.fileno(), self._outbox.popleft())
            except (OSError, ValueError):  # gone: the loop will see it
                self._outbox.clear()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Say no more: the agent takes it as the end, and ends its ranks."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, until: float) -> None:
        """See it gone, by force if it is not by then, or never greeted."""
        left = until - time.monotonic() if self.hello is not None else 0.0
        try:
            self.process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in self.pipes:
            pipe.close()

    # Why there is no agent

    def failure(self) -> UnisonoError:
        """The link ended before it was greeted: in plain words, and what to do."""
        code, told = self.process.wait(), self.last_words()
        name, python = self.host.name, self._python
        if code == _SSH_FAILED and not self.host.is_here:
            return ConnectFailed(
                f"host {name}: cannot be reached ({_in_one_line(told)}); this must "
                f"work without a password: {self._by_hand('true')}"
            )
        if code in (_NOT_FOUND, _NOT_EXECUTABLE):
            return BadArgument(
                f"host {name}: there is no {python} there; give the path of Python on "
                "the hosts with --python"
            )
        if "No module named" in told and "unisono" in told:
            return BadArgument(
                f"host {name}: {python} has no unisono there; "
                f"{self._by_hand(self._install())} installs it"
            )
        return ConnectFailed(
            f"host {name}: no agent was started there (exit code {code}): "
            f"{_in_one_line(told) or 'nothing was said'}; try: "
            f"{self._by_hand(f'{python} -m {_AGENT}')}"
        )

    def silence(self, seconds: float) -> UnisonoError:
        """Neither a greeting nor an end came in that time."""
        return ConnectFailed(
            f"host {self.host.name}: no agent has answered within {seconds:.0f} s; "
            f"try: {self._by_hand('true')}"
        )

    def _install(self) -> str:
        return f"{self._python} -m pip install unisono=={unisono.__version__}"

    def _by_hand(self, command: str) -> str:
        if self.host.is_here:
            return command
        return f"{shlex.join(self._ssh)} {self.host.login} {shlex.quote(command)}"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[-500:]
