"""What is chosen: the mesh, and how the model is trained on it.

axes           ranks of each axis: dp, tp, pp, cp, ep
zero           what replicas share out: 0 nothing, 1 the optimizer's state, 2 the
               gradients too, 3 the parameters too (fsdp)
recompute      none; selective: norms, the functions inside MLPs and the scores of
               plain attention; full: all of a block but its input
microbatch     sequences that a rank computes at a time
chunks         runs of layers that a stage of the pipeline has (interleaving)
order          the axes from neighbouring ranks outwards: where ranks are placed
bucket         bytes of gradients that are sent together
codec          of gradients as they are sent
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import permutations
from math import inf

from unisono import codecs
from unisono.errors import BadArgument, unknown
from unisono.models import ModelShape
from unisono.parallel.estimate import Axes, Setting
from unisono.parallel.estimate.meshes import meshes, misfit
from unisono.simulate.kernels import Device, Kernels

RECOMPUTE = ("none", "selective", "full")
"""From the least that is computed again to the most."""
MICROBATCHES = (1, 2, 4, 8, 16)
MOST_CHUNKS = 16
BUCKETS = (25 << 20, 100 << 20, 400 << 20)
ORDERS = (("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"))
"""What is costed first: stages outermost, or replicas."""
ADAM = 12
"""Bytes a parameter of Adam's state: two moments and a copy, of 4 bytes each."""


@dataclass(frozen=True)
class Job:
    """What is trained on which ranks: everything that is not chosen."""

    model: ModelShape
    n: int
    batch: int
    sequence: int
    peak: float
    efficiency: float = 0.5
    memory_rate: float = inf
    """Bytes per second that a rank reads or writes in its memory."""
    memory: float = inf
    weight_bytes: int = 2
    gradient_bytes: int = 4
    device: Device | None = None
    """What computes, with its rooflines; None for `efficiency` of the peak."""
    plain: bool = False
    """Whether attention keeps its scores, in a kernel for each operation."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if not self.model.hidden:
            raise BadArgument(
                f"search: needs the shape of {self.model.name}, as in "
                "gpt:layers=12,hidden=768; a number of parameters is not enough"
            )
        if self.batch < 1 or self.sequence < 1 or self.peak <= 0:
            raise BadArgument(
                f"search: batch = {self.batch}, sequence = {self.sequence}, peak = "
                f"{self.peak:g}: expected sequences, tokens and operations per second"
            )
        if not 0 < self.efficiency <= 1:
            raise BadArgument(
                f"search: efficiency = {self.efficiency:g}: expected a part of 1"
            )
        self.model.check_length(self.sequence)

    @property
    def attention_rate(self) -> float:
        """Operations per second that products of queries and keys reach."""
        part = self.device.attention if self.device else self.efficiency
        return self.peak * part

    def layer(self, choice: Choice, times: float) -> float:
        """Seconds of a layer for a micro-batch: forward (1), or backward (2)."""
        parts = (self.computing(choice, part, times) for part in ("attention", "mlp"))
        return sum(parts)

    def computing(self, choice: Choice, part: str, times: float) -> float:
        """Seconds of attention, MLP or head: forward (1), or backward (2)."""
        tokens = choice.microbatch * self.sequence / choice.axes.cp
        return _computing(self, tokens, choice.axes.tp, part, times)

    def kernels(self, tokens: float, tp: int) -> Kernels:
        """The rooflines of so many tokens; the device is known."""
        if self.device is None:
            raise BadArgument("search: rooflines need a device that is known")
        size, plain = self.weight_bytes, self.plain
        return Kernels(self.device, self.model, tokens, self.sequence, tp, size, plain)

    @property
    def setting(self) -> Setting:
        """As `unisono plan` takes it."""
        return Setting(self.n, self.batch, self.sequence, self.weight_bytes)


@lru_cache(maxsize=4096)
def _computing(job: Job, tokens: float, tp: int, part: str, times: float) -> float:
    model, sequence = job.model, job.sequence
    if job.device:
        return job.kernels(tokens, tp).seconds(part, times)
    flops = {
        "attention": model.attention_flops(sequence),
        "mlp": model.mlp_flops,
        "head": model.head_flops,
    }[part]
    return times * flops * tokens / tp / (job.peak * job.efficiency)


@dataclass(frozen=True)
class Choice:
    """One way of training."""

    axes: Axes
    zero: int = 0
    recompute: str = "none"
    microbatch: int = 1
    microbatches: int = 1
    chunks: int = 1
    order: tuple[str, ...] = field(default=ORDERS[0])
    bucket: int = BUCKETS[0]
    codec: str = "none"

    @cached_property
    def strides(self) -> dict[str, int]:
        """How far apart neighbours along each axis are."""
        found, stride = {}, 1
        for axis in self.order:
            found[axis] = stride
            stride *= int(getattr(self.axes, axis))
        return found

    @property
    def placement(self) -> str:
        """The axes that have ranks, from neighbours outwards."""
        return " ".join(a for a in self.order if getattr(self.axes, a) > 1) or "dp"

    def __str__(self) -> str:
        """One line for people."""
        parts = [str(self.axes), f"zero {self.zero}"]
        parts += [f"recompute {self.recompute}"]
        parts += [f"{self.microbatches} micro-batches of {self.microbatch}"]
        parts += [f"{self.chunks} chunks a stage"] if self.chunks > 1 else []
        parts += [f"codec {self.codec}"] if self.codec != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Limits:
    """What may be chosen."""

    axes: Mapping[str, int] = field(default_factory=dict)
    """Axes whose number of ranks is given."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    codecs: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        """Refuse names that there are not."""
        for axis in self.axes:
            if axis not in ORDERS[0]:
                raise unknown("axis", axis, ORDERS[0])
        for zero in self.zero:
            if zero not in range(4):
                raise BadArgument(f"search: zero {zero}: expected 0, 1, 2 or 3")
        for kind in self.recompute:
            if kind not in RECOMPUTE:
                raise unknown("recomputing", kind, RECOMPUTE)
        for codec in self.codecs:
            if codec != "none":
                codecs.get(codec)


def choices(job: Job, limits: Limits) -> Iterator[list[Choice]]:
    """All choices but placements, buckets and codecs, in families.

    A family has the same mesh, micro-batches and chunks; what else is chosen trades
    memory for time.
    """
    if len(limits.axes) == len(ORDERS[0]):
        mesh = Axes(**limits.axes)
        if problem := misfit(job.model, job.setting, mesh):
            raise BadArgument(f"mesh {mesh}: {problem}")
    for axes in meshes(job.model, job.setting):
        given = all(getattr(axes, a) == size for a, size in limits.axes.items())
        if not given or job.model.heads % axes.tp:
            continue
        rows = job.batch // (axes.dp * axes.ep)
        for size in MICROBATCHES:
            # Of several sequences at a time each rank can have whole ones: less is sent
            # than if all were divided by cp.
            if rows % size or (size > 1 and axes.cp > 1):
                continue
            for chunks in _chunks(job.model.layers, axes.pp, rows // size):
                base = Choice(axes, 0, "none", size, rows // size, chunks)
                yield [
                    replace(base, zero=zero, recompute=again)
                    for zero in _zeros(base, job.model)
                    if zero in limits.zero
                    for again in RECOMPUTE
                    if again in limits.recompute
                ]


def _chunks(layers: int, pp: int, microbatches: int) -> Iterator[int]:
    """How many chunks a stage can have.

    Several need whole rounds of micro-batches, and equally many layers; at the ends of
    the model, where the embedding and the head are, there may be fewer.
    """
    yield 1
    if pp == 1 or microbatches % pp:
        return
    for chunks in range(2, MOST_CHUNKS + 1):
        if pp * chunks > layers + 2:
            return
        each = layers_of(layers, pp, chunks)
        if len(set(each[1:-1])) == 1:
            yield chunks


def _zeros(base: Choice, model: ModelShape) -> range:
    """ZeRO stages: none without replicas; experts' parameters are not shared out."""
    if base.axes.replicas == 1:
        return range(1)
    return range(2 if model.experts else 4)


def placed(choice: Choice) -> Iterator[Choice]:
    """The same choice with every placement; tensor parallel ranks are neighbours."""
    inner = ORDERS[0][:1]
    used = [axis for axis in ORDERS[0][1:] if getattr(choice.axes, axis) > 1]
    rest = tuple(axis for axis in ORDERS[0][1:] if axis not in used)
    for order in permutations(used):
        yield replace(choice, order=(*inner, *order, *rest))


def layers_of(layers: int, pp: int, chunks: int) -> list[int]:
    """Layers of each chunk, in the order of the model: the ends get fewer.

    Chunk g is on stage g % pp. The last has the head, so the first and the last are
    filled last.
    """
    runs = pp * chunks
    each, more = divmod(layers, runs)
    inner = [*range(1, runs - 1), 0, runs - 1] if runs > 1 else [0]
    found = [each] * runs
    for place in inner[:more]:
        found[place] += 1
    return found


@cache
def layers_on_a_stage(layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage."""
    each = layers_of(layers, pp, chunks)
    return tuple(sum(each[stage::pp]) for stage in range(pp))
