"""Rooflines: what takes longer, and by how much."""

import pytest

from unisono.errors import BadArgument
from unisono.models import MODELS, gpt
from unisono.simulate import train
from unisono.simulate.kernels import Kernels, devices, find_device

H100 = find_device("h100")
EIGHT = MODELS["llama3-8b"]


def kernels(sequence=4096, batch=1, tp=1, model=EIGHT, plain=False):
    return Kernels(H100, model, sequence * batch, sequence, tp, plain=plain)


def layer(k, factor=1.0):
    return k.seconds("attention", factor) + k.seconds("mlp", factor)


def test_attention_grows_with_the_sequence_and_products_do_not():
    short, long = kernels(4096, 8), kernels(32768, 1)  # as many tokens
    assert long.seconds("mlp", 1.0) == pytest.approx(short.seconds("mlp", 1.0))
    assert long.seconds("attention", 1.0) > 2 * short.seconds("attention", 1.0)


def test_backward_and_recomputing_cost_their_passes():
    k = kernels()
    assert k.seconds("mlp", 2.0) == pytest.approx(2 * k.seconds("mlp", 1.0))
    assert layer(k, 3.0) == pytest.approx(layer(k, 2.0) + layer(k, 1.0))
    assert k.seconds("attention", 2.0) > 2 * k.seconds("attention", 1.0)


def test_scores_of_plain_attention_pass_through_memory():
    fused, plain = kernels(), kernels(plain=True)
    assert plain.seconds("mlp", 1.0) == fused.seconds("mlp", 1.0)
    assert plain.seconds("attention", 1.0) > fused.seconds("attention", 1.0)
    moved = 13 * EIGHT.heads * 4096**2 / (H100.bandwidth * H100.elementwise)
    assert plain.scores[0] > moved
    short = kernels(1024, 4, plain=True)  # as many tokens, a quarter of the scores
    assert plain.scores[0] == pytest.approx(4 * short.scores[0])
    assert layer(plain, 3.0) == pytest.approx(layer(plain, 2.0) + layer(plain, 1.0))


def test_backward_of_a_layer_takes_as_long_as_was_published():
    """11.9 ms of 22B on eight A100, four sequences (arXiv 2205.05198, table 4)."""
    model = gpt(layers=48, hidden=6144, heads=64)
    k = Kernels(find_device("a100"), model, 4 * 2048, 2048, 8, plain=True)
    assert layer(k, 2.0) == pytest.approx(11.9e-3, rel=0.05)


def test_plain_attention_takes_longer_and_keeps_its_scores():
    how = {"topology": "dgx-h100:1", "model": "8B", "engine": "nccl"}
    for recompute in (False, True):
        fused, plain = (
            train(**how, recompute=recompute, attention=kind)
            for kind in ("fused", "plain")
        )
        assert plain.time > fused.time
        assert plain.use.activations > fused.use.activations
        assert any("attention is plain" in line for line in plain.assumptions)
    with pytest.raises(BadArgument, match="unknown attention 'flat'"):
        train(**how, attention="flat")


def test_small_models_reach_less_of_the_peak():
    def reached(model):
        k = kernels(2048, 8, model=model)
        return model.mlp_flops * k.tokens / k.seconds("mlp", 1.0) / H100.peak

    small = gpt(layers=12, hidden=768, heads=12)
    large = gpt(layers=12, hidden=8192, heads=64)
    assert reached(small) < 0.7 * reached(large) < 0.7 * H100.matmul


def test_tensor_parallel_ranks_share_products_but_not_norms():
    one, eight = layer(kernels()), layer(kernels(tp=8))
    assert one / 8 < eight < one / 5


def test_devices_name_their_sources_and_reach_no_more_than_there_is():
    for name, device in devices().items():
        assert device.name == name
        assert device.source.startswith("https://")
        assert device.fitted_source
        for part in (device.matmul, device.attention, device.elementwise):
            assert 0 < part < 1


def test_step_is_by_kernels_unless_an_efficiency_is_given():
    by_kernels = train("8B", "dgx-h100:1", engine="nccl")
    text = " ".join(by_kernels.assumptions)
    assert "in attention" in text
    assert "nccl's model" in text
    assert 0.2 < by_kernels.utilisation < 0.6
    by_rate = train("8B", "dgx-h100:1", engine="nccl", efficiency=0.4)
    assert "reaches 40% of it" in by_rate.assumptions[0]
    assert by_rate.compute == pytest.approx(
        4 * EIGHT.flops(4096) * 4096 / (0.4 * H100.peak)
    )
    longer = train("8B", "dgx-h100:1", engine="nccl", sequence=32768)
    assert longer.utilisation < by_kernels.utilisation


def test_unknown_devices_are_refused():
    with pytest.raises(BadArgument, match="unknown device"):
        train("8B", "switch:2", device="h1000")
    with pytest.raises(BadArgument, match="give peak= or device="):
        train("8B", "switch:2")
    assert train("8B", "switch:2", device="h100").peak == H100.peak
