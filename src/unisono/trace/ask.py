"""The ranks of a job that runs, asked over their sockets; nothing there is changed.

Every rank with a monitor (unisono run sets it; UNISONO_MONITOR=1 elsewhere) listens
at a Unix socket that has no file. The kernel lists them, gives both ends the process of
the other, and accepts no other machine; a rank answers its own user only.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from unisono.errors import BadArgument
from unisono.runtime.observe.monitor import PREFIX, name_of
from unisono.transports.unix import credentials

_ANSWER_S = 10.0
_SOCKETS = Path("/proc/net/unix")


class MonitorSocket(NamedTuple):
    """Where a rank can be asked."""

    pid: int
    rank: int
    number: int = 0

    @property
    def address(self) -> str:
        """Its name, which no file system knows."""
        return name_of(*self)


def sockets() -> list[MonitorSocket]:
    """The ranks of this user on this host that can be asked."""
    named = re.compile(rf"@{PREFIX}{os.getuid()}-(\d+)-(\d+)-(\d+)$")
    ranks = set()
    for line in _SOCKETS.read_text().splitlines():
        match = named.search(line)
        if match:
            ranks.add(MonitorSocket(*map(int, match.groups())))
    return sorted(ranks)


def ask(rank: MonitorSocket, what: str) -> dict[str, Any] | None:
    """What a rank answers; None if it does not, or is not who it should be."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_ANSWER_S)
            line.connect(rank.address)
            if credentials(line)[:2] != (rank.pid, os.getuid()):
                return None
            line.sendall(what.encode())
            received = b"".join(iter(lambda: line.recv(1 << 16), b""))
        answer = msgspec.json.decode(received)
    except (OSError, msgspec.DecodeError):
        return None
    return answer if isinstance(answer, dict) else None


def jobs() -> dict[tuple[int, ...], list[MonitorSocket]]:
    """The jobs that run, by the processes of their ranks."""
    jobs: dict[tuple[int, ...], list[MonitorSocket]] = {}
    for rank in sockets():
        state = ask(rank, "state")
        if state is not None:
            jobs.setdefault(tuple(state["pids"]), []).append(rank)
    return jobs


def one_job(pid: int | None = None) -> list[MonitorSocket]:
    """The ranks of the one job that runs, or of the one with this process in it."""
    chosen = [
        ranks
        for pids, ranks in jobs().items()
        if pid is None or pid in pids or _launched_by(pid, ranks)
    ]
    if not chosen:
        raise BadArgument(
            "no job of this user on this host has monitor sockets; unisono run opens "
            "one for each rank, and other launchers do with UNISONO_MONITOR=1"
        )
    if len(chosen) > 1:
        some = ", ".join(str(ranks[0].pid) for ranks in chosen)
        raise BadArgument(f"several jobs run here: name one by a pid, as in {some}")
    return chosen[0]


def _launched_by(pid: int, ranks: list[MonitorSocket]) -> bool:
    """Whether a process is the parent of a job's ranks."""
    try:
        stat = Path(f"/proc/{ranks[0].pid}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == pid


def states(ranks: list[MonitorSocket]) -> dict[int, dict[str, Any] | None]:
    """Where each rank is; None for one that does not answer."""
    return {each.rank: ask(each, "state") for each in ranks}


def records(pid: int | None = None) -> dict[int, dict[str, Any]]:
    """The flight records of a job that runs, by rank, of those that answer."""
    answers = {each.rank: ask(each, "record") for each in one_job(pid)}
    return {rank: flight for rank, flight in answers.items() if flight is not None}
