"""`search`: the quickest ways of training a model that fit into memory.

1. Of every mesh, with micro-batches and chunks, what does not fit is left out, and what
   is slower in any case: more recomputing or sharding than the memory asks for.
2. The rest is costed by closed forms, in two placements.
3. The best of these are costed in all placements, buckets and codecs.
4. The best of each mesh are played out, with simulated collectives, and ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from unisono.errors import BadArgument, unknown
from unisono.memory_use import MemoryUse
from unisono.models import ModelShape, parse_model
from unisono.parallel.estimate import Axes
from unisono.search.cost import BESIDE, Cost, Passes, estimate, least
from unisono.search.memory import memory_of
from unisono.search.network import Network
from unisono.search.played import play
from unisono.search.space import (
    BUCKETS,
    ORDERS,
    Choice,
    Job,
    Limits,
    choices,
    placed,
)
from unisono.simulate.kernels import ABOUT_PLAIN, ATTENTION, devices
from unisono.simulate.setup import USUAL_EFFICIENCY
from unisono.simulate.training import DEVICES
from unisono.topology import Topology, parse

_OPERATIONS_A_BYTE = 200.0
"""Of a device that is not known: its peak over the rate of its memory."""
MESHES = 12
"""So many meshes are costed in all placements, buckets and codecs."""
OF_A_MESH = 2
"""So many choices of a mesh are refined, and simulated."""
NEARLY = 1.5
"""What needs up to so many times the memory is mentioned as too large."""


@dataclass(frozen=True)
class Plan:
    """A choice with its memory and its cost."""

    choice: Choice
    use: MemoryUse
    cost: Cost
    simulated: bool = False

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.cost.time


@dataclass(frozen=True)
class Found:
    """What a search found: plans, the quickest first."""

    job: Job
    topology: str
    plans: tuple[Plan, ...]
    too_large: Plan | None
    considered: int
    fitting: int
    assumptions: tuple[str, ...] = ()

    @property
    def best(self) -> Plan | None:
        """The quickest plan; None if nothing fits."""
        return self.plans[0] if self.plans else None

    def on(self, axes: Axes) -> Plan | None:
        """The best plan of a mesh, if that was simulated."""
        return next((p for p in self.plans if p.choice.axes == axes), None)

    def tokens_per_second(self, plan: Plan) -> float:
        """Of all ranks together."""
        return self.job.batch * self.job.sequence / plan.time

    def utilisation(self, plan: Plan) -> float:
        """Operations that the model needs, without recomputing, over the peak."""
        needed = 3 * self.job.model.flops(self.job.sequence)
        rate = needed * self.tokens_per_second(plan)
        return rate / (self.job.n * self.job.peak)


def job_of(
    model: ModelShape | str,
    topology: Topology,
    *,
    batch: int,
    sequence: int,
    peak: float = 0.0,
    efficiency: float | None = None,
    memory: float = 0.0,
    attention: str = "fused",
) -> Job:
    """What is to be trained, with what is known of the machines.

    With an efficiency that is the part of the peak that all computing reaches; without
    one each class of kernels has its own, of a device that is known. `attention` is
    "fused", or "plain": a kernel for each operation, and scores in memory.
    """
    if attention not in ATTENTION:
        raise unknown("attention", attention, ATTENTION)
    device = devices().get(DEVICES.get(topology.name.partition(":")[0], ""))
    if device:
        peak, memory = peak or device.peak, memory or device.memory
        device = msgspec.structs.replace(device, peak=peak)
    if not peak or not memory:
        raise BadArgument(
            f"search: {topology.name} does not have the speed and the memory of its "
            "ranks; give peak and memory, as --peak 989e12 --memory 80G"
        )
    return Job(
        parse_model(model) if isinstance(model, str) else model,
        topology.n,
        batch,
        sequence,
        peak,
        USUAL_EFFICIENCY if efficiency is None else efficiency,
        device.bandwidth * device.elementwise if device else peak / _OPERATIONS_A_BYTE,
        memory,
        device=device if efficiency is None else None,
        plain=attention == "plain",
    )


def search(
    model: ModelShape | str,
    topology: Topology | str,
    *,
    batch: int,
    sequence: int,
    peak: float = 0.0,
    efficiency: float | None = None,
    memory: float = 0.0,
    attention: str = "fused",
    limits: Limits | None = None,
    top: int = 8,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """The quickest ways of training the model there, one of each mesh, simulated.

    `batch` is sequences in a step, of all ranks together; `limits` restricts what may
    be chosen. With codecs there gradients may be sent in fewer bits, which changes
    results: by default they are not.
    """
    where = parse(topology) if isinstance(topology, str) else topology
    job = job_of(
        model,
        where,
        batch=batch,
        sequence=sequence,
        peak=peak,
        efficiency=efficiency,
        memory=memory,
        attention=attention,
    )
    allowed, network = limits or Limits(), Network(where)
    considered, fitting, closest = _fitting(job, allowed)
    progress(f"{len(fitting)} of {considered} fit")
    costed = _costed(job, network, fitting)
    refined = _refined(job, network, costed, allowed.codecs)
    plans = []
    for plan in _best_of_each(refined, top):
        progress(f"simulating {plan.choice.axes}")
        passes = Passes(job, plan.choice, network, network.simulated)
        plans.append(replace(plan, cost=play(passes), simulated=True))
    plans.sort(key=_rank)
    one_each = {plan.choice.axes: plan for plan in reversed(plans)}
    ranked = sorted(one_each.values(), key=_rank)
    return Found(
        job,
        where.name,
        tuple(ranked[:top]),
        _too_large(job, network, closest, ranked),
        considered,
        len(fitting),
        tuple(_assumptions(job)),
    )


def _fitting(job: Job, limits: Limits) -> tuple[int, list[Choice], list[Choice]]:
    """How many there are; those that fit and may be the best; and those too large."""
    count, fitting, over = 0, list[Choice](), list[Choice]()
    for family in choices(job, limits):
        count += len(family)
        if not family or memory_of(job, family[-1]).total > NEARLY * job.memory:
            continue  # not even with all of it
        some = False
        for zero in range(4):
            if zero > 1 and some:
                break  # gradients and parameters are shared out if that is needed
            for choice in (c for c in family if c.zero == zero):
                needed = memory_of(job, choice).total
                if needed <= job.memory:
                    fitting.append(choice)
                    some = choice.recompute == family[0].recompute or some
                    break  # what computes more again is slower
                if needed <= NEARLY * job.memory:
                    over.append(choice)
    return count, fitting, over


def _costed(job: Job, network: Network, fitting: list[Choice]) -> list[Plan]:
    """By closed form, in the two usual placements; the quickest first.

    What would be slower than enough other meshes even if it waited for nothing is left
    out.
    """
    found: list[Plan] = []
    best: dict[Axes, float] = {}
    by_bound = sorted((least(job, choice), i) for i, choice in enumerate(fitting))
    for count, (bound, place) in enumerate(by_bound):
        if count % 64 == 0 and sum(t < bound for t in best.values()) >= MESHES:
            break
        choice = fitting[place]
        orders = {replace(choice, order=o).placement: o for o in ORDERS}
        use = memory_of(job, choice)  # the same in all placements
        for order in orders.values():
            plan = _closed(job, network, replace(choice, order=order), use)
            best[choice.axes] = min(best.get(choice.axes, plan.time), plan.time)
            found.append(plan)
    return sorted(found, key=_rank)


def _rank(plan: Plan) -> tuple[float, int]:
    """By time, to six digits; of equals the one with fewer axes."""
    used = sum(size > 1 for size in asdict(plan.choice.axes).values())
    return float(f"{plan.time:.6g}"), used


def _closed(
    job: Job, network: Network, choice: Choice, use: MemoryUse | None = None
) -> Plan:
    cost = estimate(Passes(job, choice, network, network.closed))
    return Plan(choice, use or memory_of(job, choice), cost)


def _refined(
    job: Job, network: Network, costed: list[Plan], codecs: Sequence[str]
) -> list[Plan]:
    """The best in all placements, with all buckets and codecs."""
    found, seen = list[Plan](), set[Axes]()
    for plan in _best_of_each(costed, MESHES):
        first = plan.choice.axes not in seen
        seen.add(plan.choice.axes)
        orders = placed(plan.choice) if first else [plan.choice]
        plans = (_closed(job, network, c) for c in _varied(orders, codecs))
        found += [plan for plan in plans if plan.use.total <= job.memory]
    return sorted(found, key=_rank)


def _varied(orders: Iterable[Choice], codecs: Sequence[str]) -> Iterator[Choice]:
    for other in orders:
        for bucket in BUCKETS:
            for codec in codecs:
                yield replace(other, bucket=bucket, codec=codec)


def _best_of_each(plans: list[Plan], meshes: int) -> Iterator[Plan]:
    """The first plans of the first meshes."""
    count: dict[Axes, int] = {}
    for plan in plans:
        axes = plan.choice.axes
        if axes not in count and len(count) == meshes:
            continue
        count[axes] = count.get(axes, 0) + 1
        if count[axes] <= OF_A_MESH:
            yield plan


def _too_large(
    job: Job, network: Network, over: list[Choice], ranked: list[Plan]
) -> Plan | None:
    """The quickest that would need more memory, if it were quicker than the best."""
    if not over or not ranked:
        return None
    plans = (_closed(job, network, choice) for choice in over)
    quickest = min(plans, key=lambda plan: plan.time)
    return quickest if quickest.time < ranked[0].time else None


def _assumptions(job: Job) -> Iterator[str]:
    reached = f"{job.efficiency:.0%} of it"
    if job.device:
        matmul, scores = job.device.matmul, job.device.attention
        reached = f"{matmul:.0%} of it in products, {scores:.0%} in attention"
    yield (
        f"a rank computes {job.peak / 1e12:.4g} Tflop/s at its peak, reaches "
        f"{reached}, and moves {job.memory_rate / 1e12:.3g} TB/s"
    )
    if job.plain:
        yield ABOUT_PLAIN
    yield (
        f"parameters have {job.weight_bytes} bytes, gradients {job.gradient_bytes}, "
        "Adam's state 12; activations between tensor parallel layers are sharded"
    )
    yield (
        "collectives are as simulated by steps, all groups of an axis at once (of very "
        "large groups by closed form); the axes do not slow each other"
    )
    yield (
        f"what is sent beside computing takes {BESIDE:.0%} of it; stages take turns as "
        "in interleaved 1F1B"
    )
