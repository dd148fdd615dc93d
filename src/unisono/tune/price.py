"""The predicted time of a schedule here, from the fitted costs.

A step takes the longer of two concurrent times: that of the busiest host's bytes on the
links between hosts, with a cost for each further peer of a rank; and that of the
busiest rank's bytes within its host. Where ranks outnumber cores they share them, so
the time within a host is at least that of all its bytes divided by its cores. The cost
of reductions is added. Steps follow each other.

The model is rough on purpose: it decides which candidates are raced, not which wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.algorithms import schedule
from unisono.schedule.collective import Ints
from unisono.schedule.traffic import traffic
from unisono.tune.fit import Fit


@dataclass(frozen=True)
class LinkCosts:
    """Fits by class of links; seconds for each peer more, and for each byte added."""

    inside: Fit | None
    across: Fit | None
    message: float = 0.0
    added_byte: float = 0.0
    cores: int = 1

    def seconds(
        self, collective: str, algorithm: str, hosts: tuple[int, ...], nbytes: int
    ) -> float:
        """What a call of so many bytes would take."""
        unit, rows = _counted(collective, algorithm, hosts, self.cores)
        buffers = nbytes / unit
        return math.fsum(
            self._step(crossing * buffers, taken * buffers, added * buffers, peers)
            for crossing, taken, added, peers in rows
        )

    def _step(self, crossing: float, taken: float, added: float, peers: float) -> float:
        inside = self.inside.at(taken) if self.inside else 0.0
        across = 0.0
        if self.across and peers:
            across = self.across.at(crossing) + self.message * (peers - 1)
        return max(inside, across) + self.added_byte * added


@lru_cache(maxsize=4096)
def _counted(
    collective: str, algorithm: str, hosts: tuple[int, ...], cores: int
) -> tuple[float, list[tuple[float, ...]]]:
    """Of each step what crosses, is taken in and added, in chunks, and the peers."""
    counted = traffic(schedule(collective, algorithm, len(hosts)), hosts)
    crossing = np.maximum(counted.leaves, counted.enters).max(axis=1, initial=0)
    host = np.asarray(hosts)
    columns = (
        crossing.astype(float),
        _busiest(counted.taken, host, cores),
        _busiest(counted.added, host, cores),
        counted.peers.max(axis=1, initial=0).astype(float),
    )
    return counted.unit, list(zip(*(c.tolist() for c in columns), strict=True))


def _busiest(
    rows: Ints, host: Ints, cores: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of the busiest rank, or of all ranks of a host over its cores."""
    most = rows.max(axis=1, initial=0).astype(np.float64)
    for number in np.unique(host):
        together = rows[:, host == number].sum(axis=1) / cores
        most = np.maximum(most, together)
    return np.asarray(most)
