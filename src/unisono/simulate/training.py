"""Training steps: what a strategy computes and sends, in which order, given a clock.

    step = train("70B", "dgx-h100:64", strategy="fsdp", tp=8)
    print(step)         step time, exposed communication, efficiency, assumptions

A plan is a list of tasks. Each is on a stream, where tasks run one after the other in
the order in which they are listed, and may wait for tasks of other streams:

    compute   forward and backward of the layers
    tensor    all_reduce of activations in tensor parallel groups; compute waits for it
    data      gradients and weights in data parallel groups; runs beside compute

    ddp    backward fills buckets with gradients; a full one is all_reduced
    fsdp   weights of a layer are gathered before it is needed, forward and backward,
           `prefetch` layers ahead; its gradients are reduce_scattered after it (ZeRO-3)

How long a collective takes is simulated on the topology, all groups of an axis at once
(`groups.py`). How long computing takes follows from the operations and a rate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from unisono.errors import BadArgument, NotOffered, unknown
from unisono.memory_use import FRAGMENTATION, MemoryUse, kept, kept_in_block, logits
from unisono.models import ModelShape, parse_model
from unisono.simulate.groups import EqualGroups
from unisono.simulate.streams import Ran, Task, run
from unisono.topology import Topology, parse
from unisono.units import format_bytes, format_seconds

STRATEGIES = ("ddp", "fsdp")
_ADAM = 12
"""Bytes a parameter of Adam's state: two moments and a copy, of 4 bytes each."""
PEAKS = {"dgx-h100": 989e12, "dgx-a100": 312e12}
"""Dense 16-bit operations per second that the maker states."""
MEMORIES = dict.fromkeys(PEAKS, 79 << 30)
"""Bytes that a program can have of a rank's 80 GB."""
MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class Setup:
    """Everything about a step but the model and the topology."""

    strategy: str = "fsdp"
    tp: int = 1
    sequence: int = 4096
    batch: int = 1
    peak: float = 0.0
    memory: int = 0
    efficiency: float = 0.5
    bucket: int = 25 << 20
    prefetch: int = 1
    recompute: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 2
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        for name, least in (
            *(("tp", 1), ("sequence", 1), ("batch", 1), ("bucket", 1)),
            *(
                ("memory", 0),
                ("prefetch", 0),
                ("weight_bytes", 1),
                ("gradient_bytes", 1),
            ),
        ):
            if getattr(self, name) < least:
                raise BadArgument(
                    f"train: {name} = {getattr(self, name)}: expected {least} or more"
                )
        if not 0 < self.efficiency <= 1 or not 0 <= self.peak < math.inf:
            raise BadArgument(
                f"train: efficiency = {self.efficiency:g}, peak = {self.peak:g}: "
                "expected a part of 1, and operations per second"
            )


@dataclass(frozen=True)
class CollectiveUse:
    """A collective of the plan: its axis, how often, size and time of each."""

    collective: str
    axis: str
    ranks: int
    times: int
    nbytes: int
    seconds: float
    algorithm: str

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.times:>4} x {self.collective} of {format_bytes(self.nbytes)} on "
            f"{self.ranks} ranks ({self.axis}): {format_seconds(self.seconds)} each, "
            f"by {self.algorithm}"
        )


@dataclass(eq=False)
class Planner:
    """Makes the plan of one step, and keeps what it used."""

    model: ModelShape
    topology: Topology
    setup: Setup
    rate: float
    tasks: list[Task] = field(default_factory=list)
    used: dict[tuple[str, str, int], CollectiveUse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay out the mesh: ranks of a tensor parallel group are neighbours."""
        ranks = np.arange(self.topology.n).reshape(-1, self.setup.tp)
        algorithm = self.setup.algorithm
        self.groups = {
            "tensor": EqualGroups(self.topology, ranks, algorithm),
            "data": EqualGroups(
                self.topology, np.ascontiguousarray(ranks.T), algorithm
            ),
        }
        self.tokens = self.setup.sequence * self.setup.batch

    def add(self, name: str, stream: str, seconds: float, *after: int | None) -> int:
        """Add a task; returns its index, for others to wait for."""
        waits = tuple(sorted({a for a in after if a is not None}))
        self.tasks.append(Task(name, stream, seconds, waits))
        return len(self.tasks) - 1

    def call(
        self, axis: str, collective: str, nbytes: int, *after: int | None
    ) -> int | None:
        """Add a collective; None if its groups have one rank."""
        groups = self.groups[axis]
        if groups.size == 1:
            return None
        seconds, algorithm = groups.time(collective, nbytes)
        key = axis, collective, nbytes
        one = CollectiveUse(
            collective, axis, groups.size, 0, nbytes, seconds, algorithm
        )
        known = self.used.get(key, one)
        self.used[key] = replace(known, times=known.times + 1)
        return self.add(f"{collective} ({axis})", axis, seconds, *after)

    @property
    def units(self) -> list[tuple[str, int, tuple[float, ...]]]:
        """What is gathered together: its name, parameters, and its parts' operations.

        Tensor parallel ranks add up after each part of a layer, attention and MLP; not
        after the embedding and the head. Of a model without a shape, layers are equal.
        """
        m, length = self.model, self.setup.sequence
        if not m.hidden:
            sizes = [(m.counted + i) // m.layers for i in range(m.layers)]
            return [("layer", size, (2.0 * size,)) for size in sizes]
        layer = ("layer", m.block, (m.attention_flops(length), m.mlp_flops))
        first = ("embedding", m.embedding, (0.0,))
        head = ("head", m.head, (m.head_flops,))
        return [first, *[layer] * m.layers, head]

    def compute(
        self, name: str, parts: tuple[float, ...], factor: float, *after: int | None
    ) -> int:
        """Compute a unit, with the sums of tensor parallel ranks in between."""
        waits, done = after, 0
        activation = self.tokens * self.model.hidden * self.setup.weight_bytes
        for flops in parts:
            seconds = flops * factor * self.tokens / self.setup.tp / self.rate
            done = self.add(name, "compute", seconds, *waits)
            if len(parts) > 1:
                summed = self.call("tensor", "all_reduce", activation, done)
                done = done if summed is None else summed
            waits = (done,)
        return done

    def sharded(self, weights: int) -> int:
        """How many of these parameters a tensor parallel rank has."""
        return -(-weights // self.setup.tp)


def ddp(plan: Planner) -> None:
    """Forward, backward, and an all_reduce for each bucket of gradients."""
    units = plan.units
    last: int | None = None
    for name, _, parts in units:
        last = plan.compute(f"forward {name}", parts, 1.0, last)
    filled, size = 0, plan.setup.gradient_bytes
    backward = 3.0 if plan.setup.recompute else 2.0
    for at, (name, weights, parts) in reversed(list(enumerate(units))):
        last = plan.compute(f"backward {name}", parts[::-1], backward, last)
        filled += plan.sharded(weights) * size
        if filled >= plan.setup.bucket or at == 0:
            plan.call("data", "all_reduce", filled, last)
            filled = 0


def fsdp(plan: Planner) -> None:
    """Parameters are gathered before they are needed, forward and backward."""
    units, ahead = plan.units, plan.setup.prefetch
    recompute = 3.0 if plan.setup.recompute else 2.0
    order = [(u, "forward", 1.0) for u in units]
    order += [(u, "backward", recompute) for u in reversed(units)]
    gathered: list[int | None] = []
    computed: list[int] = []

    def gather(place: int) -> None:
        # There is memory for `ahead` more units: an earlier one must be freed first.
        if place < len(order):
            done = place - 1 - ahead
            before = computed[done] if done >= 0 else None
            nbytes = plan.sharded(order[place][0][1]) * plan.setup.weight_bytes
            gathered.append(plan.call("data", "all_gather", nbytes, before))

    for place in range(ahead + 1):
        gather(place)
    last: int | None = None
    for place, ((name, weights, parts), direction, factor) in enumerate(order):
        ordered = parts if direction == "forward" else parts[::-1]
        task = f"{direction} {name}"
        last = plan.compute(task, ordered, factor, last, gathered[place])
        computed.append(last)
        gather(place + ahead + 1)
        if direction == "backward":
            nbytes = plan.sharded(weights) * plan.setup.gradient_bytes
            plan.call("data", "reduce_scatter", nbytes, last)


@dataclass(frozen=True)
class TrainingStep:
    """One training step: seconds, and what they are made of."""

    model: ModelShape
    topology: str
    n: int
    setup: Setup
    rate: float
    time: float
    compute: float
    used: tuple[CollectiveUse, ...]
    ran: tuple[Ran, ...] = field(repr=False)
    assumptions: tuple[str, ...] = ()
    device_memory: int = 0
    """Bytes that a rank has; 0 if that is not known."""

    @property
    def dp(self) -> int:
        """How many data parallel ranks there are."""
        return self.n // self.setup.tp

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed, while communication is awaited."""
        return self.time - self.compute

    @property
    def communication(self) -> float:
        """Seconds of all collectives, hidden or not."""
        return sum(u.times * u.seconds for u in self.used)

    @property
    def efficiency(self) -> float:
        """The part of the step that is computing: 1 is perfect scaling."""
        return self.compute / self.time if self.time else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.setup.sequence * self.setup.batch * self.dp / self.time

    @property
    def utilisation(self) -> float:
        """Operations that the model needs, without recomputation, over the peak."""
        needed = 3 * self.model.flops(self.setup.sequence) * self.tokens_per_second
        return needed / (self.n * self.rate / self.setup.efficiency)

    @property
    def use(self) -> MemoryUse:
        """The memory of a rank, by what it is for."""
        return memory_use(self.model, self.n, self.setup)

    @property
    def memory(self) -> float:
        """Bytes that a rank needs, with an allowance for fragmentation."""
        return self.use.total

    @property
    def fits(self) -> bool | None:
        """Whether a rank has that memory; None if it is not known what it has."""
        return self.memory <= self.device_memory if self.device_memory else None

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {
            "model": self.model.as_dict() | {"weights": self.model.parameters},
            "topology": self.topology,
            "n": self.n,
            "dp": self.dp,
            "setup": asdict(self.setup),
            "rate": self.rate,
            "time": self.time,
            "compute": self.compute,
            "communication": self.communication,
            "exposed": self.exposed,
            "efficiency": self.efficiency,
            "tokens_per_second": self.tokens_per_second,
            "utilisation": self.utilisation,
            "memory": self.memory,
            "memory_use": self.use.as_dict(),
            "device_memory": self.device_memory,
            "fits": self.fits,
            "collectives": [asdict(u) for u in self.used],
            "assumptions": list(self.assumptions),
        }

    def __str__(self) -> str:
        """A page for people."""
        hidden = self.communication - self.exposed
        lines = [
            f"{self.model.name} ({self.model.parameters / 1e9:.1f} billion parameters) "
            f"on {self.topology}: {self.setup.strategy} x {self.dp}, tensor x "
            f"{self.setup.tp}",
            f"  step           {format_seconds(self.time)}",
            f"  compute        {format_seconds(self.compute)}",
            f"  communication  {format_seconds(self.communication)}, of which "
            f"{format_seconds(max(0.0, hidden))} hidden",
            f"  exposed        {format_seconds(self.exposed)}",
            f"  efficiency     {self.efficiency:.1%} of perfect scaling",
            f"  throughput     {self.tokens_per_second:,.0f} tokens/s; "
            f"{self.utilisation:.1%} of the peak",
            f"  memory         {format_bytes(self.memory)} a rank{self._room}",
            *_of_what(self.use, known=bool(self.model.hidden)),
        ]
        lines += [f"  {u}" for u in self.used]
        return "\n".join([*lines, "assumed:", *(f"  {a}" for a in self.assumptions)])

    @property
    def _room(self) -> str:
        """Whether it fits, in words."""
        has = format_bytes(self.device_memory)
        if self.fits is None:
            return ""
        if self.fits:
            return f", of {has}: fits"
        ways = [
            *(["fsdp"] if self.setup.strategy == "ddp" else ["more ranks"]),
            *(["a larger tp"] if self.model.hidden and not self.model.experts else []),
            *([] if self.setup.recompute else ["recomputing activations"]),
            *(["a smaller batch"] if self.setup.batch > 1 else []),
        ]
        return f": DOES NOT FIT into {has}; try {', or '.join(ways)}"


def memory_use(model: ModelShape, n: int, setup: Setup) -> MemoryUse:
    """What a rank has in its memory at the most."""
    s, tokens = setup, setup.sequence * setup.batch
    sharded = s.strategy == "fsdp" and n > s.tp
    each = model.parameters / (n if s.strategy == "fsdp" else s.tp)
    unit = max(model.block, model.embedding, model.head) / s.tp if sharded else 0.0
    return MemoryUse(
        parameters=s.weight_bytes * (each + (s.prefetch + 1) * unit),
        gradients=s.gradient_bytes * each,
        optimizer=_ADAM * each,
        activations=kept(
            model.layers,
            kept_in_block(model, s.tp),
            tokens * model.hidden * s.weight_bytes,
            recompute=s.recompute,
        ),
        logits=logits(model, tokens, s.weight_bytes, s.tp),
        buckets=s.gradient_bytes * unit,
    )


def _of_what(use: MemoryUse, *, known: bool) -> list[str]:
    """The parts of the memory, in two lines."""
    parts = {
        name: format_bytes(nbytes) if known or name != "activations" else "not known"
        for name, nbytes in use.as_dict().items()
        if nbytes or name == "activations"
    }
    listed = [f"{name} {nbytes}" for name, nbytes in parts.items()]
    indent = "\n" + " " * 17
    return [f"{indent[1:]}{', '.join(listed[:3])},{indent}{', '.join(listed[3:])}"]


def train(
    model: ModelShape | str, topology: Topology | str, **options: object
) -> TrainingStep:
    """Simulate one training step; options are the fields of `Setup`."""
    what = parse_model(model) if isinstance(model, str) else model
    where = parse(topology) if isinstance(topology, str) else topology
    setup = Setup(**options)  # type: ignore[arg-type]
    _check_model(what, setup)
    if where.n % setup.tp:
        raise BadArgument(f"train: tp = {setup.tp} does not divide {where.n} ranks")
    if where.n > MOST_RANKS:
        raise NotOffered(f"train: {where.n} ranks; at most {MOST_RANKS} are simulated")
    peak = setup.peak or PEAKS.get(where.name.partition(":")[0], 0.0)
    if not peak:
        raise BadArgument(
            f"train: {where.name} does not have the speed of its ranks; give peak="
        )
    plan = Planner(what, where, setup, peak * setup.efficiency)
    {"ddp": ddp, "fsdp": fsdp}[setup.strategy](plan)
    ran = run(plan.tasks)
    return TrainingStep(
        what,
        where.name,
        where.n,
        setup,
        plan.rate,
        max((r.end for r in ran), default=0.0),
        sum(t.seconds for t in plan.tasks if t.stream == "compute"),
        tuple(plan.used.values()),
        tuple(ran),
        tuple(_assumptions(plan, peak)),
        setup.memory or MEMORIES.get(where.name.partition(":")[0], 0),
    )


def _check_model(model: ModelShape, setup: Setup) -> None:
    """Raise if the model cannot be trained with this setup."""
    model.check_length(setup.sequence)
    if setup.tp > 1 and not model.hidden:
        raise BadArgument(
            f"train: tp = {setup.tp} needs the shape of {model.name}, as in "
            "gpt:layers=12,hidden=768"
        )
    if setup.tp > 1 and model.experts:
        raise BadArgument(f"train: tp = {setup.tp}: experts are not sharded by tp")


def _assumptions(plan: Planner, peak: float) -> list[str]:
    """Everything that the result depends on and that may be different elsewhere."""
    s = plan.setup
    source = "as given" if s.peak else "as the maker states"
    passes = "4 forward passes' worth" if s.recompute else "3 forward passes' worth"
    assumptions = [
        f"a rank computes {peak / 1e12:.4g} Tflop/s at its peak ({source}), and "
        f"reaches {s.efficiency:.0%} of it",
        f"{s.batch} sequence(s) of {s.sequence} tokens for each data parallel rank; "
        f"a step is {passes}"
        + (", since activations are recomputed" if s.recompute else ""),
        f"parameters are sent as {s.weight_bytes} bytes, gradients as "
        f"{s.gradient_bytes}; the optimizer takes no time, and 12 bytes of memory a "
        "parameter (Adam)",
        f"memory: {FRAGMENTATION:.0%} more than is counted, for fragmentation; "
        "gradients lie in the buckets that are sent (ddp)",
        "collectives are as simulated by steps, all groups of an axis at once; the two "
        "axes do not slow each other, nor what is computed meanwhile",
    ]
    if not plan.model.hidden:
        assumptions.append(
            f"{plan.model.layers} equal layers; the products of attention, which "
            "depend on the shape, are left out"
        )
    if s.tp > 1:
        assumptions.append(
            "tensor parallel: two all_reduces a layer forward and two backward (none "
            "again for what is recomputed), which compute waits for"
        )
    if s.strategy == "fsdp":
        assumptions.append(
            f"fsdp: a layer at a time, {s.prefetch} gathered ahead, gathered again for "
            "backward; the embedding and the head are separate units"
        )
    else:
        assumptions.append(f"ddp: buckets of {format_bytes(s.bucket)}, of whole layers")
    return assumptions
