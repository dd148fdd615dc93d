"""`synthesize`: a collective and a topology in, a schedule made for it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from unisono.errors import BadTopology, NotOffered
from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    Collective,
    Contract,
)
from unisono.schedule.collective import (
    collective as find_collective,
)
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, copy_step
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.synthesize.exchange import exchange
from unisono.synthesize.network import Network
from unisono.synthesize.packing import Tree, pack
from unisono.synthesize.rate import (
    Plan,
    best_free_rate,
    best_rate,
    every_rank,
    narrowest_cut,
    whole_free_trees,
    whole_trees,
)
from unisono.synthesize.regions import region_rate
from unisono.synthesize.splitting import without_switches
from unisono.topology import Topology, parse

NAME = "synthesized"
OFFERED = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL)
"""The collectives that are made of trees, and all_to_all, of paths."""


@dataclass(frozen=True, eq=False)
class Synthesis:
    """A schedule, and how near it is to what cuts allow.

    `least` is the time per byte that the cuts of the topology leave at least; trees
    from all roots or from one reach it, those of an all_reduce nearly always. `reached`
    is that of the busiest link of the schedule, counted along the topology's routes.
    Both leave latencies out. `trees` carry the data from their roots, or to them; an
    all_to_all has none, and `least` is that of the best paths.
    """

    schedule: Schedule
    topology: Topology
    trees: tuple[Tree, ...]
    least: float
    reached: float

    @property
    def optimum(self) -> float:
        """The part of the best rate that is reached."""
        return self.least / self.reached if self.reached else 1.0

    @property
    def kind(self) -> str:
        """What the schedule is made of, in a few words."""
        return "Spanning trees packed" if self.trees else "Paths found"

    @property
    def about(self) -> str:
        """How good it is, in a sentence."""
        return (
            f"The busiest link reaches {self.optimum:.1%} of\n"
            "the rate that the topology allows."
        )

    @property
    def depth(self) -> int:
        """The links from a root to the farthest rank, or of the longest path."""
        if not self.trees:
            return self.schedule.num_steps
        return max((max(tree.depths(), default=0) for tree in self.trees), default=0)


def synthesize(
    collective: str,
    topology: Topology | str,
    *,
    root: int = 0,
    slow: Mapping[str, float] | None = None,
    failed: Sequence[str] = (),
) -> Synthesis:
    """Make a schedule for this topology, as fast as trees can be for large buffers.

    `slow` and `failed` are links with a part of their bandwidth or none, as `simulate`
    takes them.
    """
    what = find_collective(collective)
    if what not in OFFERED:
        names = ", ".join(one.name for one in OFFERED)
        raise NotOffered(
            f"{what.name} cannot be made of trees or paths; synthesis offers {names}"
        )
    where = parse(topology) if isinstance(topology, str) else topology
    root = Contract(what, where.n, root, what.chunk_multiple(where.n)).root
    world = SimulatedWorld.of(where, Conditions(slow=dict(slow or {}), failed=failed))
    if where.n == 1:
        alone = Schedule(what, 1, 1, lambda: (), name=NAME)
        return Synthesis(alone, where, (), 0.0, 0.0)
    network = Network.of(world)
    from_root = root if what.rooted else None
    trees: list[Tree] = []
    if what is ALL_TO_ALL:
        schedule, least = exchange(network)
    elif what in (REDUCE, REDUCE_SCATTER):
        trees, least = _forest(network.backwards(), from_root)
        down = BROADCAST if what is REDUCE else ALL_GATHER
        schedule = distribute(down, network.n, trees, root).mirror()
    elif what is not ALL_REDUCE:
        trees, least = _forest(network, from_root)
        schedule = distribute(what, network.n, trees, root)
    elif network.symmetric:
        least = least_sum(network)
        trees, schedule = _best_sum(network, world, least)
    else:
        trees, least = _forest(network, None)
        up, _ = _forest(network.backwards(), None)
        first = distribute(ALL_GATHER, network.n, up).mirror()
        schedule = first.then(distribute(ALL_GATHER, network.n, trees))
        least = least_sum(network)
    made = Synthesis(
        schedule, where, tuple(trees), least, busiest_link(schedule, world)
    )
    about = f"{made.kind} for {where.name}: links carry what they can."
    return replace(made, schedule=schedule.but(name=NAME, about=about))


def _forest(network: Network, root: int | None) -> tuple[list[Tree], float]:
    """Trees of equally many for each root, and the least time per byte of a buffer."""
    weights = list(every_rank(network.n, root))
    rate = best_rate(network, weights)
    trees = _packed(network, whole_trees(network, weights, rate))
    return trees, float(1 / (rate * sum(weights)))


def _best_sum(
    network: Network, world: SimulatedWorld, least: float
) -> tuple[list[Tree], Schedule]:
    """The best of several ways to choose the trees, or the first that is optimal."""
    made: list[tuple[float, list[Tree], Schedule]] = []
    for trees in _sums(network):
        schedule = up_and_down(network.n, trees)
        made.append((busiest_link(schedule, world), trees, schedule))
        if made[-1][0] <= least * (1 + 1e-9):
            break
    _, trees, schedule = min(made, key=lambda one: one[0])
    return trees, schedule


def _sums(network: Network) -> Iterator[list[Tree]]:
    """Trees for a sum up and its way down: of all roots, of any, and of one root.

    Trees of one root go down over links that their way up leaves alone. Where there are
    switches, the order in which they are removed makes a difference, too.
    """
    weights = [1] * network.n
    rate = best_rate(network, weights)
    even = rate * network.n
    free = best_free_rate(network, even)
    plan = whole_free_trees(network, free) if free > even * Fraction(101, 100) else None
    plan = plan or whole_trees(network, weights, rate)
    yield _packed(network, plan)
    graph = network.graph(network.scaled(1))
    widest = max(range(network.n), key=lambda rank: sum(graph[rank].values()))
    yield _forest(network, widest)[0]
    if network.num_nodes > network.n:
        yield _packed(network, plan, by_number=True)


def least_sum(network: Network) -> float:
    """The time per byte that no all_reduce can be below, by cuts.

    A buffer's worth has to enter each set of ranks, which the way from one rank to all
    tells. And each element crosses between regions twice for each but one of them,
    however the ranks are parted into regions.
    """
    return float(max(Fraction(1, narrowest_cut(network)), 2 / region_rate(network)))


def _packed(network: Network, plan: Plan, by_number: bool = False) -> list[Tree]:
    graph = without_switches(network, plan, by_number)
    if graph is None:
        raise BadTopology(
            f"{network.name}: its switches cannot be replaced by routes from rank to "
            "rank; expected switches with the same bandwidth in and out"
        )
    return pack(graph, plan.weights)


def distribute(
    what: Collective, n: int, trees: Sequence[Tree], root: int = 0
) -> Schedule:
    """All trees from their roots at once, a step for each depth; a chunk for each."""
    steps = _down(trees)
    count = sum(tree.times for tree in trees)
    return Schedule(what, n, count, lambda: steps, root=root if what.rooted else 0)


def up_and_down(n: int, trees: Sequence[Tree]) -> Schedule:
    """Each chunk summed up on the way to the root of its tree, and handed out again."""
    down = _down(trees)

    def make() -> Iterator[Step]:
        for step in reversed(down):
            yield step.backwards(swap_kinds=True).named("reduce")
        for step in down:
            yield step.named("broadcast")

    return Schedule(ALL_REDUCE, n, sum(tree.times for tree in trees), make)


def _down(trees: Sequence[Tree]) -> list[Step]:
    """Chunks are numbered in the order of the trees, which is that of their roots."""
    rows: list[tuple[int, int, int, int]] = []
    first = 0
    for tree in trees:
        for (src, dst), depth in zip(tree.links, tree.depths(), strict=True):
            rows += [(depth, first + i, src, dst) for i in range(tree.times)]
        first += tree.times
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    return [
        copy_step(chunk=at[:, 1], src=at[:, 2], dst=at[:, 3])
        for depth in np.unique(table[:, 0])
        for at in [table[table[:, 0] == depth]]
    ]


def busiest_link(schedule: Schedule, world: SimulatedWorld) -> float:
    """The seconds that the busiest link needs for a buffer of one byte."""
    load = np.zeros(world.bandwidth.size)
    for step in schedule:
        src, dst, _, _, _ = step.flat()
        links = world.route(src, dst) % load.size
        load += np.bincount(links.ravel(), minlength=load.size)
    return (
        float((load[:-1] / world.bandwidth[:-1]).max())
        / schedule.contract.chunks_per_rank
    )
