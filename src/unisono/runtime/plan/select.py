"""The choice of algorithm, if the caller names none.

The choice is a pure function of what all ranks know: the collective, its bytes, and the
host of each rank. So all ranks always choose the same.

- On one host every rank can read every other's memory, and the fewest passes over
  memory win: small calls in one step, large ones with a part for each rank.
- Where every rank has a host of its own, the candidates are compared by the times that
  `predict.py` predicts, with the links as they were probed when the ranks met. Of few
  ranks those that are predicted to be quickest are simulated (`simulated.py`), and the
  quickest by that is chosen.
- Where hosts have several ranks, so are hierarchical ones, made for the placement: data
  crosses the network once, and large calls are cut into segments, so that communication
  within hosts overlaps with the network.

Reproducible calls reduce in rank order in one pass, and so choose as on one host,
whatever the placement.

Where `unisono tune` has measured such a call, the fastest algorithm is chosen instead:
the table is rank 0's, and all ranks agree on it at start.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.algorithms import schedule as make_schedule
from unisono.algorithms.choices import chosen_from, on_two_levels, spelled
from unisono.errors import BadArgument, NotOffered, UnsupportedWorld
from unisono.runtime.plan.predict import MODEL, CostModel, predicted, step_costs
from unisono.runtime.plan.simulated import can_simulate, simulated
from unisono.runtime.plan.tuned import Tuned, TunedRow
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.placement import numbered
from unisono.units import format_bytes, format_seconds

VARIABLE = "UNISONO_ALGORITHM"


@dataclass(frozen=True)
class AlgorithmChoice:
    """An algorithm, why it was chosen, and the second best.

    `by` is what chose: the caller, the variable, a rule, the model or the table. `row`
    is that of the table; `predicted` are the model's seconds, 0 without a prediction.
    """

    algorithm: str
    why: str
    runner_up: str = ""
    by: str = "rule"
    predicted: float = 0.0
    runner_up_predicted: float = 0.0
    row: TunedRow | None = None


ALL_AT_ONCE = {2: 16 << 10, 3: 8 << 10, 4: 8 << 10}
"""By number of ranks: up to this many bytes each rank reduces everything itself."""
SHARED_OUT_FROM = 32 << 10
"""From this many bytes on the ranks share the work of the root."""


_RUNNER_UP = {"gather": "tree", "scatter": "tree", "barrier": "dissemination"}


_INSIDE_FIRST = ("reduce", "gather", "reduce_scatter", "all_to_all")

SIMILAR = 0.02
"""Predicted times closer than this are equal: then fewer steps win."""
MOST_SIMULATED = 8
"""So many of the candidates that are predicted to be quickest are simulated, of more
than 16 ranks fewer,"""
WITHIN = 2.0
"""if they are predicted to take at most so many times as long as the quickest."""
SIZE_BITS = 4
"""Sizes are rounded to so many binary digits, so that few are simulated."""


def choose(
    collective: str,
    nbytes: int,
    n: int,
    *,
    named: str | None,
    reproducible: bool,
    hosts: Sequence[int] | None = None,
    tuned: Tuned | None = None,
    itemsize: int = 0,
    model: CostModel | None = None,
) -> AlgorithmChoice:
    """The algorithm for a call of `nbytes` (of one rank's whole buffer).

    `hosts` is the host of every rank, in rank order; None for one host. `tuned` is the
    table that the ranks have agreed on, if any; for reductions its rows depend on
    `itemsize`, the bytes of an element. `model` is that of the links between hosts,
    if they were probed.
    """
    if hosts is not None and len(hosts) != n:
        raise BadArgument(f"hosts: expected one for each of {n} ranks, got {hosts}")
    if named:
        return AlgorithmChoice(named, "the caller named it", by="caller")
    if not reproducible and (chosen := by_variable(collective)):
        return chosen
    if tuned is not None and not reproducible:
        row = tuned.row(collective, nbytes, n, hosts, itemsize)
        if row is not None:
            return _by_table(row)
    if hosts is None or len(set(hosts)) == 1:
        return _on_one_host(collective, nbytes, n)
    if reproducible:
        found = _on_one_host(collective, nbytes, n).algorithm
        return AlgorithmChoice(
            found, "reproducible: one pass in rank order, on any hosts"
        )
    return _across_hosts(collective, nbytes, numbered(hosts), model or MODEL)


def by_variable(collective: str) -> AlgorithmChoice | None:
    """The choice by UNISONO_ALGORITHM, if it names an algorithm for this collective."""
    value = os.environ.get(VARIABLE, "")
    found = _named_in(value, collective) if value else ""
    return (
        AlgorithmChoice(found, f"{VARIABLE}={value}", by="variable") if found else None
    )


def _by_table(row: TunedRow) -> AlgorithmChoice:
    why = f"tuned: at {format_bytes(row.nbytes)} it took {format_seconds(row.measured)}"
    if row.runner_up:
        why += f", {row.runner_up} {format_seconds(row.runner_up_measured)}"
    times = row.predicted, row.runner_up_predicted
    return AlgorithmChoice(row.algorithm, why, row.runner_up, "table", *times, row)


def _on_one_host(collective: str, nbytes: int, n: int) -> AlgorithmChoice:
    limit = ALL_AT_ONCE.get(n, 4 << 10 if n <= 8 else 1 << 10)
    size = format_bytes(nbytes)
    if collective == "all_reduce":
        if nbytes <= limit:
            why = f"{size}, at most {format_bytes(limit)}: one step costs least"
            return AlgorithmChoice("naive", why, "direct")
        why = f"{size}, above {format_bytes(limit)}: every rank adds its share"
        return AlgorithmChoice("direct", why, "ring")
    if collective == "reduce" and nbytes >= SHARED_OUT_FROM:
        return AlgorithmChoice(
            "direct+direct", f"{size}: every rank adds its share", "naive"
        )
    if collective == "broadcast" and n <= 3 and nbytes >= SHARED_OUT_FROM:
        why = f"{size} among {n}: the root brings a part, the others come for the rest"
        return AlgorithmChoice("direct+direct", why, "naive")
    if collective in ("reduce", "broadcast"):
        return AlgorithmChoice(
            "naive", "each rank reads the others' memory itself", "tree"
        )
    runner_up = _RUNNER_UP.get(collective, "ring")
    return AlgorithmChoice(
        "direct", "each rank reads what it needs where it lies", runner_up
    )


@lru_cache(maxsize=1024)
def _across_hosts(
    collective: str, nbytes: int, hosts: tuple[int, ...], model: CostModel
) -> AlgorithmChoice:
    candidates = tuple(chosen_from(collective, hosts))
    return _quickest(collective, nbytes, hosts, candidates, model)


@lru_cache(maxsize=1024)
def quickest(
    collective: str,
    nbytes: int,
    hosts: tuple[int, ...],
    by: tuple[str, ...],
    model: CostModel = MODEL,
) -> AlgorithmChoice:
    """The fastest hierarchical algorithm, by these algorithms inside and across."""
    return _quickest(collective, nbytes, hosts, tuple(on_two_levels(hosts, by)), model)


def _quickest(
    collective: str,
    nbytes: int,
    hosts: tuple[int, ...],
    candidates: tuple[tuple[str, int], ...],
    model: CostModel,
) -> AlgorithmChoice:
    """The fastest candidate, as expected; of similar ones that with fewest steps."""
    times = _expected(collective, _rounded(nbytes), hosts, candidates, model)
    limit = (1 + SIMILAR) * min(times.values())
    chosen = min(
        (c for c in times if times[c] <= limit),
        key=lambda c: len(step_costs(collective, *c, hosts, model)),
    )
    others = [c for c in times if c[0] != chosen[0]] or [
        c for c in times if c != chosen
    ]
    why = (
        f"{_describe_hosts(hosts)}, {format_bytes(nbytes)}: "
        f"{_describe_algorithm(collective, *chosen)}; "
        f"expected to take {times[chosen] * 1e6:.0f} µs"
    )
    second = min(others, key=times.__getitem__)
    both = times[chosen], times[second]
    return AlgorithmChoice(spelled(*chosen), why, spelled(*second), "model", *both)


def _rounded(nbytes: int) -> int:
    """The nearest number with few digits, in binary: up to 6 % more or less."""
    lost = max(0, nbytes.bit_length() - SIZE_BITS)
    return (nbytes + (1 << lost >> 1)) >> lost << lost


@lru_cache(maxsize=1024)
def _expected(
    collective: str,
    nbytes: int,
    hosts: tuple[int, ...],
    candidates: tuple[tuple[str, int], ...],
    model: CostModel,
) -> dict[tuple[str, int], float]:
    """The seconds of candidates: of the best ones as simulated, if ranks are few."""
    times = {c: predicted(collective, *c, hosts, nbytes, model) for c in candidates}
    if not can_simulate(len(hosts)):
        return times
    limit = WITHIN * min(times.values())
    best = sorted(candidates, key=times.__getitem__)
    some = {c for k, c in enumerate(best) if k < 2 or times[c] <= limit}
    some &= set(best[: min(MOST_SIMULATED, 16 * MOST_SIMULATED // len(hosts))])
    return {
        c: simulated(collective, *c, hosts, nbytes, model)
        for c in candidates
        if c in some
    }


def _describe_hosts(hosts: tuple[int, ...]) -> str:
    """As in "2 hosts of 4 ranks" or "3 hosts of 5, 4 and 4 ranks"."""
    sizes = list(Counter(hosts).values())
    if len(set(sizes)) == 1:
        return f"{len(sizes)} hosts of {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
    if len(sizes) > 4:
        return f"{len(sizes)} hosts of {min(sizes)} to {max(sizes)} ranks"
    *most, last = map(str, sizes)
    return f"{len(sizes)} hosts of {', '.join(most)} and {last} ranks"


def _describe_algorithm(collective: str, algorithm: str, segments: int) -> str:
    """A short description of the algorithm."""
    if not algorithm.startswith("hierarchical"):
        return f"{algorithm}, straight from rank to rank"
    inside, _, across = algorithm.rpartition("by=")[2].partition("/")
    across = across.partition(":")[0]
    if collective == "all_reduce" and inside == "direct":
        done = f"share out inside, {across} across, collect inside"
    elif collective == "all_reduce":
        done = f"add up inside, {across} across, hand out inside"
    elif collective in _INSIDE_FIRST:
        done = f"{inside} inside, then {across} across"
    else:
        done = f"{across} across, then {inside} inside"
    return done if segments == 1 else f"{done}, in {segments} segments that overlap"


def _named_in(variable: str, collective: str) -> str:
    """The algorithm that the variable names for a collective, or an empty string.

    "ring" is for every collective that has it; "all_reduce=ring;reduce=tree" for these.
    """
    for part in filter(None, (p.strip() for p in variable.split(";"))):
        name, equals, algorithm = part.partition("=")
        if equals and name in COLLECTIVES:
            if name == collective:
                return algorithm
        elif _offered(part, collective):
            return part
    return ""


@lru_cache(maxsize=256)
def _offered(algorithm: str, collective: str) -> bool:
    """Whether a collective has this algorithm; BadArgument if none does."""
    for name in (collective, *COLLECTIVES):
        try:
            make_schedule(name, algorithm, 2)
        except NotOffered:
            continue
        except UnsupportedWorld:  # it exists, but not for two ranks
            pass
        return name == collective
    raise BadArgument(
        f"{VARIABLE}={algorithm}: no collective has such an algorithm; "
        "see unisono algorithms"
    )
