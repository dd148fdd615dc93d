"""What a choice costs: the passes of a chunk, what replicas send, and closed forms.

A pass of a chunk (a run of layers, for one micro-batch) is computing and what computing
waits for:

    compute    a roofline for each class of kernels (`simulate/kernels.py`); of devices
               that are not known, operations over the rate
    recompute  forward again (full), or the memory traffic of cheap functions
    tensor     an all_gather and a reduce_scatter around attention and around the MLP
    context    keys and values sent around, as far as attention does not hide it
    experts    tokens to the experts and back
    sharding   parameters gathered for the pass (zero 3), as far as it does not hide it
    beside     what is hidden slows computing: kernels that send use a share of the rank

To these a step adds `pipeline` (the neighbours are awaited), `data` (replicas are
awaited) and `optimizer`. Replicas reduce gradients after the last micro-batch (after
each with zero 2 and 3), and gather new parameters before the first (zero 1 and 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from unisono import codecs
from unisono.parallel.estimate.strategies import sharded_block
from unisono.search.memory import (
    expert_parameters,
    kept_selectively,
    parameters,
)
from unisono.search.network import Groups, Network, groups
from unisono.search.space import Choice, Job, layers_on_a_stage
from unisono.simulate.kernels import ADAM_BYTES

Price = Callable[[Groups, str, float], float]
"""Seconds of a collective of so many bytes on these groups."""
Parts = dict[str, float]
BESIDE = 20 / 132
"""How much of a rank's computing what is sent beside it takes: DeepSeek-V3 set 20 of
132 multiprocessors aside for it (arXiv 2412.19437, section 3.2.2)."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and what a rank of the slowest stage does in them."""

    time: float
    parts: Parts

    @property
    def waits(self) -> list[tuple[str, float]]:
        """All but computing, the longest first."""
        rest = [p for p in self.parts.items() if p[0] != "compute" and p[1] > 0]
        return sorted(rest, key=lambda part: -part[1])


@dataclass(eq=False)
class Passes:
    """A choice with its prices: how long each pass takes, and what of it is what."""

    job: Job
    choice: Choice
    network: Network
    price: Price
    _known: dict[tuple[int, bool, bool], Parts] = field(default_factory=dict)
    _sent: dict[tuple[str, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What all passes have in common."""
        c, model = self.choice, self.job.model
        self.tokens = c.microbatch * self.job.sequence / c.axes.cp
        self.activation = self.tokens * model.hidden * self.job.weight_bytes
        self.weights, self.layers = parameters(model, c.axes.pp, c.chunks, c.axes.tp)
        self.replicas = groups(c, "dp", "cp", "ep")
        self.same_experts = groups(c, "dp", "cp")

    # --- passes of a chunk

    def parts(self, place: int, *, backward: bool) -> Parts:
        """A pass of the chunk at this place of the model, by what it is for."""
        last = place == len(self.layers) - 1
        key = self.layers[place], last, backward
        if key not in self._known:
            self._known[key] = self._parts(self.layers[place], last, backward)
        return self._known[key]

    def seconds(self, place: int, *, backward: bool) -> float:
        """How long such a pass takes."""
        return sum(self.parts(place, backward=backward).values())

    def of_stage(self, stage: int) -> Parts:
        """All passes of a stage for one micro-batch."""
        whole: Parts = {}
        last = len(self.layers) - 1
        places = range(stage, last + 1, self.choice.axes.pp)
        alike = Counter((self.layers[g], g == last) for g in places)
        one_of = {(self.layers[g], g == last): g for g in places}
        for kind, count in alike.items():
            for backward in (False, True):
                one = self.parts(one_of[kind], backward=backward)
                for name, seconds in one.items():
                    whole[name] = whole.get(name, 0.0) + count * seconds
        return whole

    def _parts(self, layers: int, last: bool, backward: bool) -> Parts:
        times = 2.0 if backward else 1.0
        job, tp = self.job, self.choice.axes.tp
        head = job.computing(self.choice, "head", times) if last else 0.0
        full = backward and self.choice.recompute == "full"
        found = {
            "compute": layers * job.layer(self.choice, times) + head,
            "recompute": layers * self._again if backward else 0.0,
        }
        if tp > 1:
            sums = layers * (2 if full else 1) + (0.25 if last else 0.0)
            found["tensor"] = sums * self._sums
        beside = 0.0
        if self.choice.axes.cp > 1:
            found["context"], beside = self._context(layers * (times + full))
        if self.choice.axes.ep > 1:
            found["experts"] = layers * self._experts * (2 if full else 1)
        if self.choice.zero == 3:
            sent = layers * self._gathered
            sent += layers * self._reduced if backward else 0.0
            shown = max(0.0, sent - sum(found.values()))
            found["sharding"] = shown
            beside += sent - shown
        if beside:
            found["beside"] = BESIDE * beside
        return found

    @cached_property
    def _again(self) -> float:
        """Seconds to compute again what a layer did not keep."""
        if self.choice.recompute == "full":
            return self.job.layer(self.choice, 1.0)
        if self.choice.recompute == "none":
            return 0.0
        model = self.job.model
        part = (model.kept - kept_selectively(model)) / self.choice.axes.tp
        again = 2 * part * self.activation / self.job.memory_rate
        if self.job.plain and self.job.device:
            again += self.job.kernels(self.tokens, self.choice.axes.tp).scores[0]
        return again

    @cached_property
    def _sums(self) -> float:
        """The collectives of tensor parallel ranks in a layer, one way."""
        of = groups(self.choice, "tp")
        once = self.price(of, "all_gather", self.activation)
        return 2 * (once + self.price(of, "reduce_scatter", self.activation))

    def _context(self, times: float) -> tuple[float, float]:
        """What attention waits for keys and values, and what of them it hides.

        In a layer they go round once forward, and twice as much backward.
        """
        axes, model = self.choice.axes, self.job.model
        nbytes = 2 * model.kv_width / axes.tp * self.tokens * self.job.weight_bytes
        hop = self.network.shift(groups(self.choice, "cp"), nbytes)
        scores = model.attention_flops(self.job.sequence) - 2 * model.attention_weights
        hides = scores * self.tokens / axes.tp / self.job.attention_rate
        sent = (axes.cp - 1) * hop
        return times * max(0.0, sent - hides), times * min(sent, hides)

    @cached_property
    def _experts(self) -> float:
        """Tokens of a layer to their experts and back."""
        sent = self.activation * self.job.model.top_k
        return 2 * self.price(groups(self.choice, "ep"), "all_to_all", sent)

    @cached_property
    def hop(self) -> float:
        """Seconds that activations take to the next stage."""
        nbytes = self.activation / self.choice.axes.tp
        return self.network.shift(groups(self.choice, "pp"), nbytes)

    # --- replicas

    def buckets(self, place: int) -> float:
        """How many buckets the gradients of a chunk fill."""
        size = self.job.gradient_bytes * (self.weights[place] + self._held(place))
        return max(1.0, size / self.choice.bucket)

    def _held(self, place: int) -> float:
        """Parameters of experts in a chunk."""
        if not self.job.model.experts:
            return 0.0
        ep = self.choice.axes.ep
        return self.layers[place] * expert_parameters(self.job.model, ep)

    def bucket(self, place: int) -> float:
        """Seconds to reduce one bucket of a chunk."""
        size = self.job.gradient_bytes / self.buckets(place)
        return self._reduce(self.weights[place] * size, self._held(place) * size)

    def _reduce(self, dense: float, held: float) -> float:
        what = "all_reduce" if self.choice.zero == 0 else "reduce_scatter"
        ratio, coding = self._codec
        sent = self._both(what, ratio * dense, ratio * held)
        return sent + coding * (dense + held)

    def _both(self, what: str, dense: float, held: float) -> float:
        """A collective of replicas; experts have fewer of them."""
        if not held:
            key = what, dense
            if key not in self._sent:
                self._sent[key] = self.price(self.replicas, what, dense)
            return self._sent[key]
        sent = self.price(self.replicas, what, dense)
        return sent + self.price(self.same_experts, what, held)

    def gather(self, place: int) -> float:
        """Seconds to gather the new parameters of a chunk: zero 1 and 2."""
        if self.choice.zero not in (1, 2):
            return 0.0
        size = self.job.weight_bytes
        held = self._held(place) * size
        return self._both("all_gather", self.weights[place] * size, held)

    @cached_property
    def _gathered(self) -> float:
        """Seconds to gather a layer: zero 3."""
        weights = sharded_block(self.job.model, self.choice.axes.tp)
        return self._both("all_gather", self.job.weight_bytes * weights, 0.0)

    @cached_property
    def _reduced(self) -> float:
        """Seconds to reduce the gradients of a layer: zero 3."""
        weights = sharded_block(self.job.model, self.choice.axes.tp)
        return self._reduce(self.job.gradient_bytes * weights, 0.0)

    @cached_property
    def _codec(self) -> tuple[float, float]:
        """The part of the bytes that is sent, and the seconds a byte of coding it."""
        if self.choice.codec == "none":
            return 1.0, 0.0
        ratio = codecs.get(self.choice.codec).share(self.job.gradient_bytes)
        return ratio, 2 * (1 + ratio) / self.job.memory_rate

    def optimizer(self, stage: int) -> float:
        """Seconds to step the parameters of a stage: what passes through memory."""
        axes = self.choice.axes
        places = range(stage, len(self.layers), axes.pp)
        shared = sum(self.weights[g] for g in places)
        held = sum(self._held(g) for g in places)
        if self.choice.zero:
            shared, held = shared / axes.replicas, held / (axes.dp * axes.cp)
        return ADAM_BYTES * (shared + held) / self.job.memory_rate


def least(job: Job, choice: Choice) -> float:
    """Seconds that computing takes, and a pipeline idles, if nothing else is awaited.

    No choice takes less.
    """
    model, axes = job.model, choice.axes
    layer = job.layer(choice, 1.0) + job.layer(choice, 2.0)
    if choice.recompute == "full":
        layer += job.layer(choice, 1.0)
    each = layer * max(layers_on_a_stage(model.layers, axes.pp, choice.chunks))
    idle = (axes.pp - 1) / choice.chunks
    return (choice.microbatches + idle) * each


def estimate(passes: Passes) -> Cost:
    """The step by closed form: passes, the idle time of a pipeline, and the rest.

    Stages are as slow as the slowest. Of what replicas send, that is hidden which fits
    beside a micro-batch's backward (gradients) and forward (parameters).
    """
    choice, count = passes.choice, passes.choice.microbatches
    pp = choice.axes.pp
    slowest: tuple[float, Parts, int] = (-1.0, {}, 0)
    for stage in sorted({0, min(1, pp - 1), pp - 1}):
        whole = passes.of_stage(stage)
        slowest = max(slowest, (sum(whole.values()), whole, stage), key=lambda s: s[0])
    each, whole, stage = slowest
    parts = {name: count * seconds for name, seconds in whole.items()}
    if pp > 1:
        hops = 2 * choice.chunks * passes.hop
        parts["pipeline"] = (pp - 1) / choice.chunks * (each + hops)
    sent, parts["data"] = _replicas(passes, stage, each)
    hidden = BESIDE * max(0.0, sent - parts["data"])
    parts["beside"] = parts.get("beside", 0.0) + hidden
    parts["optimizer"] = passes.optimizer(stage)
    return Cost(sum(parts.values()), parts)


def _replicas(passes: Passes, stage: int, each: float) -> tuple[float, float]:
    """What replicas send beside the passes, and what of it nothing hides."""
    choice = passes.choice
    places = range(stage, len(passes.layers), choice.axes.pp)
    last = passes.bucket(places[0])
    if choice.zero == 3:
        return last, last
    reduced = sum(passes.buckets(g) * passes.bucket(g) for g in places)
    gathered = sum(passes.gather(g) for g in places)
    first = max(gathered - each / 3, passes.gather(places[0]))
    if choice.zero == 2:
        count = choice.microbatches
        over = count * max(0.0, reduced - each)
        return count * reduced + gathered, max(over, last) + first
    return reduced + gathered, max(reduced - each / 2, last) + first
