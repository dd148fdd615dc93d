"""What training strategies do, in which order: recorded from runs, for the studio.

    python benchmarks/record_strategies.py            all of them
    python benchmarks/record_strategies.py ZeRO-1     this one; the others stay

Four processes train a small transformer with each strategy. Of the quickest of a few
steps rank 0 tells when each part of the model computed, when each collective began and
ended (from its flight recorder), and how much it held meanwhile, counted on the tensors
themselves. The order is real; durations are those of a model that is far too small for
them to matter. The result is part of the package: src/unisono/view/web/strategies.json.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from unisono.parallel import (
    DDP,
    FSDP,
    Column,
    MoE,
    ParameterServer,
    ZeRO,
    parallelize,
    ring_attention,
    sequence_plan,
    vocabulary_cross_entropy,
)
from unisono.parallel.model.tensor import attention_plan, mlp_plan
from unisono.parallel.sharded.zero_buckets import ZeroBuckets

N, WIDTH, HEADS, LAYERS, LENGTH, WORDS = 4, 64, 4, 3, 64, 96
STEPS = 8
FILE = Path(__file__).parents[1] / "src/unisono/view/web/strategies.json"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as one process computes it."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, attention: Attention) -> None:
        """The layer; `attention` is how queries meet keys."""
        super().__init__()
        self.heads, self.attention = HEADS, attention
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the perceptron, each beside the way straight on."""
        qkv = self.qkv(self.before(x))
        b, t, _ = qkv.shape  # of the whole sequence, also where x is a shard of it
        q, k, v = qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = self.attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        made: Tensor = x + self.mlp(self.after(x))
        return made


class Gpt(nn.Module):
    """A language model in small."""

    def __init__(self, attention: Attention = causal) -> None:
        """Layers, and what turns words into them and back."""
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next word."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


class Tape:
    """What happens in one step on this rank, with the clock of the flight recorder."""

    def __init__(self, measure: Callable[[], dict[str, int]]) -> None:
        """An empty tape; `measure` tells what is held."""
        self.measure = measure
        self.begun = time.monotonic_ns()
        self.happenings: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.open: tuple[str, str, float] | None = None

    def now(self) -> float:
        """Microseconds since the step began."""
        return (time.monotonic_ns() - self.begun) / 1000

    def turn(self, name: str = "", what: str = "") -> None:
        """End what was computing, and begin something else if there is a name."""
        at = self.now()
        if self.open:
            before, part, start = self.open
            found = {"kind": "compute", "name": before, "what": part, "nbytes": 0}
            self.happenings.append(found | {"start": start, "end": at})
        self.memory.append({"at": at, "parts": self.measure()})
        self.open = (name, what, at) if name else None

    def add_calls(self, records: list[dict[str, Any]]) -> None:
        """The collectives of this step, from the flight recorder."""
        for record in records:
            ended = record["time_discovered_completed_ns"]
            if record["time_created_ns"] < self.begun or not ended:
                continue
            item = getattr(torch, record["input_dtypes"][0]).itemsize
            peer = record["peer"]
            name, label = record["profiling_name"], record["label"]
            result = label or ("" if peer is None else f"with rank {peer}")
            self.happenings.append(
                {
                    "kind": "comm",
                    "name": name,
                    "what": result,
                    "start": (record["time_created_ns"] - self.begun) / 1000,
                    "end": (ended - self.begun) / 1000,
                    "nbytes": record["input_sizes"][0][0] * item,
                }
            )
        self.happenings.sort(key=lambda event: event["start"])


class Activations:
    """Bytes that autograd keeps for backward, each storage once."""

    def __init__(self, others: set[int]) -> None:
        """Storages at the addresses in `others` are counted elsewhere."""
        self.others = others
        self.sizes: dict[int, int] = {}
        self.count: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        """How much is kept now."""
        return sum(self.sizes[key] for key, k in self.count.items() if k)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is saved inside is counted until autograd lets it go."""
        with torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda box: box.saved
        ):
            yield

    def _pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        box = _Box(saved)
        if storage.data_ptr() not in self.others:
            key = storage.data_ptr()
            self.sizes[key] = storage.nbytes()
            self.count[key] += 1
            weakref.finalize(box, self._let_go, key)
        return box

    def _let_go(self, key: int) -> None:
        self.count[key] -= 1


class _Box:
    def __init__(self, saved: Tensor) -> None:
        self.saved = saved


class Run:
    """A model and its optimizer on this rank; `units` are FSDP's, if there are any."""

    def __init__(self, model: nn.Module, inner: Gpt, optimizer: Any) -> None:
        """`inner` is the model without what wraps it."""
        self.model, self.inner, self.optimizer = model, inner, optimizer
        sharding = model if isinstance(model, FSDP) else optimizer
        sharding = getattr(sharding, "_sharding", sharding)
        self.units = sharding.units if isinstance(sharding, FSDP) else []
        self.zero = sharding if isinstance(sharding, ZeroBuckets) else None
        owned = [p.untyped_storage().data_ptr() for p in inner.parameters()]
        owned += [unit.flat_param.untyped_storage().data_ptr() for unit in self.units]
        self.kept = Activations(set(owned))
        self.loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy

    def measure(self) -> dict[str, int]:
        """What this rank holds, by kind."""
        if self.units:
            params = sum(u.shard.nbytes for u in self.units)
            whole = sum(u.flat_param.nbytes for u in self.units if u.unsharded)
            local_shards = [p.param.grad for u in self.units for p in u.local_shards]
            grads = [u.grads for u in self.units] + local_shards
        else:
            own = list(self.inner.parameters())
            params, whole = sum(p.nbytes for p in own), 0
            grads = [p.grad for p in own]
        if self.zero is not None:
            grads = [bucket.data for bucket in self.zero.buckets.buckets]
            grads += [shard.param.grad for shard in self.zero.local_shards]
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        found = {
            "parameters": params,
            "gathered": whole,
            "gradients": sum(g.nbytes for g in grads if g is not None),
            "optimizer": sum(value.nbytes for value in states),
            "activations": self.kept.nbytes,
        }
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def step(self, tokens: Tensor) -> Tape:
        """One step, with all that happens in it on tape."""
        tape = Tape(self.measure)
        parts: list[tuple[str, nn.Module]] = [("words", self.inner.words)]
        parts += [(f"layer {i}", block) for i, block in enumerate(self.inner.blocks)]
        parts.append(("head", self.inner.head))
        hooks = [hook for name, part in parts for hook in _hooked(tape, name, part)]
        with self.kept.watched():
            scores = self.model(tokens[:, :-1])
            loss = self.loss(scores.flatten(0, 1), tokens[:, 1:].flatten())
        tape.turn("Backward", "head")
        torch.autograd.backward(loss)
        tape.turn("Step", "the optimizer")
        self.optimizer.step()
        tape.turn()
        self.optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        return tape


def _hooked(tape: Tape, name: str, part: nn.Module) -> Iterator[Any]:
    """Turn the tape when a part begins, and in backward when its gradient has come."""

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        tape.turn("Forward", name)

    def leave(_: nn.Module, args: tuple[Tensor, ...], made: Tensor) -> None:
        if name != "head":
            register: Callable[[Any], Any] = made.register_hook
            register(lambda _: tape.turn("Backward", name))

    yield part.register_forward_pre_hook(enter)
    yield part.register_forward_hook(leave)


def adam(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.AdamW(params, lr=1e-3)


def ddp(comm: unisono.Communicator) -> Run:
    """Every rank has everything; gradients are averaged as they come."""
    inner = Gpt()
    model = DDP(inner, comm, bucket_cap_mb=0.2)
    return Run(model, inner, adam(inner.parameters()))


def zero(comm: unisono.Communicator, stage: int) -> Run:
    """Each rank steps its share."""
    inner = Gpt()
    make = partial(ZeRO, inner, comm, torch.optim.AdamW, stage=stage, lr=1e-3)
    optimizer = make(bucket_cap_mb=0.2)
    return Run(inner, inner, optimizer)


def zero1(comm: unisono.Communicator) -> Run:
    """Each rank keeps its share of the optimizer state."""
    return zero(comm, 1)


def zero2(comm: unisono.Communicator) -> Run:
    """Each rank keeps its share of gradients and optimizer state."""
    return zero(comm, 2)


def zero3(comm: unisono.Communicator) -> Run:
    """Parameters too."""
    return zero(comm, 3)


def fsdp(comm: unisono.Communicator) -> Run:
    """Each rank keeps its share of everything, and gathers a unit when it needs it."""
    inner = Gpt()
    units = [inner.words, *inner.blocks, inner.head]
    model = FSDP(inner, comm, units=units)
    return Run(model, inner, adam(model.parameters()))


def tensor(comm: unisono.Communicator) -> Run:
    """Every layer is cut, and activations are summed up."""
    inner = Gpt()
    attention = attention_plan("blocks.*", qkv="qkv", out="out", heads="heads")
    plan = {**mlp_plan("blocks.*.mlp", up="0", down="2"), **attention}
    parallelize(inner, comm, plan)
    return Run(inner, inner, adam(inner.parameters()))


def context(comm: unisono.Communicator) -> Run:
    """Each rank has a part of the sequence; keys and values travel the ring."""

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, comm, causal=True)

    inner = Gpt(ring)
    model = DDP(inner, comm, bucket_cap_mb=0.2)
    return Run(model, inner, adam(inner.parameters()))


def sequence(comm: unisono.Communicator) -> Run:
    """As tensor parallelism, with shards of the sequence between the layers."""
    inner = Gpt()
    attention = attention_plan("blocks.*", qkv="qkv", out="out", heads="heads")
    plan = {**mlp_plan("blocks.*.mlp", up="0", down="2"), **attention}
    plan["head"] = Column()
    norms = ["blocks.*.before", "blocks.*.after"]
    parallelize(inner, comm, sequence_plan(plan, on_shards=norms, enters="blocks.0"))
    run = Run(inner, inner, adam(inner.parameters()))
    run.loss = partial(vocabulary_cross_entropy, comm=comm)
    return run


def experts(comm: unisono.Communicator) -> Run:
    """Each rank has some experts; tokens are sent to theirs and back."""
    inner = Gpt()
    for block in inner.blocks:
        every = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2 * N)
        ]
        block.mlp = MoE(nn.Linear(WIDTH, 2 * N), every, comm, top_k=2)
    model = DDP(inner, comm, bucket_cap_mb=0.2)
    return Run(model, inner, adam(inner.parameters()))


def server(comm: unisono.Communicator) -> Run:
    """One rank steps for all: it gets their gradients, and sends them parameters."""
    inner = Gpt()
    optimizer = ParameterServer(inner, comm, torch.optim.AdamW, lr=1e-3)
    return Run(inner, inner, optimizer)


STRATEGIES: dict[str, tuple[Callable[[unisono.Communicator], Run], str]] = {
    "DDP": (
        ddp,
        "Every rank has the whole model and its own batch; gradients are averaged by "
        "all_reduce, bucket by bucket, while backward still computes the next.",
    ),
    "ZeRO-1": (
        zero1,
        "Each rank keeps all gradients, but the optimizer's state of its share alone: "
        "it steps that share of the parameters, and the new ones are gathered.",
    ),
    "ZeRO-2": (
        zero2,
        "Gradients are reduce-scattered, each rank steps its share of the parameters, "
        "and the new ones are gathered: as much is sent as in DDP.",
    ),
    "ZeRO-3": (
        zero3,
        "A rank has a share of the parameters and gathers a layer's whole ones just "
        "before it computes with them, in forward and again in backward.",
    ),
    "FSDP": (
        fsdp,
        "As ZeRO-3, with smaller units: while one computes, the next is gathered, and "
        "what has been used is freed.",
    ),
    "Tensor parallel": (
        tensor,
        "Every layer is cut over the ranks; after attention and after the perceptron "
        "activations are summed up by all_reduce, in backward their gradients.",
    ),
    "Sequence parallel": (
        sequence,
        "As tensor parallelism, but each all_reduce is taken apart: what lies between "
        "reduce_scatter and all_gather works on a part of the sequence.",
    ),
    "Context parallel": (
        context,
        "Each rank has a part of the sequence; keys and values travel from rank to "
        "rank in attention, and gradients of parameters are averaged as in DDP.",
    ),
    "Experts": (
        experts,
        "Each rank has some of the experts of a layer; tokens are sent to the ranks of "
        "their experts and back, and all other gradients are averaged as in DDP.",
    ),
    "Parameter server": (
        server,
        "One rank, shown here, gets the gradients of all, steps, and sends everyone "
        "the new parameters: its link carries what all ranks send.",
    ),
}
TOGETHER = ("Tensor parallel", "Sequence parallel")
"""All ranks have the same batch."""


def record(comm: unisono.Communicator, name: str) -> dict[str, Any]:
    """The quickest of a few steps, as data."""
    run = STRATEGIES[name][0](comm)
    best: Tape | None = None
    sent = 0
    for step in range(STEPS):
        same = step if name in TOGETHER else N * step + comm.rank
        source = torch.Generator().manual_seed(same)
        tokens = torch.randint(WORDS, (2, LENGTH + 1), generator=source)
        comm.barrier()
        before = comm.sent_bytes
        tape = run.step(tokens)
        sent = comm.sent_bytes - before
        tape.add_calls(comm.records())
        ends = [event["end"] for event in tape.happenings]
        if step >= 2 and (best is None or max(ends) < best.happenings[-1]["end"]):
            best = tape
    assert best is not None
    return {
        "name": name,
        "about": STRATEGIES[name][1],
        "sent": sent,
        "happenings": best.happenings,
        "memory": best.memory,
    }


def record_all(comm: unisono.Communicator, names: list[str]) -> list[dict[str, Any]]:
    """Each of these strategies in turn."""
    torch.set_num_threads(1)
    return [record(comm, name) for name in names]


def main() -> None:
    """Record all strategies, or those that are named, and write the file."""
    names = sys.argv[1:] or list(STRATEGIES)
    unknown = set(names) - set(STRATEGIES)
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: expected {', '.join(STRATEGIES)}")
    before = json.loads(FILE.read_text(encoding="utf-8"))["strategies"]
    known = {strategy["name"]: strategy for strategy in before}
    known |= {s["name"]: s for s in unisono.spawn(record_all, N, args=(names,))[0]}
    result = [known[name] for name in STRATEGIES if name in known]
    for strategy in result:
        print(f"{strategy['name']}: {len(strategy['happenings'])} events")
    about = (
        f"Recorded from real steps of a small transformer ({LAYERS} layers) on {N} "
        "ranks, as rank 0 saw them, and drawn in the order in which things began and "
        "ended; durations of so small a model would tell little."
    )
    document = {"about": about, "n": N, "strategies": result}
    text = json.dumps(_rounded(document), separators=(",", ":"))
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {FILE}: {len(text):,} bytes")


def _rounded(thing: Any) -> Any:
    if isinstance(thing, float):
        return round(thing, 1)
    if isinstance(thing, dict):
        return {key: _rounded(value) for key, value in thing.items()}
    return [_rounded(value) for value in thing] if isinstance(thing, list) else thing


if __name__ == "__main__":
    main()
