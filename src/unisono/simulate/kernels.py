"""How long a device computes: a roofline for each class of kernels.

    matmul       products with weights: operations at a part of the peak, and operands
                 that pass through memory once
    attention    products of queries, keys and values: operations at a smaller part;
                 where scores are kept (`plain`), at that of matmul, with both halves of
                 a causal mask, and the scores pass through memory several times
    elementwise  norms, activations, sums, the loss, the optimizer: bytes of memory

Forward does each once. Backward does matmul and elementwise work twice and attention
two and a half times, for it computes scores again. What is recomputed is done forward
once more. So time depends on the shape of the model, the batch and the length of
sequences, which one efficiency for all does not tell. Devices are data, in
devices.toml, with sources.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

import msgspec

from unisono.errors import unknown
from unisono.models import ModelShape

_BACKWARD = 2.0
_BACKWARD_ATTENTION = 2.5
ATTENTION = ("fused", "plain")
"""In one kernel that keeps no scores, or in one for each operation."""
ABOUT_PLAIN = "attention is plain: a kernel for each operation, and scores in memory"
_SCORE_FORWARD, _SCORE_BACKWARD = 13.0, 19.0
"""Bytes of memory for each score of 2 bytes in plain attention: the product writes it,
softmax and dropout read and write it, a mask of a byte is written, the next product
reads it. Backward reads what was kept as well."""
_NORM, _SUM = 2.0, 3.0
"""Tensors of hidden features that a norm and a residual sum read and write."""
_LOSS = 12.0
"""Bytes of memory for each logit, forward: written, read as 4 bytes, and written."""
ADAM_BYTES = 28.0
"""Read and written for each parameter: gradient, copy and two moments of 4 bytes, and
the parameter as it is used."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computes; see devices.toml."""

    peak: float
    bandwidth: float
    memory: int
    source: str
    matmul: float
    attention: float
    elementwise: float
    contention: float
    fitted_source: str
    name: str = ""

    @property
    def update(self) -> float:
        """Seconds in which Adam updates a parameter."""
        return ADAM_BYTES / (self.bandwidth * self.elementwise)


@cache
def devices() -> dict[str, Device]:
    """All devices that are known, by name."""
    text = (resources.files(__package__) / "devices.toml").read_text("utf-8")
    found = msgspec.convert(tomllib.loads(text), dict[str, Device])
    return {
        name: msgspec.structs.replace(one, name=name) for name, one in found.items()
    }


def find_device(name: str) -> Device:
    """A device by its name."""
    if name not in devices():
        raise unknown("device", name, devices())
    return devices()[name]


@dataclass(frozen=True)
class Kernels:
    """The work of a rank: `tokens` of sequences, on a share of 1/tp of the weights."""

    device: Device
    model: ModelShape
    tokens: float
    sequence: int
    tp: int = 1
    element: int = 2
    plain: bool = False

    def seconds(self, part: str, factor: float) -> float:
        """Of attention, mlp, head or embedding: forward (factor 1) or backward.

        Backward is 2, or 3 with recomputation.
        """
        matmul, other = self._work(part)
        found = factor * (matmul + other)
        if part != "attention":
            return found
        forward, backward = self.scores
        if factor == 1.0:
            return found + forward
        return found + backward + (factor - _BACKWARD) * forward

    @cached_property
    def scores(self) -> tuple[float, float]:
        """Seconds of queries times keys, and of these times values, both ways."""
        m, d = self.model, self.device
        done = m.attention_flops(self.sequence) - 2.0 * m.attention_weights
        done *= self.tokens / self.tp
        if not self.plain:
            forward = done / (d.peak * d.attention)
            return forward, _BACKWARD_ATTENTION * forward
        masked = 1.0 if m.family == "bert" else 2.0
        product = masked * done / (d.peak * d.matmul)
        size = self.tokens * self.sequence * m.heads / self.tp * self.element / 2
        return (
            product + self._moved(_SCORE_FORWARD * size),
            _BACKWARD * product + self._moved(_SCORE_BACKWARD * size),
        )

    def _matmul(self, operations: float, widths: float, weights: float) -> float:
        """Products of all tokens with weights, and their way through memory."""
        d = self.device
        moved = self.element * (self.tokens * widths + weights)
        return operations / (d.peak * d.matmul) + self._moved(moved)

    def _moved(self, nbytes: float) -> float:
        return nbytes / (self.device.bandwidth * self.device.elementwise)

    def _between(self) -> float:
        """A norm before, a sum after: tensor parallel ranks all do this."""
        width = (_NORM + _SUM) * self.model.hidden
        return self._moved(self.element * self.tokens * width)

    def _work(self, part: str) -> tuple[float, float]:
        """Seconds of products with weights, and of the rest but scores, forward."""
        if part == "attention":
            return self._attention
        if part == "mlp":
            return self._mlp
        return self._head if part == "head" else self._embedding

    @property
    def _attention(self) -> tuple[float, float]:
        m, t, tp = self.model, self.tokens, self.tp
        weights = m.attention_weights / tp
        inside = 2 * (m.query_width + m.kv_width) / tp
        matmul = self._matmul(2.0 * t * weights, 2 * m.hidden + inside, weights)
        shifts = self._moved(self.element * t * inside)
        return matmul, self._between() + shifts

    @property
    def _mlp(self) -> tuple[float, float]:
        m, t, tp = self.model, self.tokens, self.tp
        used = m.top_k if m.experts else 1
        weights = m.mlp_weights / tp
        wide = used * weights / m.hidden  # features inside, and of the gate
        widths = 2 * used * m.hidden + wide
        matmul = self._matmul(m.mlp_flops * t / tp, widths, max(m.experts, 1) * weights)
        return matmul, self._between() + self._moved(self.element * t * wide)

    @property
    def _head(self) -> tuple[float, float]:
        m, t, tp = self.model, self.tokens, self.tp
        weights = m.vocabulary * m.hidden / tp
        widths = m.hidden + m.vocabulary / tp
        matmul = self._matmul(m.head_flops * t / tp, widths, weights)
        return matmul, self._moved(_LOSS * t * m.vocabulary / tp)

    @property
    def _embedding(self) -> tuple[float, float]:
        return 0.0, self._moved(2.0 * self.element * self.tokens * self.model.hidden)
