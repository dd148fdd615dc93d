"""The launcher for several hosts: one agent on each, one loop here.

Agents are started by ssh, all at once. No rank is started before every agent has
greeted, so a host that is down is found out while nothing runs yet. Then each is given
its ranks: block by block, in the order in which the hosts were named. From there on it
is what `launch` does with processes of its own: lines come out whole and with their
rank in front, the first failure begins a grace for all hosts, signals go to all.

Rank 0 listens on the first host, at a port that its agent found free; its name, the
port and the job's secret go to all by the agents' standard input. A job on one host
gets neither address nor secret: there is no port at all then.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

from unisono.errors import BadArgument
from unisono.launch import protocol as orders
from unisono.launch.hostfile import Host
from unisono.launch.outcome import Outcome
from unisono.launch.output import Speaker, Stage
from unisono.launch.processes import read_input
from unisono.launch.protocol import AnyMessage, Order
from unisono.launch.ssh import SSH, Link
from unisono.launch.supervisor import Overseen, Overseer

_GREETING_S = 60.0
_FAREWELL_S = 5.0
_LOST = 255  # the status of a rank whose host is out of reach, as ssh has it


@dataclass(frozen=True)
class Way:
    """How hosts are reached, and what is found there."""

    python: str
    folder: str
    ssh: Sequence[str] = tuple(SSH.split())
    address: str = ""


def launch_on_hosts(
    command: Sequence[str],
    hosts: Sequence[Host],
    stage: Stage,
    way: Way,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> Outcome:
    """Run `command` as the ranks of these hosts to their end, whatever that is.

    `environment` is added to what each host has. Signals are passed on as `launch`
    does it.
    """
    return _Fleet(command, hosts, stage, way, environment or {}, grace_s).run()


@dataclass(kw_only=True)
class _Remote(Overseen):
    link: Link
    stdout: Speaker


class _Fleet(Overseer):
    """All agents and all ranks while they run."""

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[Host],
        stage: Stage,
        way: Way,
        environment: Mapping[str, str],
        grace_s: float,
    ) -> None:
        super().__init__(grace_s)
        self._command, self._hosts, self._stage = command, hosts, stage
        self._way, self._environment = way, environment
        self._links: list[Link] = []
        self._open: set[Link] = set()
        self._ranks: list[_Remote] = []
        self._wanted = threading.Semaphore(0)  # pieces of our input, by rank 0
        refuse_loopback(hosts, way.address)

    def _everyone(self) -> Sequence[_Remote]:
        return self._ranks

    def run(self) -> Outcome:
        """Greet, order, listen, end."""
        with self._selector, self._hearing_signals():
            try:
                self._connect()
                if self._asked is None:
                    self._order()
                while self._open and not self._over():
                    self._turn(float("inf"))
            finally:
                for link in self._links:
                    link.close()
                until = time.monotonic() + _FAREWELL_S
                for link in self._links:
                    link.end(until)
                self._stage.close()
        return self._outcome()

    def _over(self) -> bool:
        """Whether we were asked to end before any rank was started."""
        return self._asked is not None and not self._ranks

    # Starting

    def _connect(self) -> None:
        for host in self._hosts:
            link = Link(host, self._way.ssh, self._way.python)
            self._links.append(link)
            self._open.add(link)
            for pipe, react in zip(
                link.pipes, (self._hear, self._hear_stderr), strict=True
            ):
                self._watch(pipe, partial(react, link, pipe))
        until = time.monotonic() + _GREETING_S
        while self._asked is None:
            silent = [link for link in self._links if link.hello is None]
            if not silent:
                return
            for link in silent:
                if link not in self._open:
                    raise link.failure()
            if time.monotonic() >= until:
                raise silent[0].silence(_GREETING_S)
            self._turn(until)

    def _order(self) -> None:
        first, world = 0, []
        for link in self._links:
            assert link.hello is not None
            world.append(replace(link.host, ranks=link.host.ranks or link.hello.cores))
        size = sum(host.ranks or 0 for host in world)
        common = self._common(size)
        for link, host in zip(self._links, world, strict=True):
            ranks = host.ranks or 0
            for number in range(first, first + ranks):
                out, err = self._stage.speakers(number)
                self._ranks.append(
                    _Remote(
                        number=number,
                        host=link.host.name,
                        link=link,
                        stdout=out,
                        stderr=err,
                    )
                )
            link.send(
                Order(list(self._command), self._way.folder, first, ranks, common)
            )
            first += ranks
        if self._asked is not None:  # it came too late to be passed on by the handler
            self._signal(self._asked[1])
        threading.Thread(target=self._pump, args=(self._links[0],), daemon=True).start()

    def _common(self, size: int) -> dict[str, str]:
        """What all ranks are told."""
        told = {
            **self._environment,
            "UNISONO_JOB": secrets.token_hex(16),
            "UNISONO_WORLD_SIZE": str(size),
        }
        if len(self._links) > 1:
            told["UNISONO_ADDRESS"] = self._way.address or self._meeting_place()
            told["UNISONO_SECRET"] = secrets.token_hex(32)
        return told

    def _meeting_place(self) -> str:
        first = self._links[0]
        assert first.hello is not None
        if not first.hello.port:
            raise BadArgument(
                f"host {first.host.name}: no free port was found there; "
                "name one with --address"
            )
        return f"{first.host.address}:{first.hello.port}"

    def _pump(self, link: Link) -> None:
        """Our standard input, piece by piece as rank 0 takes it."""
        self._wanted.acquire()
        for data in read_input():
            link.send(orders.Input(data))
            self._wanted.acquire()
        link.send(orders.Input(b""))

    # Listening

    def _hear(self, link: Link, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
            self._lose(link)
            return
        for message in link.hear(data):
            self._take(link, message)

    def _hear_stderr(self, link: Link, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if data:
            link.hear_stderr(data)
        else:
            self._selector.unregister(pipe)

    def _take(self, link: Link, message: AnyMessage) -> None:
        match message:
            case orders.Said(rank, stream, data):
                of = self._ranks[rank]
                (of.stdout if stream == 1 else of.stderr).hear(data)
            case orders.Started(rank, pid):
                self._ranks[rank].pid = pid
            case orders.Ended(rank, status):
                self._end(self._ranks[rank], status)
            case orders.Wants():
                self._wanted.release()
            case orders.Done():
                link.done = True
            case orders.Refused(why):
                raise BadArgument(f"host {link.host.name}: {why}")

    def _end(self, rank: _Remote, status: int, words: str = "") -> None:
        rank.ended, rank.status, rank.words = time.monotonic(), status, words
        if status:
            self._begin_grace()

    def _lose(self, link: Link) -> None:
        """The link has ended, as it should or before its time."""
        self._open.discard(link)
        for rank in self._ranks:
            if rank.link is not link:
                continue
            rank.stdout.finish()
            rank.stderr.finish()
            if rank.ended is None and link.done:  # never started, as we were asked
                rank.ended, rank.pressed = time.monotonic(), True
            elif rank.ended is None:
                told = link.last_words() or "ssh said nothing"
                words = f"the connection to host {link.host.name} ended: {told}"
                self._end(rank, _LOST, words)

    # Ending

    def _signal(self, number: signal.Signals) -> None:
        for link in list(self._open):
            if link.hello is not None:
                link.send(orders.Signal(number))


def refuse_loopback(hosts: Sequence[Host], address: str) -> None:
    """Rank 0's host must bear a name by which the others reach it."""
    if address or not hosts[0].is_loopback or all(host.is_loopback for host in hosts):
        return
    other = next(host.name for host in hosts if not host.is_loopback)
    raise BadArgument(
        f"--hosts: rank 0's host is called {hosts[0].name}, by which {other} would "
        "reach itself; name it as the others know it, or give --address host:port"
    )
