"""Transformers by their shape: how many parameters, and how many operations.

`unisono plan` (memory and traffic) and `unisono simulate train` (time) read this one
description. A model is a stack of equal blocks between an embedding and a head, which
has weights of its own unless it is `tied`, as that of GPT-2 is:

    gpt     LayerNorm, attention and an MLP of two layers, with biases; an embedding of
            positions
    llama   RMSNorm, attention with `kv_heads` heads of keys and values, and a gated MLP
            of three matrices; no biases, no parameters for positions
    bert    as gpt, but without a causal mask; its embedding has two types of segments
            and a norm, and behind the last block is a pooler

With `experts`, each block has that many MLPs and a gate; `top_k` of them process each
token. A model may also be only a number of parameters (`hidden` is 0): then the blocks
count as equal, as many as a transformer of that size has, and what depends on the shape
is not known.

    parse_model("8B")                    the Llama model that goes by this size
    parse_model("llama2-70b")            Llama 2 or 3; gpt2-xl, mixtral-8x7b, bert-base
    parse_model("resnet50")              a number of parameters by name
    parse_model("gpt:layers=12,hidden=768,vocabulary=256")
    parse_model("layers=32,hidden=4096,heads=32,kv_heads=8")     llama
    parse_model("gpt:layers=4,hidden=96,heads=4,head_width=32")  wider than hidden
    parse_model("3.5B")                  a number of parameters
    parse_model("train.py:Net")          a torch module, counted

For each token a weight costs two operations forward, a product and a sum. Attention
adds 4·sequence·hidden, of which a causal mask leaves half (all but bert have one).
Backward costs twice as much as forward, and another forward if activations are
recomputed.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from unisono.errors import BadArgument, MissingExtra, unknown, whole_number

FAMILIES = ("gpt", "llama", "bert")
WIDTH_PER_LAYER = 128
"""How much wider than deep a transformer is, more or less: 4096 and 32 blocks."""
POSITIONS = 1024
"""Positions that a gpt has by default."""
KEPT_BETWEEN = 4
"""Activations that a block keeps outside attention and MLP: the inputs and outputs of
its two norms."""


@dataclass(frozen=True)
class ModelShape:
    """A transformer by its shape, or only a number of parameters (`hidden` is 0)."""

    name: str
    layers: int
    hidden: int = 0
    feed_forward: int = 0
    heads: int = 1
    kv_heads: int = 1
    vocabulary: int = 0
    family: str = "llama"
    positions: int = 0
    experts: int = 0
    top_k: int = 2
    tied: bool = False
    """Whether the output layer uses the weights of the embedding."""
    head_width: int = 0
    """Features of a head; if 0, those of `hidden` are divided among the heads."""
    counted: int = 0
    """The number of parameters, where the shape is not known."""

    def __post_init__(self) -> None:
        """Refuse shapes that no model has."""
        if self.family not in FAMILIES:
            raise unknown("family of models", self.family, FAMILIES)
        names = ("layers", *(() if self.counted else _NEEDED))
        for name in names:
            size = getattr(self, name)
            if whole_number(f"model {self.name}: {name}", size) < 1:
                raise BadArgument(
                    f"model {self.name}: {name} = {size}: expected 1 or more"
                )
        whole_number(f"model {self.name}: head_width", self.head_width)
        divided = bool(self.head_width) or not self.hidden % self.heads
        if not divided or self.heads % self.kv_heads or self.head_width < 0:
            raise BadArgument(
                f"model {self.name}: heads = {self.heads}, kv_heads = {self.kv_heads}, "
                f"head_width = {self.head_width}: expected heads that divide hidden = "
                f"{self.hidden} or a head_width of 1 or more, and kv_heads that divide "
                "heads"
            )
        top_k = whole_number(f"model {self.name}: top_k", self.top_k)
        if self.experts and not 1 <= top_k <= self.experts:
            raise BadArgument(
                f"model {self.name}: top_k = {top_k}: expected 1..{self.experts}, the "
                "number of experts"
            )

    # --- parameters

    @property
    def parameters(self) -> int:
        """All of them."""
        if not self.hidden:
            return self.counted
        return self.layers * self.block + self.embedding + self.head

    @property
    def block(self) -> int:
        """Parameters of one block: what FSDP gathers at a time."""
        if not self.hidden:
            return ceil(self.counted / self.layers)
        mlps = max(self.experts, 1) * self.mlp
        return self.attention + self.norms + mlps + self.gate

    @property
    def attention(self) -> int:
        """Parameters of one block's attention."""
        biases = self.query_width + 2 * self.kv_width + self.hidden
        return self.attention_weights + self._biases * biases

    @property
    def attention_weights(self) -> int:
        """Elements of its matrices: queries, keys, values, output."""
        return 2 * self.hidden * (self.query_width + self.kv_width)

    @property
    def query_width(self) -> int:
        """Features of the queries of all heads: `hidden`, if heads divide that."""
        return self.head_width * self.heads or self.hidden

    @property
    def kv_width(self) -> int:
        """Features of the keys of all heads, and of the values."""
        return self.query_width // self.heads * self.kv_heads

    @property
    def mlp(self) -> int:
        """Parameters of one MLP, or of one expert."""
        return self.mlp_weights + self._biases * (self.feed_forward + self.hidden)

    @property
    def mlp_weights(self) -> int:
        """Elements of its matrices: three if gated, else two."""
        return (2 if self._biases else 3) * self.hidden * self.feed_forward

    @property
    def gate(self) -> int:
        """Parameters of the layer that scores experts, in one block."""
        return self.experts * (self.hidden + self._biases)

    @property
    def norms(self) -> int:
        """Parameters of the two norms of one block."""
        return 2 * self.final_norm

    @property
    def final_norm(self) -> int:
        """Parameters of the norm behind the last block; as any norm has.

        A bert has it behind the embedding.
        """
        return self.hidden * (1 + self._biases)

    @property
    def embedding(self) -> int:
        """Parameters before the first block: an embedding of words and positions."""
        return (self.vocabulary + self.places) * self.hidden

    @property
    def places(self) -> int:
        """Rows of the embedding besides words: positions, and types of segments."""
        return self.positions + (2 if self.family == "bert" else 0)

    @property
    def pooler(self) -> int:
        """Parameters of the layer on the first token, which a bert has."""
        return self.hidden * (self.hidden + 1) if self.family == "bert" else 0

    @property
    def head(self) -> int:
        """Parameters behind the last block: its norm and an output layer of its own."""
        own = 0 if self.tied else self.vocabulary * self.hidden
        return own + self.final_norm + self.pooler

    @property
    def replicated(self) -> int:
        """Parameters of one block that tensor parallelism does not shard.

        These are norms, and biases that are added after the sum over the ranks.
        """
        return self.norms + self._biases * 2 * self.hidden

    @property
    def replicated_tensors(self) -> int:
        """The number of these tensors."""
        return 2 * self.norm_tensors + 2 * self._biases

    @property
    def norm_tensors(self) -> int:
        """Tensors of one norm: a weight, and a bias if there are biases."""
        return 1 + self._biases

    @property
    def _biases(self) -> int:
        return int(self.family != "llama")

    # --- activations, in tensors of hidden features per token

    @property
    def kept(self) -> float:
        """What a block keeps for backward, with attention that keeps no scores."""
        return KEPT_BETWEEN + self.kept_inside

    @property
    def kept_inside(self) -> float:
        """What of it lies inside attention and MLP: tensor parallelism shards it.

        Queries, keys, values, and the output of attention in two layouts; of the MLP
        the input and output of its activation function, or for a gated one also the
        other factor and the product. An expert also keeps its input and output.
        """
        wide = (2 if self._biases else 4) * self.feed_forward / self.hidden
        attention = (3 * self.query_width + 2 * self.kv_width) / self.hidden
        return attention + (self.top_k * (2 + wide) if self.experts else wide)

    def kept_scores(self, sequence: int) -> float:
        """What it keeps besides if attention is plain: the scores of each head.

        Those after softmax and after dropout of 2 bytes, and a mask of one.
        """
        return 2.5 * self.heads * sequence / self.hidden

    # --- operations

    def attention_flops(self, sequence: int) -> float:
        """Operations of one block's attention for one token, forward."""
        products = 4.0 if self.family == "bert" else 2.0  # a causal mask leaves half
        return 2.0 * self.attention_weights + products * sequence * self.query_width

    @property
    def mlp_flops(self) -> float:
        """Operations of one block's MLP for one token, forward; of `top_k` experts."""
        used = self.top_k if self.experts else 1
        return 2.0 * used * self.mlp_weights + 2.0 * self.experts * self.hidden

    @property
    def head_flops(self) -> float:
        """Operations of the output layer for one token, forward."""
        return 2.0 * self.vocabulary * self.hidden

    def flops(self, sequence: int) -> float:
        """Operations for one token, forward, in all blocks and the head."""
        if not self.hidden:
            return 2.0 * self.counted
        block = self.attention_flops(sequence) + self.mlp_flops
        return self.layers * block + self.head_flops

    # --- uses

    def check_length(self, tokens: int) -> None:
        """Raise if a sequence is longer than the embedding of positions."""
        if 0 < self.positions < tokens:
            raise BadArgument(
                f"model {self.name} has {self.positions} positions, the sequences have "
                f"{tokens} tokens; use shorter ones, or a shape with positions={tokens}"
            )

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        derived = {"parameters": self.parameters, "block": self.block}
        return {**asdict(self), **derived}


_NEEDED = ("hidden", "feed_forward", "heads", "kv_heads", "vocabulary")


def gpt(
    name: str = "gpt",
    *,
    layers: int = 12,
    hidden: int = 768,
    vocabulary: int = 50_257,
    positions: int = POSITIONS,
    **sizes: int,
) -> ModelShape:
    """A transformer as GPT-2 is, whose MLP is four times as wide as `hidden`."""
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        family="gpt",
        positions=positions,
        **_sizes(hidden, sizes),
    )


def llama(
    name: str, *, layers: int, hidden: int, vocabulary: int = 32_000, **sizes: int
) -> ModelShape:
    """A transformer as the Llama models are."""
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        **_sizes(hidden, sizes),
    )


def _sizes(hidden: int, sizes: dict[str, int]) -> dict[str, Any]:
    """With the defaults that follow from other sizes."""
    defaults = {"feed_forward": 4 * hidden, "kv_heads": sizes.get("heads", 1)}
    return defaults | sizes


def bert(
    name: str = "bert",
    *,
    layers: int = 12,
    hidden: int = 768,
    vocabulary: int = 30_522,
    positions: int = 512,
    **sizes: int,
) -> ModelShape:
    """An encoder as BERT is; the weights of its head are those of the embedding."""
    made = gpt(
        name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        positions=positions,
        **sizes,
    )
    return replace(made, family="bert", tied=True)


def of_size(name: str, parameters: int, layers: int = 0) -> ModelShape:
    """A model of which only the number of parameters is known.

    It has as many layers as a transformer of this size: 12·layers·hidden² parameters,
    where hidden is 128·layers.
    """
    usual = round((parameters / 12 / WIDTH_PER_LAYER**2) ** (1 / 3))
    return ModelShape(name, layers or max(usual, 1), counted=parameters)


def usual_shape(model: ModelShape, positions: int = POSITIONS) -> ModelShape:
    """A gpt of about as many parameters, for a model without a shape."""
    layers = of_size(model.name, model.parameters).layers
    sizes = {"layers": layers, "hidden": WIDTH_PER_LAYER * layers, "heads": layers}
    listed = [
        f"{key}={size}" for key, size in {**sizes, "positions": positions}.items()
    ]
    return gpt(f"gpt:{','.join(listed)}", **sizes, positions=positions)


MODELS = {
    model.name: model
    for model in (
        gpt("gpt2", layers=12, hidden=768, heads=12, tied=True),
        gpt("gpt2-medium", layers=24, hidden=1024, heads=16, tied=True),
        gpt("gpt2-large", layers=36, hidden=1280, heads=20, tied=True),
        gpt("gpt2-xl", layers=48, hidden=1600, heads=25, tied=True),
        gpt("gpt3", layers=96, hidden=12_288, heads=96, positions=2048),
        ModelShape("1B", 16, 2048, 8192, 32, 8, 128_256, tied=True),
        ModelShape("llama2-7b", 32, 4096, 11_008, 32, 32, 32_000),
        ModelShape("llama2-13b", 40, 5120, 13_824, 40, 40, 32_000),
        ModelShape("llama2-70b", 80, 8192, 28_672, 64, 8, 32_000),
        ModelShape("llama3-8b", 32, 4096, 14_336, 32, 8, 128_256),
        ModelShape("llama3-70b", 80, 8192, 28_672, 64, 8, 128_256),
        ModelShape("llama3-405b", 126, 16_384, 53_248, 128, 8, 128_256),
        ModelShape("mixtral-8x7b", 32, 4096, 14_336, 32, 8, 32_000, experts=8),
        bert("bert-base", layers=12, hidden=768, heads=12),
        bert("bert-large", layers=24, hidden=1024, heads=16),
        of_size("resnet50", 25_557_032, layers=16),
    )
}
"""By name, with the published numbers of parameters."""
_BY_SIZE = {
    **dict.fromkeys(("7B", "13B"), "llama2"),
    **dict.fromkeys(("8B", "70B", "405B"), "llama3"),
}
MODELS |= {
    size: replace(MODELS[f"{family}-{size.lower()}"], name=size)
    for size, family in _BY_SIZE.items()
}

_KEYS = (
    *("layers", "hidden", "feed_forward", "heads", "kv_heads", "vocabulary"),
    *("positions", "experts", "top_k", "head_width"),
)
_SYNONYMS = {"width": "hidden", "words": "vocabulary"}
_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
SPELLINGS = "a shape as gpt:layers=12,hidden=768, a size as 3.5B, or file.py:Name"


def parse_model(text: str) -> ModelShape:
    """The model that a name, a shape, a number of parameters or a file means."""
    known = {_plain(name): model for name, model in MODELS.items()}
    if _plain(text) in known:
        return known[_plain(text)]
    if ".py:" in text:
        return _module(text)
    if "=" in text:
        return _shape(text)
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.upper())
    if number:
        count = int(float(number[1]) * 1000 ** _POWERS[number[2]])
        if count < 1:
            raise BadArgument(f"model {text}: expected one parameter or more")
        return of_size(text, count)
    raise BadArgument(f"{unknown('model', text, MODELS)} (or {SPELLINGS})")


def _plain(name: str) -> str:
    """The name without what people spell differently: Llama-2-7b is llama2-7b."""
    return re.sub("[-_ ]", "", name.lower())


def _shape(text: str) -> ModelShape:
    """The model that "gpt:layers=12,hidden=768" means; without a family, llama."""
    family, colon, listed = text.rpartition(":")
    if colon and family not in FAMILIES:
        raise unknown("family of models", family, FAMILIES)
    sizes: dict[str, int] = {}
    for part in listed.split(","):
        key, _, value = part.partition("=")
        key = _SYNONYMS.get(key, key)
        if key not in _KEYS or key in sizes or not value.isdecimal():
            raise BadArgument(
                f"model {text}: {part!r}: expected each of {', '.join(_KEYS)} at most "
                "once, with a number, as in gpt:layers=12,hidden=768"
            )
        sizes[key] = int(value)
    if family in ("gpt", "bert"):
        return (gpt if family == "gpt" else bert)(text, **sizes)
    if not {"layers", "hidden"} <= set(sizes):
        raise BadArgument(f"model {text}: layers and hidden are needed")
    return llama(text, **sizes)


def _module(text: str) -> ModelShape:
    """The torch module that file.py:Name makes, without memory for its parameters."""
    path, _, name = text.rpartition(":")
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise MissingExtra("torch", "counting the parameters of a module") from missing
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadArgument(f"model {text}: there is no file {path}")
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    make = getattr(file, name, None)
    if not callable(make):
        raise BadArgument(f"model {text}: {path} has no class or function {name}")
    with torch.device("meta"):
        module = make()
    if not isinstance(module, torch.nn.Module):
        raise BadArgument(f"model {text}: {name}() is not a torch module")
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = max(sum(len(one) for one in lists), 1)
    return of_size(text, sum(p.numel() for p in module.parameters()), layers)
