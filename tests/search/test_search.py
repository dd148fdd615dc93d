"""The search: laws of its parts, and what others published."""

from dataclasses import replace

import numpy as np
import pytest

from unisono.errors import BadArgument, UsageError
from unisono.models import parse_model
from unisono.parallel.estimate import Axes
from unisono.parallel.model.pipeline_order import one_forward_one_backward
from unisono.search import Limits, explain, search
from unisono.search.api import job_of
from unisono.search.cost import Passes, estimate, least
from unisono.search.memory import memory_of
from unisono.search.network import Network, groups
from unisono.search.played import order, play
from unisono.search.space import RECOMPUTE, Choice, Job, choices, layers_of, placed
from unisono.simulate.kernels import Kernels, find_device
from unisono.topology import parse

SMALL = "gpt:layers=8,hidden=512,vocabulary=1024,positions=512,heads=8"
FAST = {"peak": 1e12, "memory": 2 << 30}
MEGATRON = Axes(dp=16, tp=8, pp=8)
"""GPT-3 on 1,024 A100: 140 Tflop/s a GPU with recomputing (Narayanan and others, 2021,
section 5.1), in batches of 1,536 sequences of 2,048 tokens."""


def passes(choice, model=SMALL, topology="dgx-h100:2", batch=32, **more):
    where = parse(topology)
    job = job_of(model, where, batch=batch, sequence=512, **more)
    network = Network(where)
    return Passes(job, choice, network, network.closed)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (3, 4), (4, 2), (4, 8)])
def test_one_chunk_is_ordered_as_the_pipeline_of_the_library(pp, m):
    for stage in range(pp):
        mine = [(not back, number) for back, _, number in order(stage, pp, 1, m)]
        assert mine == [tuple(a) for a in one_forward_one_backward(stage, pp, m)]


@pytest.mark.parametrize(("pp", "chunks", "m"), [(2, 2, 2), (4, 2, 8), (4, 3, 12)])
def test_every_pass_of_interleaved_chunks_is_made_once(pp, chunks, m):
    for stage in range(pp):
        made = list(order(stage, pp, chunks, m))
        assert len(set(made)) == len(made) == 2 * m * chunks
        assert {place % pp for _, place, _ in made} == {stage}


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_pipeline_idles_as_the_formula_says(chunks):
    """Equal layers, free messages: (pp-1)/chunks of a micro-batch's time."""
    choice = Choice(Axes(dp=8, pp=2), 0, "none", 1, 4, chunks)
    model = SMALL.replace("vocabulary=1024", "vocabulary=1")
    found = passes(choice, model, efficiency=0.5)
    found.__dict__["hop"] = 0.0
    each = sum(found.of_stage(0).values())
    idle = play(found).parts["pipeline"]
    assert idle == pytest.approx(each / chunks, rel=0.01)
    assert estimate(found).parts["pipeline"] == pytest.approx(each / chunks, rel=0.01)


def test_step_without_other_ranks_is_computing():
    found = play(
        passes(Choice(Axes(), 0, "none", 8, 1), topology="dgx-h100:1", batch=8)
    )
    assert found.time == pytest.approx(sum(found.parts.values()))
    assert set(k for k, v in found.parts.items() if v) == {"compute", "optimizer"}


def test_layers_are_shared_out_with_fewer_at_the_ends():
    assert layers_of(126, 16, 8) == [0, *[1] * 126, 0]
    assert layers_of(10, 4, 1) == [2, 3, 3, 2]
    assert layers_of(3, 1, 1) == [3]


def test_groups_of_any_placement_have_every_rank_once():
    network = Network(parse("switch:24"))
    for choice in placed(Choice(Axes(dp=3, tp=2, pp=2, cp=2))):
        for axes in (("tp",), ("dp", "cp"), ("dp", "cp", "ep"), ("pp",)):
            ranks = network.members(groups(choice, *axes))
            assert np.array_equal(np.sort(ranks.ravel()), np.arange(24))
            size = np.prod([getattr(choice.axes, a) for a in axes])
            assert ranks.shape[1] == size


@pytest.mark.parametrize("of", [((8, 1),), ((4, 8),), ((2, 16), (2, 4))])
def test_closed_form_is_what_is_simulated_where_groups_share_nothing(of):
    network = Network(parse("dgx-h100:4"))
    for what in ("all_gather", "reduce_scatter", "all_reduce"):
        exact = network.simulated(of, what, 1 << 26)
        assert network.closed(of, what, 1 << 26) == pytest.approx(exact, rel=0.03)


def test_no_choice_beats_the_bound_that_prunes():
    job = job_of(SMALL, parse("dgx-h100:2"), batch=32, sequence=512)
    network = Network(parse("dgx-h100:2"))
    for family in choices(job, Limits()):
        for choice in family[::5]:
            cost = estimate(Passes(job, choice, network, network.closed))
            assert cost.time >= least(job, choice) * (1 - 1e-9)


def test_memory_falls_with_zero_recomputing_and_axes():
    job = job_of("70B", parse("dgx-h100:8"), batch=64, sequence=4096)
    base = Choice(Axes(dp=8, tp=8), 0, "none", 1, 8)
    needs = [
        memory_of(job, Choice(base.axes, zero, kind, 1, 8)).total
        for zero in range(4)
        for kind in ("none", "selective", "full")
    ]
    by_zero = np.array(needs).reshape(4, 3)
    assert (np.diff(by_zero, axis=0) < 0).all()
    assert (np.diff(by_zero, axis=1) < 0).all()
    staged = memory_of(job, Choice(Axes(tp=8, pp=8), 0, "none", 1, 64))
    assert staged.parameters < 2 * job.model.parameters / 50


@pytest.mark.sweep
def test_search_finds_the_quickest_of_all_choices():
    where = parse("dgx-h100:1")
    found = search(SMALL, where, batch=16, sequence=512, top=50, **FAST)
    network, times = Network(where), []
    for family in choices(found.job, Limits()):
        for choice in family:
            if memory_of(found.job, choice).total <= found.job.memory:
                one = Passes(found.job, choice, network, network.simulated)
                times.append(play(one).time)
    assert found.best.time <= min(times) * 1.001
    assert all(p.use.total <= found.job.memory for p in found.plans)
    assert [p.time for p in found.plans] == sorted(p.time for p in found.plans)
    assert len({p.choice.axes for p in found.plans}) == len(found.plans)


def test_limits_are_kept():
    limits = Limits({"tp": 2}, zero=(1,), recompute=("full",))
    found = search(SMALL, "dgx-h100:1", batch=16, sequence=512, limits=limits)
    assert found.plans
    for plan in found.plans:
        chosen = plan.choice
        assert (chosen.axes.tp, chosen.zero, chosen.recompute) == (2, 1, "full")


def test_codec_is_chosen_where_gradients_are_awaited():
    limits = Limits({"dp": 16, "tp": 1}, codecs=("none", "int8"))
    how = {"batch": 16, "sequence": 128, "limits": limits}
    found = search(SMALL, "cloud:4x4", **how, peak=1e15, memory=8 << 30)
    assert found.best.choice.codec == "int8"


def test_experts_are_divided_by_ep():
    model = SMALL.replace("gpt:", "gpt:experts=8,top_k=2,")
    limits = Limits({"ep": 4})
    found = search(model, "dgx-h100:1", batch=16, sequence=512, limits=limits)
    assert found.best.choice.axes.ep == 4
    assert found.best.cost.parts["experts"] > 0


def test_nothing_that_fits_is_no_plan():
    found = search("70B", "dgx-h100:1", batch=8, sequence=4096, memory=1 << 30)
    assert found.plans == ()
    assert found.best is None
    assert list(explain(found)) == []


def test_search_refuses_what_it_cannot_know():
    with pytest.raises(BadArgument, match="needs the shape"):
        search("3.5B", "dgx-h100:1", batch=8, sequence=512)
    with pytest.raises(BadArgument, match="give peak and memory"):
        search(SMALL, "switch:8", batch=8, sequence=512)
    whole = Limits({"dp": 1, "tp": 3, "pp": 1, "cp": 1, "ep": 1})
    with pytest.raises(BadArgument, match="it has 3 ranks, there are 8"):
        search(SMALL, "dgx-h100:1", batch=8, sequence=512, limits=whole)
    with pytest.raises(UsageError, match="selectiv"):
        Limits(recompute=("selectiv",))
    with pytest.raises(BadArgument, match="efficiency"):
        Job(parse_model(SMALL), 8, 8, 512, 1e12, efficiency=2.0)


@pytest.mark.sweep
def test_megatrons_choice_is_found_with_its_throughput():
    """With what there was then: no sharding of states, full recomputing, half the peak.

    Rooflines are of later programs, which reach more.
    """
    limits = Limits({"cp": 1}, zero=(0,), recompute=("full",))
    how = {"batch": 1536, "sequence": 2048, "limits": limits, "top": 3}
    found = search("gpt3", "dgx-a100:128", efficiency=0.5, **how)
    published = found.on(MEGATRON)
    assert published.time <= 1.05 * found.best.time
    model = found.job.model
    flops = 4 * model.flops(2048) * 1536 * 2048 / 1024
    assert flops / published.time == pytest.approx(140e12, rel=0.05)
    assert any("Why not" in line for line in explain(found))
    assert "needs 105 GiB of 79 GiB" in list(explain(found))[-1]


@pytest.mark.sweep
def test_megatrons_choice_is_near_the_best_by_rooflines():
    limits = Limits({"cp": 1}, zero=(0,), recompute=("full",))
    how = {"batch": 1536, "sequence": 2048, "limits": limits, "top": 3}
    found = search("gpt3", "dgx-a100:128", **how)
    assert found.on(MEGATRON).time <= 1.06 * found.best.time


def test_computing_is_that_of_the_kernels_unless_an_efficiency_is_given():
    choice = Choice(Axes(dp=16), microbatch=2)
    roofs, flat = passes(choice), passes(choice, efficiency=0.5)
    device = find_device("h100")
    kernels = Kernels(device, roofs.job.model, 1024, 512)
    forward = sum(kernels.seconds(part, 1.0) for part in ("attention", "mlp"))
    backward = sum(kernels.seconds(part, 2.0) for part in ("attention", "mlp"))
    assert roofs.job.layer(choice, 1.0) == pytest.approx(forward)
    assert roofs.job.layer(choice, 2.0) == pytest.approx(backward)
    assert flat.job.layer(choice, 2.0) == 2 * flat.job.layer(choice, 1.0)
    head = roofs.parts(0, backward=False)["compute"] - 8 * forward
    assert head == pytest.approx(kernels.seconds("head", 1.0))


def test_plain_attention_takes_longer_keeps_scores_and_computes_them_again():
    choice = Choice(Axes(dp=16), microbatch=2, recompute="selective")
    fused, plain = passes(choice), passes(choice, attention="plain")
    assert plain.job.layer(choice, 1.0) > fused.job.layer(choice, 1.0)
    again = [p.parts(0, backward=True)["recompute"] for p in (fused, plain)]
    scores = plain.job.kernels(plain.tokens, 1).scores[0]
    assert again[1] == pytest.approx(again[0] + plain.layers[0] * scores)
    for kind in RECOMPUTE:
        other = replace(choice, recompute=kind)
        uses = [memory_of(p.job, other).activations for p in (fused, plain)]
        assert uses[1] > uses[0]
    whole = memory_of(plain.job, replace(choice, recompute="none")).activations
    assert whole > memory_of(plain.job, choice).activations


def test_an_update_takes_what_the_device_says():
    choice = Choice(Axes(dp=16))
    found = passes(choice)
    taken = found.optimizer(0) / sum(found.weights)
    assert taken == pytest.approx(find_device("h100").update)
