"""The memory that a choice needs on its fullest rank.

Activations between tensor parallel layers are sharded too (sequence parallelism), so a
block keeps 1/tp of everything. A stage of a pipeline keeps those of all micro-batches
that are under way; the first has most of these, and the last has the logits.
"""

from __future__ import annotations

from functools import cache

from unisono.memory_use import MemoryUse, kept, logits
from unisono.models import ModelShape
from unisono.parallel.estimate.strategies import sharded_block
from unisono.search.space import ADAM, Choice, Job, layers_of

LOGIT_BYTES = 4


@cache
def kept_selectively(model: ModelShape) -> float:
    """Activations that a block keeps if norms and cheap functions are computed again.

    These are the inputs of the two norms; queries, keys, values and the output of
    attention; and what goes into the function inside the MLP.
    """
    wide = (1 if model.family != "llama" else 2) * model.feed_forward / model.hidden
    mlp = model.top_k * (1 + wide) if model.experts else wide
    attention = 2 * (model.query_width + model.kv_width) / model.hidden
    return 2 + attention + mlp


@cache
def parameters(
    model: ModelShape, pp: int, chunks: int, tp: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Of each chunk the parameters that a rank has, without experts; and its layers."""
    layers = layers_of(model.layers, pp, chunks)
    found = [count * sharded_block(model, tp) for count in layers]
    words = model.vocabulary * model.hidden / tp
    found[0] += words + model.places * model.hidden
    found[-1] += model.final_norm + model.pooler
    if not model.tied or pp > 1:  # a head that is tied is on another stage: a copy
        found[-1] += words
    return tuple(found), tuple(layers)


def expert_parameters(model: ModelShape, ep: int) -> float:
    """Parameters of the experts of one layer that a rank has."""
    return model.experts * model.mlp / ep


def memory_of(job: Job, choice: Choice) -> MemoryUse:
    """What the fullest rank needs."""
    pp = choice.axes.pp
    stages = sorted({0, min(1, pp - 1), pp - 1})
    return max((_stage(job, choice, s) for s in stages), key=lambda use: use.total)


def warm_up(stage: int, pp: int, chunks: int, total: int) -> int:
    """Forward passes of chunks before a stage's first backward pass but one."""
    ahead = pp - stage - 1
    return min(ahead if chunks == 1 else 2 * ahead + (chunks - 1) * pp, total)


def _stage(job: Job, choice: Choice, stage: int) -> MemoryUse:
    model, axes, chunks = job.model, choice.axes, choice.chunks
    weights, layers = parameters(model, axes.pp, chunks, axes.tp)
    shared = sum(weights[stage :: axes.pp])
    mine = sum(layers[stage :: axes.pp])
    experts = mine * expert_parameters(model, axes.ep)
    tokens = choice.microbatch * job.sequence / axes.cp
    total = choice.microbatches * chunks
    under_way = min(warm_up(stage, axes.pp, chunks, total) + 1, total) / chunks
    gathered = sharded_block(model, axes.tp) if choice.zero == 3 else 0.0
    moving = 2 * choice.bucket if choice.zero >= 2 or choice.codec != "none" else 0.0

    def shared_out(stage: int) -> float:
        """Parameters of which a rank keeps something from this ZeRO stage on."""
        if choice.zero < stage:
            return shared + experts
        return shared / axes.replicas + experts / (axes.dp * axes.cp)

    return MemoryUse(
        parameters=job.weight_bytes * (shared_out(3) + 2 * gathered),
        gradients=job.gradient_bytes * shared_out(2),
        optimizer=ADAM * shared_out(1),
        activations=_activations(job, choice, mine, tokens, under_way),
        logits=logits(model, tokens, LOGIT_BYTES, axes.tp)
        if stage == axes.pp - 1
        else 0.0,
        buckets=moving + job.gradient_bytes * gathered,
    )


def _activations(
    job: Job, choice: Choice, layers: int, tokens: float, under_way: float
) -> float:
    model, tp = job.model, choice.axes.tp
    one = tokens * model.hidden * job.weight_bytes
    scores = model.kept_scores(job.sequence) if job.plain else 0.0
    whole = model.kept + scores
    part = kept_selectively(model) if choice.recompute == "selective" else whole
    held = kept(
        layers,
        part / tp,
        one,
        recompute=choice.recompute == "full",
        edge=1 / tp,
        in_flight=under_way,
    )
    if choice.recompute == "selective":  # one block has all of its own again
        held += (whole - part) / tp * one
    return held
