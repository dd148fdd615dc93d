"""A launcher's connection to the agent on one host, and errors if there is none.

A connection is one process, usually ssh, with three pipes: messages to the agent,
messages from it, and stderr, which is kept to explain a failure. The agent is running
when its version line has arrived; what ssh, a shell or Python prints instead becomes an
error that says what to do.
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
from unisono.launch import protocol
from unisono.launch.hostfile import HostSpec
from unisono.launch.output import LineStream
from unisono.launch.protocol import AgentReady

SSH = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 "
    "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)
_AGENT = "unisono.launch.agent"
_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126
_MAX_PREAMBLE = 1 << 20  # bytes before the version line


class AgentConnection:
    """The connection to the agent of one host."""

    def __init__(self, host: HostSpec, ssh: Sequence[str], python: str) -> None:
        """Start it; the agent is running when `ready` is set."""
        self.host = host
        self.ready: AgentReady | None = None
        self.done = False  # whether all its ranks have exited
        self._ssh, self._python = ssh, python
        self._is_connected, self._preamble = False, b""
        self._decoder = protocol.MessageDecoder()
        self._outbox: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._stderr = LineStream((), keep=20)
        try:
            self.process = subprocess.Popen(
                self._command(),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is forwarded by the launcher
            )
        except OSError as why:
            raise BadArgument(
                f"host {host.name}: {self._command()[0]} cannot be run here: "
                f"{why.strerror}; install ssh, or give another command with --ssh"
            ) from why

    def _command(self) -> list[str]:
        if self.host.is_here:
            return [self._python, "-m", _AGENT]
        # ssh passes one line to a shell there, which execs Python.
        line = f"exec {shlex.quote(self._python)} -m {_AGENT}"
        return [*self._ssh, self.host.login, line]

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its messages, and its stderr."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def decode(self, data: bytes) -> Iterator[protocol.AnyMessage]:
        """The messages in bytes from the first pipe; AgentReady is kept as `ready`."""
        if not self._is_connected:
            data = self._skip_preamble(data)
        for message in self._decoder.feed(data):
            if isinstance(message, AgentReady):
                self.ready = message
            else:
                yield message

    def _skip_preamble(self, data: bytes) -> bytes:
        """The bytes after the version line, once it has arrived."""
        self._preamble += data
        if len(self._preamble) > _MAX_PREAMBLE:
            raise ConnectFailed(
                f"host {self.host.name}: the login prints more than 1 MiB and starts "
                f"no agent; try: {self._manual_command('true')}"
            )
        _, found, rest = self._preamble.partition(b"\n" + protocol.VERSION_LINE)
        if not found or b"\n" not in rest:
            return b""
        version, _, data = rest.partition(b"\n")
        self._is_connected, self._preamble = True, b""
        there = version.decode(errors="replace")
        if there != unisono.__version__:
            raise BadArgument(
                f"host {self.host.name}: unisono {there} there, "
                f"{unisono.__version__} here; "
                f"{self._manual_command(self._install())} installs the same version"
            )
        return data

    def add_stderr(self, data: bytes) -> None:
        """Add bytes of stderr; the last lines are kept."""
        self._stderr.write(data)

    def stderr_tail(self) -> str:
        """The last lines of stderr, or else of stdout before the version line."""
        self._stderr.finish()
        stderr = b"\n".join(self._stderr.last).decode(errors="replace").strip()
        return stderr or self._preamble.decode(errors="replace").strip()[-500:]

    def send(self, message: protocol.Message) -> None:
        """Send a message, from any thread or signal handler.

        The thread that gets the lock writes all queued messages; a signal handler that
        interrupts it only queues its own.
        """
        self._outbox.append(protocol.frame(message))
        assert self.process.stdin is not None
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                while self._outbox:
                    protocol.write(self.process.stdin.fileno(), self._outbox.popleft())
            except (OSError, ValueError):  # closed: the loop will notice
                self._outbox.clear()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Close its standard input: the agent then ends its ranks and exits."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, until: float) -> None:
        """Wait for its exit; kill it at `until`, or at once if it never got ready."""
        left = until - time.monotonic() if self.ready is not None else 0.0
        try:
            self.process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in self.pipes:
            pipe.close()

    # --- errors

    def start_error(self) -> UnisonoError:
        """The error if the connection closed before the agent was ready."""
        code, stderr = self.process.wait(), self.stderr_tail()
        name, python = self.host.name, self._python
        if code == _SSH_FAILED and not self.host.is_here:
            return ConnectFailed(
                f"host {name}: cannot be reached ({_in_one_line(stderr)}); this must "
                f"work without a password: {self._manual_command('true')}"
            )
        if code in (_NOT_FOUND, _NOT_EXECUTABLE):
            return BadArgument(
                f"host {name}: there is no {python} there; give the path of Python on "
                "the hosts with --python"
            )
        if "No module named" in stderr and "unisono" in stderr:
            return BadArgument(
                f"host {name}: {python} has no unisono there; "
                f"{self._manual_command(self._install())} installs it"
            )
        return ConnectFailed(
            f"host {name}: no agent was started there (exit code {code}): "
            f"{_in_one_line(stderr) or 'no output'}; try: "
            f"{self._manual_command(f'{python} -m {_AGENT}')}"
        )

    def timeout_error(self, seconds: float) -> UnisonoError:
        """The error if the agent was not ready within `seconds`."""
        return ConnectFailed(
            f"host {self.host.name}: no agent has answered within {seconds:.0f} s; "
            f"try: {self._manual_command('true')}"
        )

    def _install(self) -> str:
        return f"{self._python} -m pip install unisono=={unisono.__version__}"

    def _manual_command(self, command: str) -> str:
        if self.host.is_here:
            return command
        return f"{shlex.join(self._ssh)} {self.host.login} {shlex.quote(command)}"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[-500:]
