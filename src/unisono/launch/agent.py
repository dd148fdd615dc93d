"""The launcher's agent on another host: `python -m unisono.launch.agent`.

ssh starts it without arguments; the command, the folder and the job's secret arrive on
standard input, whose other end only the launcher holds. It is a `LocalJob` with three
differences: output of ranks is forwarded unchanged, and split into lines by the
launcher; the launcher decides when the grace period ends; and when standard input ends,
the ranks are killed. So a broken connection of any kind, ssh killed or its host lost,
ends the ranks of this host.

Messages are read on a thread of their own: a signal arrives even while the main thread
waits for a launcher that does not read output.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import unisono
from unisono.errors import UnisonoError
from unisono.launch import protocol
from unisono.launch.environment import HostRanks
from unisono.launch.local import LocalJob, LocalRank
from unisono.launch.output import LineStream, RankOutput
from unisono.launch.protocol import (
    AgentReady,
    AllEnded,
    Output,
    RankEnded,
    RankStarted,
    StartRanks,
    StartRefused,
)
from unisono.runtime.world.address import free_ports
from unisono.transports.addresses import Address, is_loopback

_PAUSES = (signal.SIGSTOP, signal.SIGCONT)
_CONNECTION_ENDED = 4


class _LauncherConnection:
    """The agent's connection to the launcher; sends whole messages, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, message: protocol.Message) -> None:
        """Send one message; blocks until it is written."""
        self.raw(protocol.frame(message))

    def raw(self, data: bytes) -> None:
        """Send bytes that are not a message: the version line."""
        with self._lock:
            try:
                protocol.write(self._descriptor, data)
            except OSError:  # the launcher is gone
                os._exit(_CONNECTION_ENDED)


class _ForwardedStream(LineStream):
    """One output stream of one rank, forwarded to the launcher as it is."""

    def __init__(self, launcher: _LauncherConnection, rank: int, stream: int) -> None:
        super().__init__(())
        self._launcher, self._rank, self._stream = launcher, rank, stream

    def write(self, data: bytes) -> None:
        self._launcher.send(Output(self._rank, self._stream, data))

    def finish(self) -> None:
        """Nothing to do: the launcher completes the last line."""


class _ForwardedOutput(RankOutput):
    """The output of ranks, forwarded to the launcher."""

    def __init__(self, launcher: _LauncherConnection) -> None:
        self._launcher = launcher

    def streams(self, rank: int) -> tuple[LineStream, LineStream]:
        return _ForwardedStream(self._launcher, rank, 1), _ForwardedStream(
            self._launcher, rank, 2
        )

    def close(self) -> None:
        """Nothing to close."""


class Agent(LocalJob):
    """The ranks of this host, controlled by a launcher on another host."""

    def __init__(self, request: StartRanks, launcher: _LauncherConnection) -> None:
        """A job that is not started yet."""
        here = HostRanks(
            request.ranks,
            request.first,
            request.world_size,
            request.node,
            request.binding,
        )
        output = _ForwardedOutput(launcher)
        super().__init__(request.command, here, output, request.environment, 0.0)
        self._launcher = launcher
        self._input_data: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def handle_messages(self, messages: Iterator[protocol.AnyMessage]) -> None:
        """Handle the launcher's messages; exit when there are no more.

        The reaper then kills the ranks.
        """
        try:
            for message in messages:
                if isinstance(message, protocol.SendSignal):
                    self._receive_signal(signal.Signals(message.number))
                elif isinstance(message, protocol.RankInput):
                    self._input_data.put(message.data)
        finally:  # the launcher is gone, or its messages cannot be read
            os._exit(_CONNECTION_ENDED)

    def _receive_signal(self, number: signal.Signals) -> None:
        if self._stop_request is None and number not in _PAUSES:
            self._stop_request = time.monotonic(), number  # start no more ranks
        self._signal(number)

    def _input(self) -> int:
        return subprocess.PIPE

    def _connect_input(self, pipe: IO[bytes]) -> None:
        threading.Thread(target=self._write_input, args=(pipe,), daemon=True).start()

    def _write_input(self, pipe: IO[bytes]) -> None:
        """Write rank 0's input; request the next piece when one is written."""
        with contextlib.suppress(OSError), pipe:
            while True:
                self._launcher.send(protocol.InputRequest())
                data = self._input_data.get()
                if not data:
                    return
                protocol.write(pipe.fileno(), data)

    def _rank_started(self, rank: LocalRank) -> None:
        self._launcher.send(RankStarted(rank.number, rank.pid))

    def _check_exit(self, rank: LocalRank) -> None:
        super()._check_exit(rank)
        if rank.ended is not None:
            self._launcher.send(RankEnded(rank.number, rank.status, rank.why))

    def _start_grace_period(self) -> None:
        """Nothing to do: the launcher starts it for all hosts."""

    def _signal_handlers(self) -> contextlib.AbstractContextManager[None]:
        """None: signals for ranks arrive as messages; others may end the agent."""
        return contextlib.nullcontext()


def _start_error(request: StartRanks) -> str:
    """Why the ranks cannot be started on this host, or an empty string."""
    environment = request.environment
    # With UNISONO_INTERFACE rank 0 listens on that interface, whatever its host name.
    address = environment.get("UNISONO_ADDRESS", "")
    if environment.get("UNISONO_INTERFACE"):
        address = ""
    if address and request.first == 0 and (own := _own_loopback(address)):
        return (
            f"its own name resolves to {own}, which other hosts cannot reach; put its "
            "real address beside the name in /etc/hosts on that host, or give "
            "--address host:port"
        )
    try:
        os.chdir(request.folder)
    except OSError as why:
        return (
            f"cannot change to the folder {request.folder}: {why.strerror}; share it "
            "between the hosts, or give another with --chdir"
        )
    return ""


def _own_loopback(address: str) -> str:
    """The loopback address that the address's host name resolves to here, if any."""
    rendezvous = Address.parse(address)
    if is_loopback(rendezvous.host) or rendezvous.host == "localhost":
        return ""  # given as such
    try:
        found = [str(sockaddr[0]) for _, sockaddr in rendezvous.resolve()]
    except UnisonoError:  # the rank that listens will report it
        return ""
    return found[0] if all(map(is_loopback, found)) else ""


def main() -> int:
    """Report readiness, receive the request, run the ranks."""
    # Move both pipes away from 0 and 1, so that nothing else prints or reads there.
    launcher, messages = _LauncherConnection(os.dup(1)), protocol.listen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    launcher.raw(b"\n%s%s\n" % (protocol.VERSION_LINE, unisono.__version__.encode()))
    ports = free_ports(2)
    launcher.send(AgentReady(len(os.sched_getaffinity(0)), ports))
    request = next(messages, None)
    if not isinstance(request, StartRanks):
        return _CONNECTION_ENDED
    if error := _start_error(request):
        launcher.send(StartRefused(error))
        return 2
    agent = Agent(request, launcher)
    threading.Thread(
        target=agent.handle_messages, args=(messages,), daemon=True
    ).start()
    try:
        agent.run()
    except UnisonoError as why:
        launcher.send(StartRefused(str(why)))
        return 2
    launcher.send(AllEnded())
    return 0


if __name__ == "__main__":
    sys.exit(main())
