"""What a training step is made with, and what its simulation assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.errors import BadArgument, unknown
from unisono.memory_use import FRAGMENTATION
from unisono.models import ModelShape
from unisono.simulate.engines.engine import OURS
from unisono.simulate.kernels import ABOUT_PLAIN, ATTENTION, Device
from unisono.units import format_bytes

STRATEGIES = ("ddp", "fsdp")
USUAL_EFFICIENCY = 0.5
"""The part of the peak that is reached where nothing is known of the device."""


@dataclass(frozen=True)
class Setup:
    """Everything about a step but the model and the topology."""

    strategy: str = "fsdp"
    tp: int = 1
    sequence: int = 4096
    batch: int = 1
    peak: float = 0.0
    memory: int = 0
    efficiency: float | None = None
    device: Device | str = ""
    engine: str = OURS
    bucket: int = 25 << 20
    prefetch: int = 1
    recompute: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 2
    algorithm: str = "auto"
    attention: str = "fused"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        if self.attention not in ATTENTION:
            raise unknown("attention", self.attention, ATTENTION)
        for name, least in (
            *(("tp", 1), ("sequence", 1), ("batch", 1), ("bucket", 1)),
            *(
                ("memory", 0),
                ("prefetch", 0),
                ("weight_bytes", 1),
                ("gradient_bytes", 1),
            ),
        ):
            if getattr(self, name) < least:
                raise BadArgument(
                    f"train: {name} = {getattr(self, name)}: expected {least} or more"
                )
        reached = self.usual
        if not 0 < reached <= 1 or not 0 <= self.peak < math.inf:
            raise BadArgument(
                f"train: efficiency = {reached:g}, peak = {self.peak:g}: "
                "expected a part of 1, and operations per second"
            )

    @property
    def plain(self) -> bool:
        """Whether attention keeps its scores."""
        return self.attention == "plain"

    @property
    def usual(self) -> float:
        """The part of the peak that is reached, if kernels are not told apart."""
        return USUAL_EFFICIENCY if self.efficiency is None else self.efficiency


def computing(peak: float, setup: Setup, device: Device | None) -> str:
    """How fast ranks compute, in words; `device` if its kernels are told apart."""
    source = "as given" if setup.peak else "as the maker states"
    text = f"a rank computes {peak / 1e12:.4g} Tflop/s at its peak ({source}), and "
    if device is None:
        return text + f"reaches {setup.usual:.0%} of it"
    d, name = device, device.name
    return (
        f"{text}reaches {d.matmul:.0%} of it in products with weights, "
        f"{d.attention:.0%} in attention, and elsewhere {d.elementwise:.0%} of its "
        f"memory's {d.bandwidth / 1e12:.3g} TB/s ({name}: fitted to "
        f"published steps); {d.contention:.0%} of hidden communication slow it"
    )


def assumptions(
    setup: Setup, model: ModelShape, computes: str, *, optimizer: bool
) -> list[str]:
    """Everything that the result depends on and that may be different elsewhere."""
    s = setup
    passes = "4 forward passes' worth" if s.recompute else "3 forward passes' worth"
    adds = "takes its way through memory" if optimizer else "takes no time"
    how = (
        "as simulated by steps, all groups of an axis at once"
        if s.engine == OURS
        else f"as {s.engine}'s model has them, with its share of cards for each group"
    )
    lines = [
        computes,
        f"{s.batch} sequence(s) of {s.sequence} tokens for each data parallel rank; "
        f"a step is {passes}"
        + (", since activations are recomputed" if s.recompute else ""),
        f"parameters are sent as {s.weight_bytes} bytes, gradients as "
        f"{s.gradient_bytes}; the optimizer {adds}, and 12 bytes of memory a "
        "parameter (Adam)",
        f"memory: {FRAGMENTATION:.0%} more than is counted, for fragmentation; "
        "gradients lie in the buckets that are sent (ddp)",
        f"collectives are {how}; the two axes do not slow each other"
        + ("" if optimizer else ", nor what is computed meanwhile"),
    ]
    if not model.hidden:
        lines.append(
            f"{model.layers} equal layers; the products of attention, which "
            "depend on the shape, are left out"
        )
    if s.plain:
        lines.append(ABOUT_PLAIN)
    if s.tp > 1:
        lines.append(
            "tensor parallel: two all_reduces a layer forward and two backward (none "
            "again for what is recomputed), which compute waits for"
        )
    if s.strategy == "fsdp":
        lines.append(
            f"fsdp: a layer at a time, {s.prefetch} gathered ahead, gathered again for "
            "backward; the embedding and the head are separate units"
        )
    else:
        lines.append(f"ddp: buckets of {format_bytes(s.bucket)}, of whole layers")
    return lines
