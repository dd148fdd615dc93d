"""From times to rows.

The time of a round is that of its slowest rank: a collective is done when the last rank
is. The median over the rounds is reported. Single calls are timed in a
separate batch, again as the slowest rank's; with fewer than a hundred of them the 99th
percentile is the slowest call.

A ratio is the median, over the rounds, of our time over the best peer's in the same
round; the best peer is the one with the least median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

from unisono.cli._bench.cases import (
    IN_PLACE,
    OUT_OF_PLACE,
    TYPE_NAMES,
    Case,
    device_bytes,
)
from unisono.cli._bench.devices import DeviceUse

FLOOR_FROM = 1 << 20
"""Below this size caches, not memory, set the pace."""


@dataclass
class Timing:
    """What was measured of one system on one case; times in seconds."""

    rounds: list[float] = field(default_factory=list)
    wrong: int | None = None
    iterations: int = 0
    algorithm: str = ""
    refused: str = ""
    by_rank: list[list[float]] = field(default_factory=list)
    """Every single call of each rank."""

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return median(self.rounds) if self.rounds else math.nan


@dataclass
class BenchRow:
    """One line of the table: our times, the peers' and the memory's."""

    case: Case
    out_of_place: Timing | None
    in_place: Timing | None
    peers: dict[str, Timing] = field(default_factory=dict)
    floor_s: float = math.nan
    device: DeviceUse | None = None
    """None on the CPU."""

    @property
    def has_links(self) -> bool:
        """Whether ranks have links between them, to which a bus bandwidth applies."""
        return self.device is None or self.device.has_links

    @property
    def compared(self) -> Timing | None:
        """Our times in the place in which the peers are measured."""
        return self.in_place if self.case.compared == IN_PLACE else self.out_of_place

    @property
    def algorithm(self) -> str:
        """What ran."""
        return next((t.algorithm for t in (self.compared, *self._both()) if t), "")

    def _both(self) -> list[Timing]:
        return [t for t in (self.out_of_place, self.in_place) if t is not None]

    @property
    def best_peer(self) -> str:
        """The fastest of the peers that have the collective, or ""."""
        able = {name: t.seconds for name, t in self.peers.items() if t.rounds}
        return min(able, key=able.__getitem__) if able else ""

    @property
    def ratio(self) -> float:
        """Our time over the best peer's."""
        return self.ratio_to(self.best_peer)

    def ratio_to(self, peer: str) -> float:
        """Our time over that peer's, round by round."""
        ours = self.compared
        if not ours or peer not in self.peers:
            return math.nan
        pairs = zip(ours.rounds, self.peers[peer].rounds, strict=False)
        ratios = [mine / theirs for mine, theirs in pairs]
        return median(ratios) if ratios else math.nan

    @property
    def floor_share(self) -> float:
        """The share of the memory floor that is reached, in the compared place."""
        ours = self.compared
        if not ours or self.case.size < FLOOR_FROM or not self.floor_s:
            return math.nan
        return self.floor_s / ours.seconds

    def copy_share(self, place: str) -> float:
        """The share of the copy speed of the GPU that all ranks share."""
        times = self._placed()[place]
        if not self.device or not times or self.case.size < FLOOR_FROM:
            return math.nan
        moved = device_bytes(self.case, place)
        return moved / self.device.copy_speed / times.seconds

    @property
    def wrong(self) -> int:
        """Wrong elements in both places."""
        return sum(t.wrong or 0 for t in self._both())

    def bandwidths(self, times: Timing | None) -> tuple[float, float]:
        """Algorithm and bus bandwidth in GB/s; the latter where there are links."""
        if not times or not times.rounds or times.seconds <= 0:
            return math.nan, math.nan
        algbw = self.case.size / 1e9 / times.seconds
        return algbw, algbw * self.case.factor if self.has_links else math.nan

    def plain(self) -> dict[str, Any]:
        """The row as JSON: the keys of nccl-tests, then ours."""
        case, times = self.case, self.compared
        plain: dict[str, Any] = {
            "size": case.size,
            "count": case.count,
            "type": TYPE_NAMES.get(case.dtype, case.dtype),
            "redop": case.redop,
            "root": case.shown_root,
        }
        for place, ours in self._placed().items():
            plain[place] = self._plain_times(ours, place)
            if ours and ours.by_rank:
                plain[f"{place}_per_iter"] = per_iteration(ours.by_rank)
        plain["actual_iterations"] = times.iterations if times else 0
        plain["experiment_name"] = case.collective
        return plain | self._plain_ours()

    def _placed(self) -> dict[str, Timing | None]:
        return {OUT_OF_PLACE: self.out_of_place, IN_PLACE: self.in_place}

    def _plain_times(self, times: Timing | None, place: str) -> dict[str, Any] | None:
        if not times or not times.rounds:
            return None
        algbw, busbw = self.bandwidths(times)
        plain = {
            "time": times.seconds * 1e6,
            "alg_bw": algbw,
            "bus_bw": _number(busbw),
            "nwrong": times.wrong,
        }
        if self.device:
            plain["copy_share"] = _number(self.copy_share(place))
        return plain

    def _plain_ours(self) -> dict[str, Any]:
        rounds = {p: _micro(t.rounds) for p, t in self._placed().items() if t}
        plain: dict[str, Any] = {
            "collective": self.case.collective,
            "n": self.case.n,
            "dtype": self.case.dtype,
            "algorithm": self.algorithm,
            "rounds_us": rounds,
            "floor_us": _number(self.floor_s * 1e6),
            "floor_share": _number(self.floor_share),
        }
        if self.peers:
            plain |= {
                "compared": self.case.compared,
                "peers": {name: _plain_peer(t) for name, t in self.peers.items()},
                "best_peer": self.best_peer or None,
                "ratio": _number(self.ratio),
                "ratios": {p: _number(self.ratio_to(p)) for p in self.peers},
            }
        return plain


def per_iteration(by_rank: list[list[float]]) -> dict[str, Any]:
    """Statistics of single calls, under the keys of nccl-tests."""
    slowest: list[float] = [max(times) for times in zip(*by_rank, strict=True)]
    ordered, count = sorted(slowest), len(slowest)
    mean, spread = fmean(slowest), pstdev(slowest)

    def percentile(percent: int) -> float:
        return ordered[min(count - 1, -(-count * percent // 100) - 1)]

    return {
        "skipped_iterations": 0,
        "min_us": ordered[0] * 1e6,
        "max_us": ordered[-1] * 1e6,
        "avg_us": mean * 1e6,
        "p50_us": ordered[count // 2] * 1e6,
        "p95_us": percentile(95) * 1e6,
        "p99_us": percentile(99) * 1e6,
        "stdev_us": spread * 1e6,
        "cv_pct": 100 * spread / mean if mean else 0.0,
        "times_us": _micro(slowest),
        "per_process_max_times_us": [_micro(times) for times in by_rank],
    }


def _plain_peer(times: Timing) -> dict[str, Any]:
    return {
        "time": _number(times.seconds * 1e6),
        "nwrong": times.wrong,
        "actual_iterations": times.iterations,
        "rounds_us": _micro(times.rounds),
        "refused": times.refused or None,
    }


def _micro(seconds: list[float]) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
