"""Models by their shape: parameters, operations, and what a block keeps."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.models import (
    MODELS,
    ModelShape,
    bert,
    gpt,
    llama,
    of_size,
    parse_model,
    usual_shape,
)

HIDDEN, HEADS, WIDE, WORDS, LENGTH = 64, 4, 176, 50, 32


class LlamaBlock(nn.Module):
    """A block of a Llama model, written with torch's own layers."""

    def __init__(self, kv_heads):
        super().__init__()
        self.kv_heads = kv_heads
        narrow = HIDDEN // HEADS * kv_heads
        self.before, self.after = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, narrow, bias=False)
        self.v = nn.Linear(HIDDEN, narrow, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x):
        y = self.before(x)
        q, k, v = (
            layer(y).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.q, HEADS),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, kv_heads, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(LlamaBlock(kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)


def size(module):
    return sum(p.numel() for p in module.parameters())


def shape(kv_heads, layers=3):
    return ModelShape("test", layers, HIDDEN, WIDE, HEADS, kv_heads, WORDS)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_parameters_are_those_of_a_torch_module(kv_heads):
    model, module = shape(kv_heads), Llama(kv_heads, layers=3)
    assert model.parameters == size(module)
    assert model.block == size(module.blocks[0])
    assert model.embedding == size(module.words)
    assert model.head == size(module.head) + size(module.norm)
    norms = size(module.blocks[0].before) + size(module.blocks[0].after)
    assert model.replicated == model.norms == norms


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("1B", 1_235_814_400),
        ("7B", 6_738_415_616),
        ("8B", 8_030_261_248),
        ("13B", 13_015_864_320),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        ("resnet50", 25_557_032),
    ],
)
def test_named_models_have_their_published_number_of_parameters(name, parameters):
    assert MODELS[name].parameters == parameters


def test_gpt2_has_its_published_parameters_with_a_tied_head():
    published = {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    for name, parameters in published.items():
        assert MODELS[name].parameters == parameters
    own = replace(MODELS["gpt2"], tied=False)
    assert own.parameters == 124_439_808 + 50_257 * 768
    assert own.flops(1024) == MODELS["gpt2"].flops(1024)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_llama_block_keeps_the_activations_that_the_formula_says(kv_heads):
    block = LlamaBlock(kv_heads)
    params = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    x = torch.zeros(3, LENGTH, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert block(x).requires_grad
    kept = sum(nbytes for nbytes, _ in saved.values()) / x.nbytes
    assert shape(kv_heads).kept == pytest.approx(kept, rel=0.1)


def test_gpt_block_keeps_17_activations_of_which_13_are_inside_layers():
    assert gpt(hidden=64, layers=1).kept == 17
    assert gpt(hidden=64, layers=1).kept_inside == 13
    assert gpt(hidden=64, layers=1, experts=4, top_k=3).kept == 9 + 10 * 3


def test_operations_are_two_per_weight_and_attention_products():
    model = shape(kv_heads=2, layers=2)
    attention = 2 * 64 * 64 + 2 * 64 * 32
    layer = 2 * attention + 2 * LENGTH * 64 + 2 * 3 * 64 * WIDE
    assert model.flops(LENGTH) == 2 * layer + 2 * WORDS * 64
    assert of_size("1B", 10**9).flops(LENGTH) == 2e9


def test_experts_multiply_parameters_but_not_operations():
    dense, mixture = gpt(), gpt(experts=8, top_k=1)
    extra = 7 * dense.mlp + 8 * (768 + 1)
    assert mixture.block == dense.block + extra
    assert mixture.mlp_flops == dense.mlp_flops + 2 * 8 * 768


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("70b", "70B"),
        ("gpt:width=1024,layers=24,words=50257", "gpt:hidden=1024,layers=24"),
        ("layers=2,hidden=64", "llama:layers=2,hidden=64"),
        ("llama:layers=2,hidden=64,heads=4", "layers=2,hidden=64,heads=4,kv_heads=4"),
        ("3.5B", "3500M"),
        ("Llama-2-7B", "llama2-7b"),
        ("ResNet-50", "resnet50"),
        ("bert:layers=24,hidden=1024,heads=16", "bert_large"),
    ],
)
def test_spellings_of_one_model_have_the_same_parameters(text, same):
    assert parse_model(text).parameters == parse_model(same).parameters


def test_heads_may_be_wider_than_their_share_of_hidden():
    text = "gpt:layers=2,hidden=64,heads=4,kv_heads=2,feed_forward=128,vocabulary=32"
    even, wide = (
        parse_model(f"{text},head_width=16"),
        parse_model(f"{text},head_width=32"),
    )
    plain = parse_model(text)
    assert (even.parameters, even.flops(8)) == (plain.parameters, plain.flops(8))
    assert (wide.query_width, wide.kv_width) == (128, 64)
    assert wide.attention_weights == 2 * 64 * 128 + 2 * 64 * 64
    assert wide.attention == wide.attention_weights + 128 + 2 * 64 + 64
    more = 2.0 * (wide.attention_weights - plain.attention_weights) + 2 * 8 * 64
    assert wide.attention_flops(8) == plain.attention_flops(8) + more
    assert wide.kept_inside - plain.kept_inside == (3 * 64 + 2 * 32) / 64
    assert parse_model("layers=2,hidden=64,heads=3,head_width=32").query_width == 96
    with pytest.raises(BadArgument, match="heads that divide hidden = 64"):
        parse_model("layers=2,hidden=64,heads=3")


def test_bert_is_a_gpt_with_another_embedding_and_a_pooler():
    encoder, decoder = bert(positions=24), gpt(positions=24)
    assert encoder.block == decoder.block
    assert encoder.kept == decoder.kept
    words = 30_522 * 768
    assert encoder.embedding == words + (24 + 2) * 768
    assert encoder.head == 2 * 768 + 768 * 768 + 768
    both = encoder.attention_flops(100), decoder.attention_flops(100)
    assert both[0] - both[1] == 2 * 100 * 768  # no causal mask


@pytest.mark.parametrize(
    ("text", "layers"), [("1K", 1), ("6.7B", 32), ("175B", 96), ("1T", 172)]
)
def test_layers_follow_the_number_of_parameters(text, layers):
    model = parse_model(text)
    assert (model.layers, model.hidden) == (layers, 0)
    if layers > 1:
        usual = usual_shape(model, positions=64)
        assert usual.parameters == pytest.approx(model.parameters, rel=0.1)
        assert parse_model(usual.name) == usual


def test_default_mlp_is_four_times_as_wide_as_hidden():
    assert parse_model("layers=2,hidden=64,heads=4").feed_forward == 256
    assert llama("x", layers=1, hidden=8, feed_forward=5).feed_forward == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gtp2", "unknown model 'gtp2'; nearest: gpt2"),
        ("0B", "one parameter or more"),
        ("layers=2", "layers and hidden are needed"),
        ("layers=2,hidden=64,heads=5", "heads that divide hidden"),
        ("layers=2,hidden=64,heads=x", "expected each of layers, hidden"),
        ("layers=2,layers=3,hidden=64", "at most once"),
        ("legs=2", "expected each of layers, hidden"),
        ("gpt:layers=0", "layers = 0: expected 1 or more"),
        ("gpt:experts=4,top_k=5", "top_k = 5: expected 1..4"),
        ("t5:layers=2", "unknown family of models 't5'"),
    ],
)
def test_models_that_cannot_be_parsed_are_refused(text, message):
    with pytest.raises(BadArgument, match=message):
        parse_model(text)


def test_sequences_longer_than_the_positions_are_refused():
    MODELS["gpt2"].check_length(1024)
    MODELS["8B"].check_length(1 << 20)
    with pytest.raises(BadArgument, match=r"gpt2 has 1024 positions.*positions=1025"):
        MODELS["gpt2"].check_length(1025)
