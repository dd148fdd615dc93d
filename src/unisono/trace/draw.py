"""The recordings of all ranks as one trace: lanes, slices, and arrows for transfers.

Every rank is a process with these lanes (those of other communicators than the world
are "calls of tp" and so on):

    calls      each collective, from its beginning to its end
    arrival    from this rank's arrival to the last one's; named after the last rank
    sends      values put where others find them, and messages to other hosts
    receives   copies and reductions of what others have, and what they bring
    encoding   how long a step encoded what it made; shown at its end
    waiting    for another rank's step, or for those who still read at the end
    messages   send and recv
    calls on cuda, arrival on cuda
               the same of calls on a device, by its clock; when they were launched is
               told by their arguments
    ranges     what the user, or torch's profiler, gave a name

An arrow leads from where a rank made a value to where another took it. Which slice made
it is known, not guessed: a program reads every value from a place that one action of
one rank wrote. Clocks are rank 0's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unisono.chrome import Sheet, Slice
from unisono.dtypes import DTYPES, OPS
from unisono.runtime.call.notes import CallNames
from unisono.runtime.observe.recorder import STATES
from unisono.runtime.observe.tracing import (
    CALLED,
    KINDS,
    MOMENT,
    TracedCommunicator,
    TracePart,
)
from unisono.runtime.plan.plans import CODES
from unisono.schedule.program import Home

COLLECTIVE = "collective"
"""The category of the slices that are calls."""
_NAMES = list(CODES)
_DTYPES = list(DTYPES)
_WAITS = ("wait", "exit", "block")

Key = tuple[int, ...]


@dataclass(eq=False)
class _Producers:
    """Who made what, over all ranks: by communicator, call, piece, rank, and place."""

    windows: dict[Key, Slice] = field(default_factory=dict)
    codes: dict[Key, Slice] = field(default_factory=dict)
    outputs: dict[Key, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[Key, Slice] = field(default_factory=dict)
    arrivals: dict[Key, Slice] = field(default_factory=dict)
    on_device: dict[Key, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[Key, Slice] = field(default_factory=dict)
    pulls: list[tuple[Key, Slice, Any]] = field(default_factory=list)
    deliveries: list[tuple[Key, Slice, Any]] = field(default_factory=list)
    sends: dict[Key, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    recvs: dict[Key, list[Slice]] = field(default_factory=lambda: defaultdict(list))


def _seq(row: Any) -> int:
    """The number of a call, as far as moments know it."""
    return int(row["seq"]) & 0xFFFFFFFF


def _noted(row: Any) -> CallNames:
    """The names in the note of a call, where they are not known in full."""
    ends = np.cumsum(row["lengths"], dtype=int).tolist()
    texts = (row["text"][a:b] for a, b in zip([0, *ends], ends, strict=False))
    return CallNames(*(text.decode(errors="replace") for text in texts))


def draw(parts: Sequence[TracePart]) -> tuple[Sheet, int]:
    """The sheet, and the time on rank 0's clock at which it begins, in nanoseconds."""
    base = min((_first(part) for part in parts), default=0)
    sheet, made = Sheet(), _Producers()
    for part in sorted(parts, key=lambda p: p.rank):
        sheet.rank(part.rank, f"rank {part.rank} (pid {part.pid} on {part.host})")
        _RankTrack(sheet, made, part, part.clock[0] - base).draw()
    _join(sheet, made)
    for arrivals in made.on_device.values():
        _name_last(arrivals)
    return sheet, base


def _first(part: TracePart) -> int:
    calls = np.frombuffer(part.calls, CALLED)
    moments = np.frombuffer(part.moments, MOMENT)
    times = [*calls["begun"][:1], *moments["begin"][:1], *(s.begin for s in part.spans)]
    if calls.size:
        times.append(calls["begun"].min())
        times.extend(calls["created"][calls["device"] >= 0])
    if moments.size:
        times.append(moments["begin"].min())
    return int(min(times, default=0)) + part.clock[0]


class _RankTrack:
    """One rank's share of the sheet."""

    def __init__(
        self, sheet: Sheet, made: _Producers, part: TracePart, shift: int
    ) -> None:
        self.sheet, self.made, self.part, self.shift = sheet, made, part, shift

    def draw(self) -> None:
        for row in np.frombuffer(self.part.calls, CALLED):
            group = self.part.groups.get(int(row["communicator"]))
            if group is not None:
                self._call(row, group)
        for _, rows in self._together():
            self._action(rows)
        for span in self.part.spans:
            begin, end = self._times(span.begin, span.end)
            self.sheet.slice(
                *(self.part.rank, f"ranges of {span.thread}", span.name, begin, end),
                category=span.category,
            )

    def _together(self) -> Iterator[tuple[Key, list[Any]]]:
        """Moments; an action together with what it took from others or brought them."""
        actions: dict[Key, list[Any]] = {}
        for row in np.frombuffer(self.part.moments, MOMENT):
            kind = KINDS[row["kind"]]
            key = tuple(int(row[k]) for k in ("communicator", "seq", "piece", "action"))
            if kind in ("copy", "reduce"):
                actions[key] = [row]
            elif kind in ("pull", "deliver") and key in actions:
                actions[key].append(row)
            elif kind not in ("pull", "deliver"):
                self._moment(kind, row)
        yield from actions.items()

    def _times(self, begin: int, end: int) -> tuple[float, float]:
        return (int(begin) + self.shift) / 1e3, (int(end) + self.shift) / 1e3

    def _lane(self, lane: str, group: TracedCommunicator) -> str:
        return lane if group.agreed == 0 else f"{lane} of {group.name}"

    def _call(self, row: Any, group: TracedCommunicator) -> None:
        name = _NAMES[row["collective"]]
        begin, end = self._times(row["begun"], row["ended"])
        args = self._about(row, group, name)
        if row["device"] >= 0:
            self._call_on_device(row, group, (begin, end), args)
            return
        if name in ("send", "recv"):
            self._message(row, group, name, (begin, end), args)
            return
        made = self.sheet.slice(
            *(self.part.rank, self._lane("calls", group), name, begin, end),
            category=COLLECTIVE,
            args=args,
        )
        self.made.calls[group.agreed, _seq(row), self.part.rank] = made

    def _call_on_device(
        self,
        row: Any,
        group: TracedCommunicator,
        times: tuple[float, float],
        args: dict[str, object],
    ) -> None:
        """From its beginning on the device to its end; a captured one for an instant.

        How often a graph runs that is not known here, so it does not count as a call.
        """
        launched, _ = self._times(row["created"], row["created"])
        about = {
            "device": f"cuda:{row['device']}",
            "stream": hex(row["stream"]),
            "launched": launched,
        }
        captured = args["state"] == "captured"
        lane = self._lane("calls on cuda", group)
        self.sheet.slice(
            *(self.part.rank, lane, _NAMES[row["collective"]], *times),
            category="captured" if captured else COLLECTIVE,
            args={**args, **about},
        )

    def _about(
        self, row: Any, group: TracedCommunicator, name: str
    ) -> dict[str, object]:
        count, dtype = int(row["count"]), _DTYPES[row["dtype"]]
        names = self.part.names.get(int(row["fingerprint"])) or _noted(row)
        line = self.part.sites.get(int(row["site"]), [])
        return {
            "Collective name": name,
            "In msg nelems": count,
            "Out msg nelems": count,
            "dtype": dtype,
            "Group size": len(group.ranks),
            "Process Group Name": str(group.agreed),
            "Process Group Description": group.name,
            "Process Group Ranks": str(group.ranks),
            "Seq": _seq(row),
            "collective": name,
            "algorithm": names.algorithm,
            "codec": names.codec,
            "label": names.label,
            "shape": names.shape,
            "op": OPS[row["op"]],
            "root": int(row["root"]),
            "bytes": count * DTYPES[dtype].itemsize,
            "sent": int(row["sent"]),
            "state": STATES[row["state"]],
            "async": bool(row["queued"]),
            "queued_us": max(0, int(row["begun"]) - int(row["created"])) / 1e3,
            "line": f"{line[0][1]}:{line[0][2]}" if line else "",
        }

    def _message(
        self,
        row: Any,
        group: TracedCommunicator,
        name: str,
        times: tuple[float, float],
        args: dict[str, object],
    ) -> None:
        peer = int(row["peer"])
        there = group.ranks[peer] if peer >= 0 else -1
        label = f"send to {there}" if name == "send" else f"recv from {there}"
        made = self.sheet.slice(
            *(self.part.rank, self._lane("messages", group), label, *times),
            category="message",
            args={**args, "peer": there, "tag": int(row["tag"])},
        )
        if peer < 0 or STATES[row["state"]] != "completed":
            return
        ends = (self.part.rank, there) if name == "send" else (there, self.part.rank)
        book = self.made.sends if name == "send" else self.made.recvs
        book[group.agreed, *ends, int(row["tag"])].append(made)

    def _moment(self, kind: str, row: Any) -> None:
        group = self.part.groups.get(int(row["communicator"]))
        if group is None:
            return
        begin, end = self._times(row["begin"], row["end"])
        peer = int(row["peer"])
        there = group.ranks[peer] if peer >= 0 else -1
        seq, rank = _seq(row), self.part.rank
        about: dict[str, object] = {"seq": seq, "kind": kind, "peer": there}
        call = group.agreed, seq
        if row["device"]:  # it does not know who was last
            about["device"] = "cuda"
            self.made.on_device[call].append(
                self._put(
                    "arrival on cuda", group, "all had arrived", begin, end, about
                )
            )
        elif kind == "arrival":
            label = f"until rank {there} arrived" if there >= 0 else "all had arrived"
            self.made.arrivals[*call, rank] = self._put(
                "arrival", group, label, begin, end, about
            )
        elif kind == "send":
            about |= {"bytes": int(row["bytes"]), "chunk": int(row["chunk"])}
            sent = self._put("sends", group, f"to {there}", begin, end, about)
            key = (*call, int(row["piece"]), rank, there, int(row["index"]))
            self.made.messages[key] = sent
        elif kind == "encode":
            about |= {"bytes": int(row["bytes"])}
            self._put("encoding", group, "encode", begin, end, about)
        elif kind in _WAITS:
            label = "for its call" if kind == "block" else f"for rank {there}"
            self._put("waiting", group, label, begin, end, about)

    def _put(
        self,
        lane: str,
        group: TracedCommunicator,
        name: str,
        begin: float,
        end: float,
        args: dict[str, object],
    ) -> Slice:
        return self.sheet.slice(
            self.part.rank,
            self._lane(lane, group),
            name,
            begin,
            end,
            category=lane,
            args=args,
        )

    def _action(self, rows: list[Any]) -> None:
        """A copy or a reduction; what it read of others, and brought to them."""
        row = rows[0]
        group = self.part.groups.get(int(row["communicator"]))
        if group is None:
            return
        begin, end = self._times(row["begin"], row["end"])
        pulls = [r for r in rows[1:] if KINDS[r["kind"]] == "pull"]
        brings = [r for r in rows[1:] if KINDS[r["kind"]] == "deliver"]
        chunk, rank = int(row["chunk"]), self.part.rank
        peers = [group.ranks[r["peer"]] for r in pulls or brings]
        peer_list = ", ".join(map(str, peers))
        name = (
            f"from {peer_list}" if pulls else f"to {peer_list}" if brings else "publish"
        )
        about: dict[str, object] = {
            "seq": _seq(row),
            "kind": KINDS[row["kind"]],
            "step": int(row["action"]),
            "chunk": chunk,
            "piece": int(row["piece"]),
            "bytes": int(row["bytes"]),
            "peer": peers[0] if len(peers) == 1 else peers,
        }
        lane = "receives" if pulls else "sends"
        made = self._put(lane, group, name, begin, end, about)
        call = group.agreed, _seq(row)
        place = (*call, int(row["piece"]), rank)
        if row["index"] >= 0:
            self.made.windows[*place, int(row["index"])] = made
        if row["code"] >= 0:
            self.made.codes[*place, int(row["code"])] = made
        if row["output"] >= 0:
            self.made.outputs[*place, int(row["output"])].append(made)
        for r in pulls:
            self.made.pulls.append(((*call, group.ranks[r["peer"]], rank), made, r))
        for r in brings:
            self.made.deliveries.append(
                ((*call, group.ranks[r["peer"]]), made, r),
            )


def _name_last(arrivals: Sequence[Slice]) -> None:
    """Name the arrivals of one call after the rank that came last."""
    last = max(arrivals, key=lambda s: s.begin)
    for each in arrivals:
        if each is not last:
            each.name = f"until rank {last.rank} arrived"
            each.args = {**each.args, "peer": last.rank}


def _join(sheet: Sheet, made: _Producers) -> None:
    """Draw the arrows whose both ends were recorded."""
    for (agreed, seq, src, dst), came, row in made.pulls:
        sent = _source(made, (agreed, seq), src, dst, came, row)
        if sent is not None:
            sheet.arrow(sent, came, int(row["bytes"]))
    for (agreed, seq, dst), sent, row in made.deliveries:
        call = made.calls.get((agreed, seq, dst))
        if call is not None:
            sheet.arrow(sent, _brought(sheet, sent, call), int(row["bytes"]))
    for key, sends in made.sends.items():
        recvs = made.recvs.get(key, [])
        # Messages keep their order; if some are missing it is unknown which.
        if len(recvs) == len(sends):
            for sent, came in zip(sends, recvs, strict=True):
                nbytes = sent.args["bytes"]
                sheet.arrow(sent, came, nbytes if isinstance(nbytes, int) else 0)


def _brought(sheet: Sheet, sent: Slice, call: Slice) -> Slice:
    """What `sent` wrote where the other rank's result is: it came as it was written."""
    _, of, group = sent.lane.partition(" of ")
    return sheet.slice(
        *(call.rank, f"receives{of}{group}", f"from {sent.rank}", sent.begin, sent.end),
        category="brought",
        args={**sent.args, "kind": "brought", "peer": sent.rank},
    )


def _source(
    made: _Producers, call: tuple[int, int], src: int, dst: int, came: Slice, row: Any
) -> Slice | None:
    """The slice of `src` that made what `dst` took."""
    index, piece = int(row["index"]), int(row["piece"])
    place = (*call, piece, src)
    if row["home"] == Home.STREAM:
        return made.messages.get((*place, dst, index))
    if row["home"] == Home.WINDOW:
        return made.windows.get((*place, index))
    if row["home"] == Home.CODE:
        return made.codes.get((*place, index))
    if row["home"] == Home.OUTPUT:
        before = [s for s in made.outputs.get((*place, index), []) if s.end <= came.end]
        if before:  # the latest, since a rank that overwrites it waits for its readers
            return max(before, key=lambda s: s.end)
    return made.arrivals.get((*call, src))
