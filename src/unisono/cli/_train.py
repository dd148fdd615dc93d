"""`unisono simulate train`: a training step on any machines."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from unisono.cli._engine import refuse_beside
from unisono.cli._progress import waiting
from unisono.cli.output import print_json, print_text
from unisono.simulate.engines.engine import OURS
from unisono.simulate.training import train as simulated
from unisono.units import parse_bytes


def train(
    *,
    model: str = "8B",
    topology: Annotated[str, Parameter(name=["-t", "--topology"])] = "dgx-h100:8",
    strategy: str = "fsdp",
    tp: int = 1,
    sequence: int = 4096,
    batch: int = 1,
    peak: float = 0.0,
    memory: Annotated[str, Parameter(metavar="SIZE")] = "",
    efficiency: float | None = None,
    device: str = "",
    engine: str = OURS,
    bucket: str = "25M",
    prefetch: int = 1,
    no_recompute: bool = False,
    gradient_bytes: int = 2,
    algorithm: str = "auto",
    attention: str = "fused",
    json: bool = False,
) -> int:
    """Simulate a training step: its time, exposed communication, scaling efficiency.

    Example: unisono simulate train --model 70B -t dgx-h100:64 --tp 8 --strategy fsdp

    Parameters
    ----------
    model
        A model as in `unisono plan`: gpt2-xl, 70B, gpt:layers=12,hidden=768, a number
        of parameters, or file.py:Name.
    topology
        A preset, as dgx-h100:64, cloud:16x8, or a .toml file.
    strategy
        ddp (gradients in buckets beside backward) or fsdp (ZeRO-3 with prefetch).
    tp
        Ranks of a tensor parallel group; they are neighbours.
    sequence
        Tokens of a sequence.
    batch
        Sequences for each data parallel rank.
    peak
        Operations per second that a rank can do; known for dgx-h100 and dgx-a100.
    memory
        Memory of a rank, as 80G; known for dgx-h100 and dgx-a100. If the step does not
        fit, the answer says so and the exit code is 1.
    efficiency
        The part of the peak that computing alone reaches; by default that of each
        class of kernels, if the device is known, and else 0.5.
    device
        What ranks are, as h100, a100, a100-40gb, tpu-v4, tpu-v5e, tpu-v5p or tpu-v6e;
        known for dgx-h100 and dgx-a100.
    engine
        Whose collectives: unisono (schedules, simulated), or nccl, gloo, mpi,
        xla (models).
    bucket
        With ddp: bytes of gradients that are sent together.
    prefetch
        With fsdp: how many layers are gathered ahead.
    no_recompute
        Keep activations instead of computing them again.
    gradient_bytes
        Bytes of a gradient as it is sent: 2 or 4.
    algorithm
        One for all collectives, as ring; by default the quickest of a few.
    attention
        fused, in one kernel; or plain, one for each operation, whose scores pass
        through memory and are kept.
    json
        Print one JSON document.
    """
    if engine != OURS:
        refuse_beside(engine, {"algorithm": algorithm != "auto"})
    with waiting(lambda: f"simulating a step of {model} on {topology}"):
        step = simulated(
            model,
            topology,
            strategy=strategy,
            tp=tp,
            sequence=sequence,
            batch=batch,
            peak=peak,
            memory=parse_bytes(memory) if memory else 0,
            efficiency=efficiency,
            device=device,
            engine=engine,
            bucket=parse_bytes(bucket),
            prefetch=prefetch,
            recompute=not no_recompute,
            gradient_bytes=gradient_bytes,
            algorithm=algorithm,
            attention=attention,
        )
    if json:
        print_json(step.as_dict())
    else:
        print_text(step)
    return 1 if step.fits is False else 0
