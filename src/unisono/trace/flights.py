"""Flight records, read: what each rank called, from which line, and where it stands.

The files are those that ranks write (UNISONO_FLIGHT_DIR) or that were asked of a job
that runs. Their field names are those of PyTorch's flight recorder. `to_pickle` writes
them the way its own analyser, torchfrtrace, wants to read them.
"""

from __future__ import annotations

import pickle
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from unisono.errors import BadArgument
from unisono.runtime.observe.failures import ON_DEVICE
from unisono.schedule.collective import REDUCING, ROOTED

_OURS = str(Path(__file__).parents[1])
_LIBRARY = sysconfig.get_path("stdlib")
_ON_DEVICES = 1 << 30
"""What is added to a communicator's number for its calls on devices."""


class StackFrame(msgspec.Struct, frozen=True):
    """A function, its file, a line."""

    name: str
    filename: str
    line: int

    def __str__(self) -> str:
        """As in "train.py:17 in step"."""
        inside = "" if self.name == "<module>" else f" in {self.name}"
        return f"{Path(self.filename).name}:{self.line}{inside}"

    @property
    def is_users(self) -> bool:
        """Whether it is neither ours, nor torch's, nor of Python's library."""
        if "site-packages" in self.filename:
            return "/torch/" not in self.filename
        return not self.filename.startswith((_OURS, _LIBRARY, "<frozen"))


def users(frames: Sequence[StackFrame]) -> StackFrame | None:
    """The innermost frame of the user's own code, or else the innermost of all."""
    return next((f for f in frames if f.is_users), frames[0] if frames else None)


class RecordedCall(msgspec.Struct):
    """A call, as a rank recorded it."""

    record_id: int
    pg_id: int
    process_group: list[str]
    collective_seq_id: int
    profiling_name: str
    is_p2p: bool
    algorithm: str
    label: str
    op: str
    root: int
    input_dtypes: list[str]
    input_sizes: list[list[int]]
    state: str
    time_created_ns: int
    frames: list[StackFrame] = []
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    shape: str = ""
    content: str = ""
    device: str | None = None

    @property
    def what(self) -> str:
        """The call in words, as in errors."""
        count = self.input_sizes[0][0]
        words = []
        if self.profiling_name != "barrier":
            elements = self.shape if "," in self.shape else f" × {count}"
            words.append(f"{self.input_dtypes[0]}{elements}")
        if self.profiling_name in REDUCING:
            words.append(self.op)
        if self.profiling_name in ROOTED:
            words.append(f"root {self.root}")
        there = f" {ON_DEVICE}" if self.device else ""
        label = f" for {self.label}" if self.label else ""
        return f"{self.profiling_name}({', '.join(words)}){there}{label}"

    @property
    def came_ns(self) -> int | None:
        """When the rank came to it; on a device that is known of traced calls only."""
        return self.time_discovered_started_ns if self.device else self.time_created_ns

    @property
    def line(self) -> StackFrame | None:
        """Where the user made it, if that was recorded."""
        return users(self.frames)

    @property
    def at(self) -> str:
        """The same in words."""
        return str(self.line) if self.line else "a line that was not recorded"


class ThreadStack(msgspec.Struct):
    """Where a thread stood when the record was written."""

    thread: str
    main: bool
    frames: list[StackFrame]
    current: bool = False


class ReportedError(msgspec.Struct):
    """The error that a rank raised."""

    type: str = ""
    communicator: str = ""
    call: str = ""
    ranks: list[int] = []
    collective: str = ""
    seq: int = 0
    on_device: bool = False


class CommunicatorStatus(msgspec.Struct):
    """What a communicator is."""

    name: str
    desc: str
    ranks: str


class FlightRecord(msgspec.Struct, dict=True):
    """The flight record of one rank."""

    rank: int
    world_size: int
    pid: int
    host: str
    reason: str
    entries: list[RecordedCall]
    stacks: list[ThreadStack]
    pg_config: dict[str, CommunicatorStatus]
    error: ReportedError = msgspec.field(default_factory=ReportedError)
    time_ns: int = 0
    clock_ns: int = 0

    @cached_property
    def calls(self) -> dict[tuple[str, bool], dict[int, RecordedCall]]:
        """The collectives, by communicator and sequence number.

        Those on a device are counted apart; those captured for a graph have no number.
        """
        calls: dict[tuple[str, bool], dict[int, RecordedCall]] = {}
        for entry in self.entries:
            if not entry.is_p2p and entry.collective_seq_id:
                key = entry.process_group[0], entry.device is not None
                calls.setdefault(key, {})[entry.collective_seq_id] = entry
        return calls

    @property
    def failed_at(self) -> str:
        """The line of the call that failed, also of one that was refused."""
        frames = (users(s.frames) for s in self.stacks if s.current)
        return str(next(frames, None) or "a line that was not recorded")

    @property
    def stands(self) -> StackFrame | None:
        """Where its Python stood: of the main thread, the user's innermost line."""
        return next((users(s.frames) for s in self.stacks if s.main), None)


@dataclass(frozen=True)
class GroupInfo:
    """A communicator: its name for people, and its ranks in the world."""

    name: str
    ranks: tuple[int, ...]


def groups(flights: Iterable[FlightRecord]) -> dict[str, GroupInfo]:
    """The communicators of the records, by the number that all ranks have."""
    groups_: dict[str, GroupInfo] = {}
    for flight in flights:
        for status in flight.pg_config.values():
            ranks = msgspec.json.decode(status.ranks, type=tuple[int, ...])
            groups_[status.name] = GroupInfo(status.desc, ranks)
    return groups_


def read(folder: Path) -> dict[int, FlightRecord]:
    """The flight records in a folder, by rank; of several by one rank, the latest."""
    if not folder.is_dir():
        raise BadArgument(f"{folder}: expected a folder with flight records")
    flights: dict[int, FlightRecord] = {}
    for file in sorted(folder.glob("unisono-rank*.json")):
        try:
            flight = msgspec.json.decode(file.read_bytes(), type=FlightRecord)
        except (msgspec.DecodeError, msgspec.ValidationError) as why:
            raise BadArgument(f"{file}: not a flight record: {why}") from why
        known = flights.get(flight.rank)
        if known is None or known.time_ns < flight.time_ns:
            flights[flight.rank] = flight
    if not flights:
        raise BadArgument(
            f"{folder}: no flight records there (unisono-rank*.json); "
            "unisono run --records DIR has every rank write one"
        )
    return flights


def write(records: Mapping[int, Any], folder: Path) -> None:
    """Write records that were asked of a job, as the ranks themselves would."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, flight in records.items():
        file = folder / f"unisono-rank{rank}-{flight['pid']}.json"
        file.write_bytes(msgspec.json.encode(flight))


def to_pickle(folder: Path, into: Path) -> list[Path]:
    """The same records for torchfrtrace: one pickle per rank, named after it."""
    into.mkdir(parents=True, exist_ok=True)
    files = []
    for rank, flight in read(folder).items():
        source = folder / f"unisono-rank{rank}-{flight.pid}.json"
        record = msgspec.json.decode(source.read_bytes())
        record["version"] = "2.10"
        members = {name: group.ranks for name, group in groups([flight]).items()}
        record["pg_config"] = {s["name"]: s for s in record["pg_config"].values()}
        record["entries"] = [e for e in record["entries"] if e["state"] != "captured"]
        for entry in record["entries"]:
            ranks = members.get(entry["process_group"][0], ())
            if entry.get("device"):
                _set_apart(entry, record["pg_config"])
            _as_torch(entry, ranks, rank)
            entry["time_created_ns"] += record["clock_ns"]
        file = into / f"rank_{rank}"
        file.write_bytes(pickle.dumps(record))
        files.append(file)
    return files


def _set_apart(entry: dict[str, Any], config: dict[str, Any]) -> None:
    """Give a communicator's calls on devices, which are counted apart, their group."""
    name, description = entry["process_group"]
    known = config.get(name)
    apart, description = str(int(name or 0) ^ _ON_DEVICES), f"{description} on cuda"
    entry["process_group"] = [apart, description]
    if known is not None:
        config[apart] = {**known, "name": apart, "desc": description}


def _as_torch(entry: dict[str, Any], members: Sequence[int], rank: int) -> None:
    """Change a record to what torchfrtrace expects.

    It knows a few libraries by name, of which one is used here; each rank's own sizes;
    the ends of a message as part of its name; and no calls that have failed.
    """
    name, (count,) = entry["profiling_name"], entry["input_sizes"][0]
    share = [[count // max(1, len(members))]]
    if name in ("all_gather", "gather"):
        entry["input_sizes"] = share
    elif name in ("reduce_scatter", "scatter"):
        entry["output_sizes"] = share
    if entry["is_p2p"]:
        me = members.index(rank) if rank in members else 0
        peer = entry["peer"] or 0
        name += f" {me}->{peer}" if name == "send" else f" {me}<-{peer}"
    entry["profiling_name"] = f"gloo:{name}"
    entry["pg_id"] = int(entry["process_group"][0] or 0) % (1 << 31)
    if entry["state"] == "failed":
        entry["state"] = "started"
