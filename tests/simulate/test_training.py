"""Training steps: cases computed by hand, and laws that any plan keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import BadArgument, NotOffered
from unisono.models import ModelShape, gpt, of_size
from unisono.simulate import simulate, train
from unisono.simulate.groups import EqualGroups
from unisono.simulate.streams import STREAMS, Task, run
from unisono.simulate.training import Planner, Setup
from unisono.topology import parse

TINY = ModelShape("tiny", 2, 64, 128, 4, 2, 1000)
SLOW = {"peak": 1e9, "efficiency": 1.0, "sequence": 32, "algorithm": "ring"}
"""A processor so slow that anything sent beside computing is hidden."""


def seconds(collective, topology, nbytes):
    return simulate("ring", topology, nbytes, collective=collective).time


def forward(sequence=32):
    """Operations of TINY by hand: attention has 64·64·2 + 64·32·2 weights."""
    attention, dense, head = 12_288, 3 * 64 * 128, 64_000
    layer = 2 * attention + 2 * sequence * 64 + 2 * dense
    return 2 * layer + 2 * head


def test_model_has_the_operations_computed_by_hand():
    assert TINY.flops(32) == forward()


@pytest.mark.parametrize("model", [TINY, gpt(positions=32), of_size("1M", 1_000_003)])
def test_units_of_the_plan_have_all_parameters_and_operations(model):
    plan = Planner(model, parse("switch:1"), Setup(sequence=32), 1.0)
    assert sum(weights for _, weights, _ in plan.units) == model.parameters
    flops = sum(
        plan.seconds(part, 1.0) / plan.tokens
        for *_, parts in plan.units
        for part in parts
    )
    assert flops == pytest.approx(model.flops(32))


def test_ddp_with_one_bucket_sends_after_backward():
    found = train(TINY, "switch:2", strategy="ddp", bucket=1 << 30, **SLOW)
    compute = 4 * forward() * 32 / 1e9
    sent = seconds("all_reduce", "switch:2", 2 * TINY.parameters)
    assert found.compute == pytest.approx(compute)
    assert found.time == pytest.approx(compute + sent)
    assert found.exposed == pytest.approx(sent)
    assert found.efficiency == pytest.approx(compute / (compute + sent))
    assert found.tokens_per_second == pytest.approx(2 * 32 / found.time)
    states = found.use.parameters + found.use.gradients + found.use.optimizer
    assert states == 16 * TINY.parameters


def test_ddp_with_small_buckets_exposes_the_last_two():
    """The embedding's backward computes nothing, so the layer's bucket is exposed."""
    found = train(TINY, "switch:2", strategy="ddp", bucket=1, **SLOW)
    head = seconds("all_reduce", "switch:2", 2 * TINY.head)
    last = seconds("all_reduce", "switch:2", 2 * TINY.embedding)
    layer = seconds("all_reduce", "switch:2", 2 * TINY.block)
    assert found.exposed == pytest.approx(last + layer)
    assert found.communication == pytest.approx(head + last + 2 * layer)


def test_step_without_recomputation_is_three_forward_passes():
    found = train(TINY, "switch:2", strategy="ddp", recompute=False, **SLOW)
    assert found.compute == pytest.approx(3 * forward() * 32 / 1e9)


def test_fsdp_without_prefetch_waits_for_every_gather():
    found = train(TINY, "switch:4", strategy="fsdp", prefetch=0, **SLOW)
    units = [2 * TINY.embedding, 2 * TINY.head, 2 * TINY.block, 2 * TINY.block]
    gathers = 2 * sum(seconds("all_gather", "switch:4", u) for u in units)
    scattered = seconds("reduce_scatter", "switch:4", 2 * TINY.embedding)
    assert found.time >= found.compute + gathers
    # Beside them only the embedding's own gradients, and what they queue behind, show.
    layer = seconds("reduce_scatter", "switch:4", 2 * TINY.block)
    assert found.time <= found.compute + gathers + scattered + layer + 1e-12
    assert found.use.gradients == 2 * TINY.parameters / 4
    assert found.use.optimizer == 12 * TINY.parameters / 4
    gathered = 2 * max(TINY.embedding, TINY.head)
    assert found.use.parameters == 2 * TINY.parameters / 4 + gathered
    assert found.use.buckets == gathered


def test_fsdp_with_more_prefetch_is_not_slower():
    times = [
        train(TINY, "switch:4", strategy="fsdp", prefetch=p, **SLOW).time
        for p in (0, 1, 2)
    ]
    assert times[0] > times[1] >= times[2]


def test_tensor_parallel_sums_are_never_hidden():
    found = train(TINY, "switch:2", strategy="ddp", tp=2, **SLOW)
    activations = 32 * 64 * 2
    each = seconds("all_reduce", "switch:2", activations)
    assert found.compute == pytest.approx(4 * forward() * 32 / 1e9 / 2)
    assert found.time == pytest.approx(found.compute + 8 * each)
    assert [(u.axis, u.times, u.nbytes) for u in found.used] == [
        ("tensor", 8, activations)
    ]


def test_one_rank_has_no_communication():
    found = train(TINY, "switch:1", **SLOW)
    assert found.time == pytest.approx(found.compute)
    assert found.efficiency == pytest.approx(1.0)
    assert found.used == ()


def test_groups_without_shared_links_take_as_long_as_one_group():
    groups = EqualGroups(parse("switch:8"), np.arange(8).reshape(2, 4), "ring")
    for what in ("all_reduce", "all_gather", "reduce_scatter"):
        alone = seconds(what, "switch:4", 1 << 20)
        assert groups.time(what, 1 << 20) == (pytest.approx(alone), "ring")


def test_groups_that_share_a_nic_divide_its_bandwidth():
    def time(topology):
        ranks = np.ascontiguousarray(np.arange(16).reshape(2, 8).T)
        return EqualGroups(parse(topology), ranks, "ring").time("all_gather", 64 << 20)[
            0
        ]

    own, shared = time("dgx-h100:2"), time("dgx-h100:2,nics=1")
    assert shared == pytest.approx(8 * own, rel=0.05)


def test_groups_use_the_fastest_of_several_algorithms():
    groups = EqualGroups(parse("dgx-h100:4"), np.arange(32).reshape(1, 32))
    best, name = groups.time("all_reduce", 1 << 28)
    for other in ("ring", "rabenseifner", "hierarchical:levels=8x4"):
        ranks = np.arange(32).reshape(1, 32)
        named = EqualGroups(parse("dgx-h100:4"), ranks, other).time(
            "all_reduce", 1 << 28
        )
        assert best <= named[0] * (1 + 1e-9)
    assert name


@pytest.mark.sweep
def test_70b_on_512_gpus_scales_with_batch_and_nics():
    found = train("70B", "dgx-h100:64", strategy="fsdp", tp=8)
    assert (found.n, found.dp) == (512, 64)
    assert found.time > found.compute > 0
    assert 0 < found.efficiency < 1
    more = train("70B", "dgx-h100:64", strategy="fsdp", tp=8, batch=4)
    assert more.efficiency > found.efficiency  # more to compute for what is sent
    worse = train("70B", "dgx-h100:64,nics=1", strategy="fsdp", tp=8)
    assert worse.efficiency < found.efficiency
    assert "989 Tflop/s" in str(found)
    assert "assumed:" in str(found)
    result = found.as_dict()
    assert result["exposed"] == pytest.approx(result["time"] - result["compute"])


tasks = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.floats(0, 10), st.sets(st.integers(0, 9))),
    max_size=10,
).map(
    lambda drawn: [
        Task(str(i), stream, s, tuple(a for a in sorted(after) if a < i))
        for i, (stream, s, after) in enumerate(drawn)
    ]
)


@given(tasks)
def test_tasks_start_as_soon_as_stream_and_dependencies_allow(plan):
    ran = run(plan)
    free = dict.fromkeys(STREAMS, 0.0)
    for task, one in zip(plan, ran, strict=True):
        waits = [free[task.stream], *(ran[a].end for a in task.after)]
        assert one.start == max(waits)
        assert one.end == one.start + task.seconds
        free[task.stream] = one.end


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("a", "kitchen", 1.0), "unknown stream"),
        (Task("a", "compute", 1.0, (0,)), "earlier"),
        (Task("a", "compute", 1.0, (-1,)), "earlier"),
    ],
)
def test_tasks_with_unknown_stream_or_later_dependency_are_refused(task, message):
    with pytest.raises(BadArgument, match=message):
        run([task])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "does not divide"),
        ({"tp": 0}, "tp = 0"),
        ({"strategy": "fdsp"}, "nearest: fsdp"),
        ({"efficiency": 0.0}, "efficiency"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"batch": 0}, "batch = 0"),
        ({"prefetch": -1}, "prefetch"),
        ({"peak": 0.0}, "give peak="),
        ({"algorithm": "rong"}, "rong"),
    ],
)
def test_setups_out_of_range_are_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        train(TINY, "switch:4", **{"peak": 1e12} | options)


def test_more_ranks_than_simulated_are_refused():
    with pytest.raises(NotOffered, match="at most"):
        train(TINY, "switch:16385", peak=1e12)


def test_model_without_a_shape_has_equal_layers_and_no_tensor_parallelism():
    model = of_size("1M", 1_000_000, layers=4)
    step = train(model, "switch:2", strategy="fsdp", **SLOW)
    assert step.compute == pytest.approx(4 * 2e6 * 32 / 1e9)
    assert any("4 equal layers" in line for line in step.assumptions)
    with pytest.raises(BadArgument, match="tp = 2 needs the shape of 1M"):
        train(model, "switch:2", tp=2, **SLOW)


def test_experts_are_not_sharded_by_tensor_parallelism():
    model = gpt(layers=1, hidden=64, positions=32, experts=4)
    with pytest.raises(BadArgument, match="experts are not sharded by tp"):
        train(model, "switch:2", tp=2, **SLOW)


def test_sequences_longer_than_the_model_has_positions_are_refused():
    with pytest.raises(BadArgument, match="gpt2 has 1024 positions"):
        train("gpt2", "switch:2", sequence=2048, peak=1e12)


def test_groups_in_which_a_rank_is_twice_are_refused():
    with pytest.raises(BadArgument, match="exactly one"):
        EqualGroups(parse("switch:4"), np.array([[0, 1], [1, 2]]))


def test_memory_has_activations_with_and_without_recomputation():
    """By hand: TINY keeps 4 activations between, and 12 inside."""
    how = SLOW | {"strategy": "ddp"}
    a, block = 32 * 64 * 2, 4 + 3 + 2 * 32 / 64 + 4 * 128 / 64
    kept = train(TINY, "switch:2", recompute=False, **how).use
    again = train(TINY, "switch:2", recompute=True, **how).use
    assert kept.activations == 2 * block * a
    assert again.activations == (2 + block) * a
    assert kept.logits == again.logits == 2 * 32 * 1000 * 2
    assert kept.total == pytest.approx(1.1 * kept.counted)


def test_step_that_does_not_fit_says_so():
    how = {"strategy": "ddp", "tp": 8, "algorithm": "ring"}
    found = train("70B", "dgx-h100:2", **how)
    assert found.fits is False
    assert "DOES NOT FIT into 79 GiB; try fsdp" in str(found)
    assert found.as_dict()["fits"] is False
    roomy = train("70B", "dgx-h100:2", **how, memory=192 << 30)
    assert roomy.fits is True
    assert ", of 192 GiB: fits" in str(roomy)
    assert train(TINY, "switch:2", **SLOW).fits is None
