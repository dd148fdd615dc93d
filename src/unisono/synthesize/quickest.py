"""`quickest`: the schedule of least time for few ranks and small buffers, by search.

For small buffers latency decides, and trees that fill links are too deep. So what is
searched for here is who sends to whom in which step, in the model of the simulator: a
message takes the overhead of its sender, the time of its bytes on the narrowest link of
its route, and the latencies of the route; a link serves one step after the other.

The search begins with what the algorithms of the library come to on this topology, and
with a tree from each rank along the quickest ways. Then messages are added, taken away,
turned to other ranks and moved to other steps, as long as that helps, and for a while
where it does not (simulated annealing, with fixed numbers by chance: the result is
always the same). `least` says what no schedule can be below.

The messages that are searched through carry all that helps the receiver, so algorithms
that send smaller parts are not among them. If one of the library is quicker than what
was found, it is the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from unisono.algorithms import schedule as make
from unisono.errors import BadArgument, NotOffered, UsageError
from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    Collective,
    Contract,
)
from unisono.schedule.collective import collective as find_collective
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, copy_step, reduce_step, together
from unisono.simulate.candidates import candidates, fitted
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.events import by_events
from unisono.simulate.messages import chunk_bytes
from unisono.simulate.steps import by_steps
from unisono.synthesize.anneal import CHANGES, improved
from unisono.synthesize.plays import Costs, Goal, Message, Plan, Played
from unisono.topology import Topology, parse
from unisono.topology.topology import Floats

NAME = "searched"
SEARCHED = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, BARRIER)
"""The collectives that are searched for."""
MOST_RANKS = 8
_EQUAL = 1e-9
"""By which part times may differ that are the same but for rounding."""
_FOUND = "Found by search"
_BACKWARDS = {REDUCE: BROADCAST, REDUCE_SCATTER: ALL_GATHER}
"""What is searched for on links turned round, and then played backwards."""


@dataclass(frozen=True, eq=False)
class Quickest:
    """A schedule for buffers of `nbytes`, its simulated time, and what is needed.

    `least` is a time that no schedule is below: by cuts, by the quickest way between
    the ranks farthest apart, and by how fast the number of ranks that know something
    can grow. `library` is the algorithm of the library that the schedule is, if the
    search found nothing quicker; empty if it did.
    """

    schedule: Schedule
    topology: Topology
    nbytes: int
    time: float
    least: float
    library: str = ""

    @property
    def optimum(self) -> float:
        """The part of the least time that the schedule takes."""
        return self.least / self.time if self.time else 1.0

    @property
    def optimal(self) -> bool:
        """Whether no schedule is quicker: it takes the least time, or none at all."""
        return self.time <= self.least * (1 + _EQUAL)

    @property
    def depth(self) -> int:
        """How many messages wait for each other."""
        return self.schedule.cost().rounds

    @property
    def kind(self) -> str:
        """What the schedule is made of, for the file."""
        return f"The library's {self.library}" if self.library else _FOUND

    @property
    def about(self) -> str:
        """How good it is, for the file."""
        if self.optimal:
            return "It is optimal: no schedule\ntakes less simulated time."
        return f"No schedule takes less than {self.optimum:.1%} of its simulated time."


def quickest(
    collective: str,
    topology: Topology | str,
    nbytes: int,
    *,
    root: int = 0,
    slow: Mapping[str, float] | None = None,
    failed: Sequence[str] = (),
    changes: int = CHANGES,
) -> Quickest:
    """Search for the schedule of least time for buffers of `nbytes` on few ranks.

    `slow` and `failed` are links with a part of their bandwidth or none, as `simulate`
    takes them. `changes` are how many are tried: more take longer, and find more.
    """
    what = find_collective(collective)
    where = parse(topology) if isinstance(topology, str) else topology
    if what not in SEARCHED:
        names = ", ".join(one.name for one in SEARCHED)
        raise NotOffered(f"{what.name} cannot be searched for; there are {names}")
    if where.n > MOST_RANKS:
        raise BadArgument(
            f"{where.name}: {where.n} ranks; a schedule is searched for up to "
            f"{MOST_RANKS} (synthesis of trees takes more)"
        )
    if nbytes < 0:
        raise BadArgument(f"{nbytes} bytes: expected 0 or more")
    root = Contract(what, where.n, root, what.chunk_multiple(where.n)).root
    world = SimulatedWorld.of(where, Conditions(slow=dict(slow or {}), failed=failed))
    costs = Costs.of(world)
    if what in _BACKWARDS:
        costs = costs.backwards()
    goal = _goal(_BACKWARDS.get(what, what), where.n, root, nbytes)
    seeds = [*_seeds(_BACKWARDS.get(what, what), where, root), *_trees(costs, goal)]
    spreads = what not in _BACKWARDS and not where.streams
    least = max(world.bound(what, nbytes, root), needed(costs, goal, spreads=spreads))
    enough = 0.0 if where.streams else least * (1 + _EQUAL)
    found = improved(seeds, costs, goal, changes, enough)
    timed = []
    for one in found:
        schedule = _schedule(what, where.n, root, one)
        timed.append((simulated(schedule, world, nbytes), "", schedule))
    for name, schedule in _library(what, where, root):
        timed.append((simulated(schedule, world, nbytes), name, schedule))
    searched = min(timed, key=lambda one: (bool(one[1]), one[0]))
    best = min(timed, key=lambda one: one[0])
    # What differs in the last digits alone is no reason to leave what was found.
    best = searched if searched[0] <= best[0] * (1 + _EQUAL) else best
    seconds, name, schedule = best
    from_where = f"The library's {name}, nothing quicker found" if name else _FOUND
    about = f"{from_where} for {where.name}: least time for {nbytes} bytes."
    schedule = schedule.but(name=NAME, about=about)
    return Quickest(schedule, where, nbytes, seconds, least, name)


def simulated(schedule: Schedule, world: SimulatedWorld, nbytes: int) -> float:
    """The seconds of a schedule, as `simulate` has them: by steps, or in streams."""
    sizes = chunk_bytes(schedule, nbytes)
    if world.topology.streams:
        return float(by_events(schedule, world, sizes).finished.max())
    return float(by_steps(schedule, world, sizes).clock.max())


def _library(
    what: Collective, topology: Topology, root: int
) -> Iterator[tuple[str, Schedule]]:
    """The algorithms of the library for this topology and root, by name."""
    for candidate in candidates(what.name, topology):
        name = fitted(candidate, topology)
        try:
            yield name, make(what.name, name, topology.n, root=root)
        except UsageError:  # not for this root
            continue


def _seeds(what: Collective, topology: Topology, root: int) -> Iterator[Plan]:
    """Who sends to whom in the algorithms of the library."""
    for _, made in _library(what, topology, root):
        steps = []
        for step in made:
            src, dst, *_ = step.flat()
            pairs = dict.fromkeys(zip(src.tolist(), dst.tolist(), strict=True))
            steps.append(tuple(pair for pair in pairs if pair[0] != pair[1]))
        yield tuple(steps)


def _trees(costs: Costs, goal: Goal) -> Iterator[Plan]:
    """Up a tree to a rank and down again: for each rank, along cheap links."""
    whole = costs.whole(goal.part)
    for root in range(costs.n):
        for far in (0.0, 1.0):
            parent = _tree(root, whole, far)
            down = _down(root, parent, whole)
            up = tuple(tuple((d, s) for s, d in step) for step in reversed(down))
            yield (*up, *down)


def _tree(root: int, whole: Floats, far: float) -> dict[int, int]:
    """The parent of each rank, nearest first; `far` is how the way to it counts."""
    parent: dict[int, int] = {}
    way = {root: 0.0}
    while len(way) < len(whole):
        left = [rank for rank in range(len(whole)) if rank not in way]
        pairs = product(way, left)
        src, dst = min(pairs, key=lambda p: (far * way[p[0]] + whole[p], p))
        parent[dst] = src
        way[dst] = way[src] + float(whole[src, dst])
    return parent


def _down(root: int, parent: Mapping[int, int], whole: Floats) -> Plan:
    """Each rank sends to one child in a step, first to that with the longest way on."""
    children: dict[int, list[int]] = {rank: [] for rank in range(len(whole))}
    for child, above in parent.items():
        children[above].append(child)

    def longest(rank: int) -> float:
        ways = (float(whole[rank, c]) + longest(c) for c in children[rank])
        return max(ways, default=0.0)

    def wait(child: int) -> float:
        return float(whole[parent[child], child]) + longest(child)

    steps: dict[int, list[tuple[int, int]]] = {}
    begin = [(root, 0)]
    for rank, first in begin:
        for turn, child in enumerate(sorted(children[rank], key=wait, reverse=True)):
            steps.setdefault(first + turn, []).append((rank, child))
            begin.append((child, first + turn + 1))
    return tuple(tuple(steps[k]) for k in sorted(steps))


def _goal(what: Collective, n: int, root: int, nbytes: int) -> Goal:
    if what is BROADCAST:
        return Goal(tuple(int(r == root) for r in range(n)), 1, nbytes, sums=False)
    each = tuple(1 << r for r in range(n))
    every = (1 << n) - 1
    if what is ALL_REDUCE:
        return Goal(each, every, nbytes, sums=True)
    return Goal(each, every, 0.0 if what is BARRIER else nbytes / n, sums=False)


def needed(costs: Costs, goal: Goal, *, spreads: bool = True) -> float:
    """A time that no schedule is below, by latencies and by the sending of messages.

    A part has to come to the rank that is farthest from where it begins. And while a
    rank sends a message, no other can leave it. So where a part `spreads`, the number
    of ranks that know it grows at most as f(t) = f(t - one sending) + f(t - one
    message).
    """
    n, pairs = costs.n, [p for p in product(range(costs.n), repeat=2) if p[0] != p[1]]
    if not pairs:
        return 0.0
    begin = [r for r in range(n) if goal.first[r]]
    farthest = float(costs.shortest(goal.part)[begin].max())
    sending = min(costs.overhead + goal.part * float(costs.byte[p]) for p in pairs)
    message = min(float(costs.whole(goal.part)[p]) for p in pairs)
    if sending <= 0 or not spreads:
        return farthest
    return max(farthest, _spread(n, sending, message))


def _spread(n: int, sending: float, message: float) -> float:
    """When n ranks can know what one knows, if all send as fast as they can."""
    arrivals = [0.0]
    ready = [message]  # when the next message of each rank that knows arrives
    while len(arrivals) < n:
        soonest = min(range(len(ready)), key=ready.__getitem__)
        arrivals.append(ready[soonest])
        ready[soonest] += sending
        ready.append(arrivals[-1] + message)
    return arrivals[-1]


def _schedule(what: Collective, n: int, root: int, found: Played) -> Schedule:
    """The messages of each step."""
    steps = [_step(messages, what) for messages in found.steps]
    forth = _BACKWARDS.get(what, what)
    chunks = 1 if forth in (BROADCAST, ALL_REDUCE) else n
    made = Schedule(forth, n, chunks, lambda: steps, root=root if what.rooted else 0)
    return made if forth is what else made.mirror()


def _step(sent: Sequence[Message], what: Collective) -> Step:
    parts = []
    for message in sent:
        src, dst = message.src, message.dst
        if what is ALL_REDUCE:
            made = copy_step if message.copies else reduce_step
            parts.append(made(0, src=src, dst=dst))
        else:
            chunks = [c for c in range(MOST_RANKS) if message.mask >> c & 1]
            parts.append(copy_step(np.array(chunks), src=src, dst=dst))
    return together(parts)
