"""Transformers by their shape: how many weights, and how much there is to compute.

A layer is attention (queries, keys and values, output) and a gated feed-forward part of
three matrices; before the layers there is an embedding, behind them a head of the same
size. Norms and biases are left out: they are thousandths.

Of each token a weight costs two operations forward, a product and a sum. Attention adds
4·sequence·hidden to that, of which a causal mask leaves half. Backward is twice as
much, and once more forward if activations are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import BadArgument, unknown


@dataclass(frozen=True)
class Model:
    """The shape of a transformer."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        """Refuse shapes that no model has."""
        sides = (
            *(self.layers, self.hidden, self.feed_forward),
            *(self.heads, self.kv_heads, self.vocabulary),
        )
        if min(sides) < 1 or self.hidden % self.heads or self.heads % self.kv_heads:
            raise BadArgument(
                f"model {self.name}: expected sizes above 0, heads that divide hidden, "
                "and kv_heads that divide heads"
            )

    @property
    def attention(self) -> int:
        """Weights of the attention of one layer."""
        narrow = self.hidden // self.heads * self.kv_heads
        return 2 * self.hidden * self.hidden + 2 * self.hidden * narrow

    @property
    def dense(self) -> int:
        """Weights of the feed-forward part of one layer."""
        return 3 * self.hidden * self.feed_forward

    @property
    def embedding(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * (self.attention + self.dense) + 2 * self.embedding

    def attention_flops(self, sequence: int) -> float:
        """Operations of one layer's attention for one token, forward."""
        return 2.0 * self.attention + 2.0 * sequence * self.hidden

    def flops(self, sequence: int) -> float:
        """Operations for one token, forward, in all layers and the head."""
        layer = self.attention_flops(sequence) + 2.0 * self.dense
        return self.layers * layer + 2.0 * self.embedding


MODELS = {
    model.name: model
    for model in (
        Model("1B", 16, 2048, 8192, 32, 8, 128_256),
        Model("7B", 32, 4096, 11_008, 32, 32, 32_000),
        Model("8B", 32, 4096, 14_336, 32, 8, 128_256),
        Model("13B", 40, 5120, 13_824, 40, 40, 32_000),
        Model("70B", 80, 8192, 28_672, 64, 8, 128_256),
        Model("405B", 126, 16_384, 53_248, 128, 8, 128_256),
    )
}
"""Shapes as the Llama models have them."""

_KEYS = ("layers", "hidden", "feed_forward", "heads", "kv_heads", "vocabulary")


def model_named(text: str) -> Model:
    """The model that "70B" means, or "layers=80,hidden=8192,heads=64,..."."""
    if "=" not in text:
        if text.upper() not in MODELS:
            raise BadArgument(
                f"{unknown('model', text, MODELS)} (or layers=80,hidden=8192,heads=64)"
            )
        return MODELS[text.upper()]
    told: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in _KEYS or not value.isdecimal():
            raise BadArgument(f"model {text}: {part}: expected {', '.join(_KEYS)}")
        told[key] = int(value)
    if not {"layers", "hidden", "heads"} <= set(told):
        raise BadArgument(f"model {text}: layers, hidden and heads are needed")
    told.setdefault("feed_forward", 4 * told["hidden"])
    told.setdefault("kv_heads", told["heads"])
    told.setdefault("vocabulary", 32_000)
    return Model("custom", **told)
