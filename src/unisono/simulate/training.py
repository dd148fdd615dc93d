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
(`groups.py`), or by the model of another library (`engines`). How long computing takes
follows from rooflines of the kernels (`kernels.py`), or from one rate for all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

import msgspec
import numpy as np

from unisono.errors import BadArgument, NotOffered
from unisono.memory_use import MemoryUse, kept, kept_in_block, logits
from unisono.models import ModelShape, parse_model
from unisono.simulate.groups import EqualGroups
from unisono.simulate.kernels import Device, Kernels, find_device
from unisono.simulate.setup import Setup, assumptions, computing
from unisono.simulate.streams import Ran, Task, run
from unisono.topology import Topology, parse
from unisono.units import format_bytes, format_seconds

_ADAM = 12
"""Bytes a parameter of Adam's state: two moments and a copy, of 4 bytes each."""
DEVICES = {"dgx-h100": "h100", "dgx-a100": "a100"}
"""What the ranks of a topology are."""
MOST_RANKS = 1 << 14


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
    kernels: Kernels | None = None
    tasks: list[Task] = field(default_factory=list)
    used: dict[tuple[str, str, int], CollectiveUse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay out the mesh: ranks of a tensor parallel group are neighbours."""
        ranks = np.arange(self.topology.n).reshape(-1, self.setup.tp)
        how = self.setup.algorithm, self.setup.engine
        self.groups = {
            "tensor": EqualGroups(self.topology, ranks, *how),
            "data": EqualGroups(self.topology, np.ascontiguousarray(ranks.T), *how),
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
    def units(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """What is gathered together: its name, parameters, and its parts.

        Tensor parallel ranks add up after each part of a layer, attention and MLP; not
        after the embedding and the head. Of a model without a shape, layers are equal.
        """
        m = self.model
        if not m.hidden:
            sizes = [(m.counted + i) // m.layers for i in range(m.layers)]
            return [("layer", size, (str(size),)) for size in sizes]
        layer = ("layer", m.block, ("attention", "mlp"))
        first = ("embedding", m.embedding, ("embedding",))
        head = ("head", m.head, ("head",))
        return [first, *[layer] * m.layers, head]

    def seconds(self, part: str, factor: float) -> float:
        """How long a rank computes a part, forward (1) or backward (2 or 3)."""
        if self.kernels:
            return self.kernels.seconds(part, factor)
        m = self.model
        flops = {
            "attention": m.attention_flops(self.setup.sequence) if m.hidden else 0.0,
            "mlp": m.mlp_flops,
            "embedding": 0.0,
            "head": m.head_flops,
        }
        each = flops[part] if part in flops else 2.0 * int(part)
        return each * factor * self.tokens / self.setup.tp / self.rate

    def compute(
        self, name: str, parts: tuple[str, ...], factor: float, *after: int | None
    ) -> int:
        """Compute a unit, with the sums of tensor parallel ranks in between."""
        waits, done = after, 0
        activation = self.tokens * self.model.hidden * self.setup.weight_bytes
        for part in parts:
            done = self.add(name, "compute", self.seconds(part, factor), *waits)
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
    peak: float
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
        """Seconds that communication costs: awaited, or slowing what is computed."""
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
        return needed / (self.n * self.peak)

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
            "peak": self.peak,
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
            kept_in_block(model, s.tp, s.sequence if s.plain else 0),
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
    device = _device(where, setup)
    if device is None and not setup.peak:
        raise BadArgument(
            f"train: {where.name} does not have the speed of its ranks; give peak= or "
            "device="
        )
    peak = setup.peak or (device.peak if device else 0.0)
    kernels = None
    if device and setup.efficiency is None and what.hidden:
        tokens = setup.sequence * setup.batch
        kernels = Kernels(
            device, what, tokens, setup.sequence, setup.tp, plain=setup.plain
        )
    plan = Planner(what, where, setup, peak * setup.usual, kernels)
    return _stepped(plan, peak, device.memory if device else 0)


def _device(where: Topology, setup: Setup) -> Device | None:
    """The device that ranks are: that of the topology, unless another is given."""
    named = setup.device or DEVICES.get(where.name.partition(":")[0], "")
    device = find_device(named) if isinstance(named, str) and named else None
    device = named if isinstance(named, Device) else device
    if device and setup.peak:
        return msgspec.structs.replace(device, peak=setup.peak)
    return device


def _stepped(plan: Planner, peak: float, memory: int) -> TrainingStep:
    """The plan, run: what it takes, and what that rests on."""
    what, setup, where, kernels = plan.model, plan.setup, plan.topology, plan.kernels
    {"ddp": ddp, "fsdp": fsdp}[setup.strategy](plan)
    ran = run(plan.tasks)
    computed = sum(t.seconds for t in plan.tasks if t.stream == "compute")
    took = max((r.end for r in ran), default=0.0)
    rate = plan.rate
    if kernels:
        sent = sum(u.times * u.seconds for u in plan.used.values())
        took += kernels.device.contention * max(0.0, sent - (took - computed))
        shards = where.n if setup.strategy == "fsdp" else setup.tp
        last = kernels.device.update * what.parameters / shards
        took, computed = took + last, computed + last
        passes = 4.0 if setup.recompute else 3.0
        rate = passes * what.flops(setup.sequence) * plan.tokens / setup.tp / computed
    computes = computing(peak, setup, kernels.device if kernels else None)
    return TrainingStep(
        what,
        where.name,
        where.n,
        setup,
        rate,
        peak,
        took,
        computed,
        tuple(plan.used.values()),
        tuple(ran),
        tuple(assumptions(setup, what, computes, optimizer=bool(kernels))),
        setup.memory or memory,
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
