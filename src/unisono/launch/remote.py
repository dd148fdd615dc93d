"""The launcher for several hosts: one agent on each, one loop here.

ssh starts all agents at once. No rank is started before every agent is ready, so a host
that is down is found while nothing runs yet. Then each gets a block of ranks, in the
order of the hosts. From there on it works like `local`: output comes in whole lines
with the rank in front, the first failure starts a grace period for all hosts, signals
go to all.

Rank 0 listens on the first host, at a port that its agent found free; that address and
the job's secret go to all agents by their standard input. A job on one host has neither
address nor secret, and opens no port.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

from unisono.errors import BadArgument
from unisono.launch import protocol
from unisono.launch.hostfile import HostSpec
from unisono.launch.outcome import Outcome
from unisono.launch.output import LineStream, RankOutput
from unisono.launch.processes import read_input
from unisono.launch.protocol import AnyMessage, StartRanks
from unisono.launch.ssh import SSH, AgentConnection
from unisono.launch.supervisor import SupervisedRank, Supervisor

_CONNECT_TIMEOUT_S = 60.0
_QUIET_S = 2.0  # until it is told which hosts have not answered
_EXIT_TIMEOUT_S = 5.0
_HOST_LOST = 255  # the exit code of a rank whose host was lost, as ssh has it


@dataclass(frozen=True)
class RemoteOptions:
    """How hosts are reached; Python and folder on them, and the cores of ranks."""

    python: str
    folder: str
    ssh: Sequence[str] = tuple(SSH.split())
    address: str = ""
    binding: str = "none"


def launch_on_hosts(
    command: Sequence[str],
    hosts: Sequence[HostSpec],
    output: RankOutput,
    options: RemoteOptions,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
    tell: Callable[[str], object] = str,
) -> Outcome:
    """Run `command` as the ranks of these hosts until all have exited.

    `environment` is added to that of each host. Signals are forwarded as `launch` does.
    `tell` is called with the hosts that are waited for, if that takes long.
    """
    job = _RemoteJob(command, hosts, output, options, environment or {}, grace_s)
    job.tell = tell
    return job.run()


@dataclass(kw_only=True)
class _RemoteRank(SupervisedRank):
    agent: AgentConnection
    stdout: LineStream


class _RemoteJob(Supervisor):
    """The agents and ranks of a job on several hosts while they run."""

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[HostSpec],
        output: RankOutput,
        options: RemoteOptions,
        environment: Mapping[str, str],
        grace_s: float,
    ) -> None:
        super().__init__(grace_s)
        self._command, self._hosts, self._output = command, hosts, output
        self._options, self._environment = options, environment
        self._agents: list[AgentConnection] = []
        self._connected: set[AgentConnection] = set()
        self._ranks: list[_RemoteRank] = []
        self._input_requests = threading.Semaphore(0)  # from rank 0
        self.tell: Callable[[str], object] = str
        refuse_loopback(hosts, options.address)

    def _all_ranks(self) -> Sequence[_RemoteRank]:
        return self._ranks

    def run(self) -> Outcome:
        """Start agents, start ranks, forward output until all have ended, clean up."""
        with self._selector, self._signal_handlers():
            try:
                self._start_agents()
                if self._stop_request is None:
                    self._start_ranks()
                while self._connected and not self._stopped_before_start():
                    self._run_once(float("inf"))
            finally:
                for agent in self._agents:
                    agent.close()
                until = time.monotonic() + _EXIT_TIMEOUT_S
                for agent in self._agents:
                    agent.end(until)
                self._output.close()
        return self._outcome()

    def _stopped_before_start(self) -> bool:
        """Whether a signal stopped the job before any rank was started."""
        return self._stop_request is not None and not self._ranks

    # --- starting

    def _start_agents(self) -> None:
        for host in self._hosts:
            agent = AgentConnection(host, self._options.ssh, self._options.python)
            self._agents.append(agent)
            self._connected.add(agent)
            for pipe, react in zip(
                agent.pipes, (self._read, self._read_stderr), strict=True
            ):
                self._register(pipe, partial(react, agent, pipe))
        until = time.monotonic() + _CONNECT_TIMEOUT_S
        quiet_until = time.monotonic() + _QUIET_S
        while self._stop_request is None:
            missing = [agent for agent in self._agents if agent.ready is None]
            if not missing:
                return
            if time.monotonic() >= quiet_until:
                names = ", ".join(agent.host.name for agent in missing)
                limit = f"at most {_CONNECT_TIMEOUT_S:g} s"
                self.tell(f"waiting for an answer by ssh from {names} ({limit})")
                quiet_until = float("inf")
            for agent in missing:
                if agent not in self._connected:
                    raise agent.start_error()
            if time.monotonic() >= until:
                raise missing[0].timeout_error(_CONNECT_TIMEOUT_S)
            self._run_once(min(until, quiet_until))

    def _start_ranks(self) -> None:
        first, world = 0, []
        for agent in self._agents:
            assert agent.ready is not None
            world.append(
                replace(agent.host, ranks=agent.host.ranks or agent.ready.cores)
            )
        size = sum(host.ranks or 0 for host in world)
        common = self._common_environment()
        for node, (agent, host) in enumerate(zip(self._agents, world, strict=True)):
            ranks = host.ranks or 0
            for number in range(first, first + ranks):
                out, err = self._output.streams(number)
                self._ranks.append(
                    _RemoteRank(
                        number=number,
                        host=agent.host.name,
                        agent=agent,
                        stdout=out,
                        stderr=err,
                    )
                )
            agent.send(
                StartRanks(
                    list(self._command),
                    self._options.folder,
                    first,
                    ranks,
                    size,
                    node,
                    self._options.binding,
                    common,
                )
            )
            first += ranks
        if self._stop_request is not None:  # it arrived before the ranks were started
            self._signal(self._stop_request[1])
        threading.Thread(
            target=self._send_input, args=(self._agents[0],), daemon=True
        ).start()

    def _common_environment(self) -> dict[str, str]:
        """The environment that all ranks share."""
        environment = {**self._environment, "UNISONO_JOB": secrets.token_hex(16)}
        if len(self._agents) > 1:
            address, torch_port = self._rendezvous()
            environment["UNISONO_ADDRESS"] = address
            environment["UNISONO_SECRET"] = secrets.token_hex(32)
            host = address.rpartition(":")[0].strip("[]")
            environment = {
                "MASTER_ADDR": host,
                "MASTER_PORT": str(torch_port),
                **environment,
            }
        return environment

    def _rendezvous(self) -> tuple[str, int]:
        """Rank 0's address, and a port of its host for torch's own store."""
        first, given = self._agents[0], self._options.address
        assert first.ready is not None
        ports = first.ready.ports
        if len(ports) < 2:
            raise BadArgument(
                f"host {first.host.name}: of 100 ports none was free there; end what "
                "listens at ports 20000 to 32000"
            )
        return given or f"{first.host.address}:{ports[0]}", ports[1]

    def _send_input(self, agent: AgentConnection) -> None:
        """Send this process's standard input, piece by piece as rank 0 reads it."""
        self._input_requests.acquire()
        for data in read_input():
            agent.send(protocol.RankInput(data))
            self._input_requests.acquire()
        agent.send(protocol.RankInput(b""))

    # --- running

    def _read(self, agent: AgentConnection, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
            self._handle_disconnect(agent)
            return
        for message in agent.decode(data):
            self._handle(agent, message)

    def _read_stderr(self, agent: AgentConnection, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if data:
            agent.add_stderr(data)
        else:
            self._selector.unregister(pipe)

    def _handle(self, agent: AgentConnection, message: AnyMessage) -> None:
        match message:
            case protocol.Output(rank, stream, data):
                of = self._ranks[rank]
                (of.stdout if stream == 1 else of.stderr).write(data)
            case protocol.RankStarted(rank, pid):
                self._ranks[rank].pid = pid
            case protocol.RankEnded(rank, status, why):
                self._ranks[rank].why = why
                self._record_exit(self._ranks[rank], status)
            case protocol.InputRequest():
                self._input_requests.release()
            case protocol.AllEnded():
                agent.done = True
            case protocol.StartRefused(why):
                raise BadArgument(f"host {agent.host.name}: {why}")

    def _record_exit(self, rank: _RemoteRank, status: int, stderr: str = "") -> None:
        rank.ended, rank.status, rank.stderr_tail = time.monotonic(), status, stderr
        if status:
            self._start_grace_period()

    def _handle_disconnect(self, agent: AgentConnection) -> None:
        """A connection to an agent has closed, after its ranks ended or before."""
        self._connected.discard(agent)
        for rank in self._ranks:
            if rank.agent is not agent:
                continue
            rank.stdout.finish()
            rank.stderr.finish()
            if rank.ended is None and agent.done:  # stopped before it was started
                rank.ended, rank.ended_by_us = time.monotonic(), True
            elif rank.ended is None:
                why = agent.stderr_tail() or "no message from ssh"
                text = f"the connection to host {agent.host.name} closed: {why}"
                self._record_exit(rank, _HOST_LOST, text)

    # --- ending

    def _signal(self, number: signal.Signals) -> None:
        for agent in list(self._connected):
            if agent.ready is not None:
                agent.send(protocol.SendSignal(number))


def refuse_loopback(hosts: Sequence[HostSpec], address: str) -> None:
    """Refuse a loopback name for rank 0's host if other hosts must reach it."""
    if address or not hosts[0].is_loopback or all(host.is_loopback for host in hosts):
        return
    other = next(host.name for host in hosts if not host.is_loopback)
    raise BadArgument(
        f"--hosts: rank 0's host is called {hosts[0].name}, which on {other} means "
        f"{other} itself; use a name that other hosts can resolve, or give "
        "--address host:port"
    )
