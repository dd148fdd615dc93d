"""What a schedule costs, counted from its steps and set against the least possible.

The model is the common one: every rank can send one message and receive one at a time,
and a step lasts until its busiest rank is done. All chunks that go from one rank to
another in one step are one message. So

    rounds     messages one after the other: the latency term
    span       what passes through the busiest rank, summed over steps: bandwidth
    work       what the busiest rank adds up, summed over steps: reduction

Sizes are fractions of one rank's buffer, or in the unit of the given count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument
from unisono.schedule.collective import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    REDUCE,
    Ints,
)
from unisono.schedule.counts import num_peers, sent_between
from unisono.schedule.memory import memory_beyond_buffers
from unisono.schedule.oracle import checked_steps
from unisono.schedule.protocol import ReadableSchedule
from unisono.units import html_table

Floats = NDArray[np.float64]

MAX_PAIRS = 4096
"""Up to how many ranks the table of bytes from rank to rank is made."""

MAX_PAIRS_IN_FILES = 64


@dataclass(frozen=True)
class Bound:
    """The least that any schedule for this contract needs, one message at a time."""

    rounds: int
    span: float
    work: float


@dataclass(frozen=True, eq=False)
class Cost:
    """The counts of one schedule; `sent`, `received` and `reduced` are per rank.

    `ports` is how many peers the busiest rank exchanges messages with in one step, at
    the most: with so many ports, a step is one round.
    """

    schedule: ReadableSchedule
    steps: int
    rounds: int
    ports: int
    messages: int
    transfers: int
    span: float
    work: float
    sent: Floats
    received: Floats
    reduced: Floats
    bound: Bound
    weight: Floats

    def __repr__(self) -> str:
        """What it means, in one line."""
        return (
            f"<Cost: {self.schedule.title}, {self.steps} steps, {self.rounds} rounds, "
            f"span {self.span:g}, work {self.work:g}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: each term, and how far it is from the lower bound."""
        facts = {
            name: f"{getattr(self, name):g}, {ratio:g} times the lower bound"
            for name, ratio in self.distance.items()
        }
        facts["messages"] = f"{self.messages:,} in {self.steps:,} steps"
        facts["sent by a rank"] = f"at most {max(self.sent, default=0.0):g} buffers"
        return html_table(self.schedule.title, facts)

    @cached_property
    def pairs(self) -> Floats:
        """How much goes from each rank to each, as an n × n table."""
        n = self.schedule.n
        if n > MAX_PAIRS:
            raise BadArgument(
                f"pairs: n = {n}, but the table is made for up to {MAX_PAIRS}"
            )
        return sent_between(self.schedule, np.arange(n), self.weight)

    @cached_property
    def memory(self) -> float:
        """The most that a rank holds besides its input and its result at one time."""
        return memory_beyond_buffers(self.schedule, self.weight)

    @property
    def distance(self) -> dict[str, float]:
        """How many times the lower bound each term is; 1 is optimal."""
        pairs = {
            "rounds": (self.rounds, self.bound.rounds),
            "span": (self.span, self.bound.span),
            "work": (self.work, self.bound.work),
        }
        return {k: _ratio(have, least) for k, (have, least) in pairs.items()}

    def as_dict(self) -> dict[str, object]:
        """Plain numbers, for JSON; the table of pairs only where it is readable."""
        small = self.schedule.n <= MAX_PAIRS_IN_FILES
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "ports": self.ports,
            "messages": self.messages,
            "transfers": self.transfers,
            "span": self.span,
            "work": self.work,
            "memory": self.memory,
            "sent": self.sent.tolist(),
            "received": self.received.tolist(),
            "reduced": self.reduced.tolist(),
            "pairs": self.pairs.tolist() if small else None,
            "distance": self.distance,
            "lower_bound": {
                "rounds": self.bound.rounds,
                "span": self.bound.span,
                "work": self.bound.work,
            },
        }


def _ratio(have: float, least: float) -> float:
    return have / least if least else (1.0 if not have else float("inf"))


def cost(
    schedule: ReadableSchedule, count: int | Sequence[int] | Ints | None = None
) -> Cost:
    """Count everything in one pass over the steps."""
    weight, unit = _weights(schedule, count)
    n = schedule.n
    steps = rounds = ports = messages = transfers = 0
    span = work = 0.0
    totals = np.zeros((3, n))
    for step in checked_steps(schedule):
        src, dst, chunk, mask, _ = step.flat()
        apart = src != dst
        size = weight[chunk]
        sent = np.bincount(src[apart], size[apart], minlength=n)
        received = np.bincount(dst[apart], size[apart], minlength=n)
        reduced = np.bincount(dst[mask], size[mask], minlength=n)
        out, in_ = num_peers(src[apart], dst[apart], n)
        steps += 1
        busiest = max(int(out.max()), int(in_.max()))
        rounds += busiest
        ports = max(ports, busiest)
        messages += int(out.sum())
        transfers += src.size
        span += max(sent.max(), received.max())
        work += reduced.max()
        totals += (sent, received, reduced)
    return Cost(
        schedule,
        steps,
        rounds,
        ports,
        messages,
        transfers,
        float(span) / unit,
        float(work) / unit,
        sent=totals[0] / unit,
        received=totals[1] / unit,
        reduced=totals[2] / unit,
        bound=lower_bound(schedule, weight / unit),
        weight=weight / unit,
    )


def _weights(
    schedule: ReadableSchedule, count: int | Sequence[int] | Ints | None
) -> tuple[Floats, int]:
    """The size of every slot in whole numbers, and how many of them are one unit.

    A temporary is as large as the chunk that it replaces.
    """
    contract, unit = schedule.contract, 1
    if schedule.collective is BARRIER:
        sizes = np.zeros(schedule.num_chunks)
    elif count is None:
        sizes, unit = np.ones(schedule.num_chunks), contract.chunks_per_rank
    else:
        sizes = contract.chunk_sizes(count).astype(np.float64)
    return np.resize(sizes, schedule.num_slots), unit


def lower_bound(schedule: ReadableSchedule, weight: Floats) -> Bound:
    """The least that every schedule of the contract needs.

    Rounds: the data of a rank at most doubles in a round. Span: what some rank must
    send or receive. Work: all but one contribution to everything must be added, by n
    ranks at best.
    """
    n = schedule.n
    if n == 1:
        return Bound(0, 0.0, 0.0)
    sizes = weight[: schedule.num_chunks]
    work = (n - 1) / n * float(sizes.sum()) if schedule.collective.reduces else 0.0
    return Bound((n - 1).bit_length(), _least_span(schedule, sizes), work)


def _least_span(schedule: ReadableSchedule, sizes: Floats) -> float:
    n, contract, what = schedule.n, schedule.contract, schedule.collective
    total = float(sizes.sum())
    chunk = np.arange(schedule.num_chunks)
    owner = contract.owner(chunk)
    if what in (BROADCAST, REDUCE):
        return total
    if what is ALL_REDUCE:
        return 2 * (n - 1) / n * total
    if what is ALL_TO_ALL:
        target = contract.target(chunk)
        moving = np.where(owner == target, 0.0, sizes)
        leaves = np.bincount(owner, moving, minlength=n)
        arrives = np.bincount(target, moving, minlength=n)
        return float(max(leaves.max(), arrives.max()))
    others = total - np.bincount(owner, sizes, minlength=n)
    return float(others[schedule.root] if what.rooted else others.max())
