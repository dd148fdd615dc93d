"""Training steps: cases computed by hand, and laws that any plan keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import BadArgument, NotOffered
from unisono.simulate import simulate, train
from unisono.simulate.groups import EqualGroups
from unisono.simulate.models import MODELS, Model, model_named
from unisono.simulate.streams import STREAMS, Task, run
from unisono.topology import parse

TINY = Model("tiny", 2, 64, 128, 4, 2, 1000)
SLOW = {"peak": 1e9, "efficiency": 1.0, "sequence": 32, "algorithm": "ring"}
"""A processor so slow that anything sent beside computing is hidden."""


def seconds(collective, topology, nbytes):
    return simulate("ring", topology, nbytes, collective=collective).time


def forward(sequence=32):
    """Operations of TINY by hand: attention has 64·64·2 + 64·32·2 weights."""
    attention, dense, head = 12_288, 3 * 64 * 128, 64_000
    layer = 2 * attention + 2 * sequence * 64 + 2 * dense
    return 2 * layer + 2 * head


def test_the_shape_of_a_model_gives_its_weights():
    assert TINY.weights == 2 * (12_288 + 24_576) + 2 * 64_000
    assert TINY.flops(32) == forward()
    billions = {name: model.weights / 1e9 for name, model in MODELS.items()}
    for name, told in (("7B", 6.7), ("8B", 8.0), ("13B", 13.0), ("70B", 70.6)):
        assert billions[name] == pytest.approx(told, rel=0.01)
    assert billions["405B"] == pytest.approx(405.8, rel=0.01)


def test_one_bucket_is_sent_when_all_is_computed():
    found = train(TINY, "switch:2", strategy="ddp", bucket=1 << 30, **SLOW)
    compute = 4 * forward() * 32 / 1e9
    sent = seconds("all_reduce", "switch:2", 2 * TINY.weights)
    assert found.compute == pytest.approx(compute)
    assert found.time == pytest.approx(compute + sent)
    assert found.exposed == pytest.approx(sent)
    assert found.efficiency == pytest.approx(compute / (compute + sent))
    assert found.tokens_per_second == pytest.approx(2 * 32 / found.time)
    assert found.memory == 16 * TINY.weights


def test_of_small_buckets_the_last_two_show():
    """The embedding's backward computes nothing, so the layer's bucket shows, too."""
    found = train(TINY, "switch:2", strategy="ddp", bucket=1, **SLOW)
    last = seconds("all_reduce", "switch:2", 2 * TINY.embedding)
    layer = seconds("all_reduce", "switch:2", 2 * (TINY.attention + TINY.dense))
    assert found.exposed == pytest.approx(last + layer)
    assert found.communication == pytest.approx(2 * last + 2 * layer)


def test_without_recomputing_a_step_is_three_forward_passes():
    found = train(TINY, "switch:2", strategy="ddp", recompute=False, **SLOW)
    assert found.compute == pytest.approx(3 * forward() * 32 / 1e9)


def test_fsdp_without_prefetch_waits_for_every_gather():
    found = train(TINY, "switch:4", strategy="fsdp", prefetch=0, **SLOW)
    units = 2 * [2 * TINY.embedding] + 2 * [2 * (TINY.attention + TINY.dense)]
    gathers = 2 * sum(seconds("all_gather", "switch:4", u) for u in units)
    scattered = seconds("reduce_scatter", "switch:4", 2 * TINY.embedding)
    assert found.time >= found.compute + gathers
    # Beside them only the embedding's own gradients, and what they queue behind, show.
    layer = seconds("reduce_scatter", "switch:4", 2 * (TINY.attention + TINY.dense))
    assert found.time <= found.compute + gathers + scattered + layer + 1e-12
    assert found.memory == 16 * TINY.weights / 4


def test_prefetch_hides_what_it_can():
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


def test_one_rank_only_computes():
    found = train(TINY, "switch:1", **SLOW)
    assert found.time == pytest.approx(found.compute)
    assert found.efficiency == pytest.approx(1.0)
    assert found.used == ()


def test_groups_that_share_nothing_take_as_long_as_one_alone():
    groups = EqualGroups(parse("switch:8"), np.arange(8).reshape(2, 4), "ring")
    for what in ("all_reduce", "all_gather", "reduce_scatter"):
        alone = seconds(what, "switch:4", 1 << 20)
        assert groups.time(what, 1 << 20) == (pytest.approx(alone), "ring")


def test_groups_that_share_a_card_wait_for_each_other():
    def time(topology):
        ranks = np.ascontiguousarray(np.arange(16).reshape(2, 8).T)
        return EqualGroups(parse(topology), ranks, "ring").time("all_gather", 64 << 20)[
            0
        ]

    own, shared = time("dgx-h100:2"), time("dgx-h100:2,nics=1")
    assert shared == pytest.approx(8 * own, rel=0.05)


def test_of_several_algorithms_the_quickest_is_taken():
    groups = EqualGroups(parse("dgx-h100:4"), np.arange(32).reshape(1, 32))
    best, name = groups.time("all_reduce", 1 << 28)
    for other in ("ring", "rabenseifner", "hierarchical:levels=8x4"):
        ranks = np.arange(32).reshape(1, 32)
        named = EqualGroups(parse("dgx-h100:4"), ranks, other).time(
            "all_reduce", 1 << 28
        )
        assert best <= named[0] * (1 + 1e-9)
    assert name


def test_70b_on_512_gpus():
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
    told = found.as_dict()
    assert told["exposed"] == pytest.approx(told["time"] - told["compute"])


tasks = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.floats(0, 10), st.sets(st.integers(0, 9))),
    max_size=10,
).map(
    lambda told: [
        Task(str(i), stream, s, tuple(a for a in sorted(after) if a < i))
        for i, (stream, s, after) in enumerate(told)
    ]
)


@given(tasks)
def test_nothing_begins_before_it_may_and_nothing_dawdles(plan):
    ran = run(plan)
    free = dict.fromkeys(STREAMS, 0.0)
    for task, one in zip(plan, ran, strict=True):
        waits = [free[task.stream], *(ran[a].end for a in task.after)]
        assert one.start == max(waits)
        assert one.end == one.start + task.seconds
        free[task.stream] = one.end


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("a", "kitchen", 1.0), "unknown stream"),
        (Task("a", "compute", 1.0, (0,)), "earlier"),
        (Task("a", "compute", 1.0, (-1,)), "earlier"),
    ],
)
def test_plans_that_cannot_be(task, said):
    with pytest.raises(BadArgument, match=said):
        run([task])


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_steps_that_cannot_be(options, said):
    with pytest.raises(BadArgument, match=said):
        train(TINY, "switch:4", **{"peak": 1e12} | options)


def test_too_many_ranks_are_refused():
    with pytest.raises(NotOffered, match="at most"):
        train(TINY, "switch:16385", peak=1e12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("71B", "nearest"),
        ("layers=2", "are needed"),
        ("layers=2,hidden=64,heads=5", "divide"),
        ("layers=2,hidden=64,heads=x", "expected"),
        ("legs=2", "expected"),
    ],
)
def test_models_that_cannot_be(text, said):
    with pytest.raises(BadArgument, match=said):
        model_named(text)
    assert model_named("layers=2,hidden=64,heads=4").feed_forward == 256


def test_every_rank_is_in_one_group():
    with pytest.raises(BadArgument, match="exactly one"):
        EqualGroups(parse("switch:4"), np.array([[0, 1], [1, 2]]))
