"""Collectives on one GPU whose ranks are streams of this process.

    python -m benchmarks.gpu.streams [--only speed,latency,...] [-n 2,4,8]

Times are of calls in CUDA graphs, so that neither Python nor launches are measured. The
floor of a collective is what its algorithm must read and write, at the speed of the
driver's own copy inside the device; a share of it is what is reached.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.by_hand import DirectByHand, RingByHand
from benchmarks.gpu.ranks import (
    StreamRanks,
    array,
    copy_speed,
    cuda,
    prepare_streams,
)
from unisono import _native
from unisono.devices import kernels, rtc
from unisono.runtime.device.kernel_engine import KernelEngine
from unisono.runtime.plan.plans import lowered
from unisono.units import format_bytes

MIB = 1 << 20
LARGE = 256 * MIB, 512 * MIB
"""Bytes of all ranks' largest buffers together."""
COLLECTIVES = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
SMALL = 16, 4 << 10, 64 << 10, 1 << 20
"""Bytes of a rank's buffer."""
REPLAYS = 10**6
_BOUNDS = {
    "device/waits.cuh": "!goes_on(rank)",
    "device/packets.cuh": "!waits_.goes_on(",
}

Call = Callable[[Any, int, Any], Any]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", default=",".join(PARTS))
    options.add_argument("-n", default="2,4,8")
    options.add_argument("--replays", type=int, default=REPLAYS)
    chosen = options.parse_args()
    worlds = [int(n) for n in chosen.n.split(",")]
    print(_machine())
    prepare_streams()
    speed = copy_speed()
    print(f"copy inside the device: {speed / 1e12:.2f} TB/s, read and written")
    for name in chosen.only.split(","):
        for n in worlds:
            ranks = StreamRanks(n)
            begun = time.monotonic()
            PARTS[name](ranks, speed, chosen)
            print(f"  ({name} at {n}: {time.monotonic() - begun:.1f} s)", flush=True)
            ranks.close()


def _machine() -> str:
    if _native.cuda_is_emulated():
        return "emulated"
    query = "--query-gpu=name,driver_version"
    found = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, check=True
    )
    return found.stdout.decode().strip()


def call_of(ranks: StreamRanks, name: str, nbytes: int, **how: Any) -> Call:
    """A call whose largest buffer on a rank has so many bytes."""
    n, count = ranks.n, nbytes // 4
    share = max(1, count // n)
    sizes = {
        "all_gather": (share, share * n),
        "reduce_scatter": (share * n, share),
        "all_to_all": (share * n, share * n),
    }
    inputs, outputs = sizes.get(name, (count, 0))
    xs = [array(inputs) for _ in range(n)]
    outs = [array(outputs) if outputs else None for _ in range(n)]

    def call(comm: Any, rank: int, stream: Any) -> Any:
        return getattr(comm, name)(xs[rank], out=outs[rank], stream=stream, **how)

    return call


def traffic(name: str, algorithm: str, n: int, nbytes: int) -> float:
    """Bytes that all ranks read and write, if buffers are used in place."""
    chunks, moved = set(), 0
    for program in lowered(name, algorithm, n, 0, 3).programs:
        for action in program.actions:
            chunks.add(action.chunk)
            if name == "broadcast" and program.rank == 0:
                continue  # in place
            moved += len(action.sources) + len(action.delivers)
            moved += (action.window is not None) + (action.output is not None)
    whole = n if name == "all_to_all" else 1  # chunks are of all ranks' buffers
    return moved * nbytes * whole / max(1, len(chunks))


def _chosen(ranks: StreamRanks, name: str, nbytes: int) -> str:
    said = ranks.comms[0].explain(name, array(nbytes // 4))
    return str(said).split(" ranks by ")[1].split("\n")[0]


def speed(ranks: StreamRanks, copy: float, _: argparse.Namespace) -> None:
    """Large calls of the collectives, and all_reduce by several algorithms."""
    n = ranks.n
    for total in LARGE:
        for name in COLLECTIVES:
            _speed_of(ranks, copy, name, total // n, _chosen(ranks, name, total // n))
    for algorithm in ("ring", "rabenseifner", "recursive_doubling"):
        _speed_of(ranks, copy, "all_reduce", LARGE[1] // n, algorithm)


def _speed_of(
    ranks: StreamRanks, copy: float, name: str, nbytes: int, algorithm: str
) -> None:
    n = ranks.n
    took = ranks.seconds(call_of(ranks, name, nbytes, algorithm=algorithm), 4)
    moved = traffic(name, algorithm, n, nbytes)
    print(
        f"{name:15}{n:3}{format_bytes(nbytes):>10}  {algorithm:20}"
        f"{took * 1e6:9.1f} us {moved / took / 1e12:6.2f} TB/s "
        f"{100 * moved / copy / took:4.0f} % of its floor",
        flush=True,
    )


def latency(ranks: StreamRanks, _: float, __: argparse.Namespace) -> None:
    """Small calls."""
    for name in COLLECTIVES:
        line = f"{name:15}{ranks.n:3}"
        for nbytes in SMALL:
            took = ranks.seconds(call_of(ranks, name, nbytes))
            line += f"  {format_bytes(nbytes):>7} {took * 1e6:6.2f} us"
        print(line, flush=True)


def actions(ranks: StreamRanks, _: float, __: argparse.Namespace) -> None:
    """Algorithms with more and more actions, on 16 bytes a rank."""
    nbytes = 64 * ranks.n
    first: tuple[int, float] | None = None
    for algorithm in ("direct", "recursive_doubling", "ring"):
        programs = lowered("all_reduce", algorithm, ranks.n, 0, 3).programs
        count = max(len(p.actions) for p in programs)
        call = call_of(ranks, "all_reduce", nbytes, algorithm=algorithm)
        took = ranks.seconds(call)
        first = first or (count, took)
        more = count - first[0]
        each = ""
        if more > 0:
            each = f", {(took - first[1]) / more * 1e6:5.2f} us for each further one"
        print(f"{algorithm:20}{ranks.n:3} {count:3} actions {took * 1e6:6.2f} us{each}")


def bounded(ranks: StreamRanks, _: float, __: argparse.Namespace) -> None:
    """What it costs that waits are bounded: the same kernel without that."""
    if _native.cuda_is_emulated():
        return
    for nbytes, algorithm in (
        (64 << 10, "direct"),
        (64 << 10, "ring"),
        (64 * MIB, "ring"),
    ):
        call = call_of(ranks, "all_reduce", nbytes, algorithm=algorithm)
        repeats = 20 if nbytes < MIB else 4
        bounded = ranks.captured(call, repeats)
        with _unbounded():
            unbounded = ranks.captured(call, repeats)
        ratios = sorted(bounded.seconds() / unbounded.seconds() for _ in range(5))
        print(
            f"bounded waits{ranks.n:3} {format_bytes(nbytes):>8} {algorithm:8}"
            f"{100 * (ratios[2] - 1):5.1f} % ({100 * (ratios[0] - 1):.1f} to "
            f"{100 * (ratios[-1] - 1):.1f})",
            flush=True,
        )
    ranks.synchronize()


_KEPT: list[_unbounded] = []


class _unbounded:  # noqa: N801
    """Kernels are compiled without the check that ends a wait."""

    def __enter__(self) -> None:
        self.sources, self.loaded = rtc.sources, dict(kernels._LOADED.made)
        _KEPT.append(self)
        changed = dict(self.sources())
        for name, bound in _BOUNDS.items():
            assert bound in changed[name]
            changed[name] = changed[name].replace(bound, f"false && {bound}")
        rtc.sources = lambda: changed  # type: ignore[assignment]
        kernels._LOADED.made.clear()

    def __exit__(self, *_: object) -> None:
        rtc.sources = self.sources
        self.unbounded = dict(kernels._LOADED.made)  # graphs use them
        kernels._LOADED.made.clear()
        kernels._LOADED.made.update(self.loaded)


def by_hand(ranks: StreamRanks, _: float, __: argparse.Namespace) -> None:
    """all_reduce, as it is chosen and by direct, beside a kernel written for direct."""
    if _native.cuda_is_emulated():
        return
    n = ranks.n
    for nbytes in (64 << 10, 1 << 20, 16 << 20, LARGE[0] // n, LARGE[1] // n):
        xs = [array(nbytes // 4) for _ in range(n)]
        repeats = 20 if nbytes <= 16 * MIB else 4
        chosen = _chosen(ranks, "all_reduce", nbytes)
        ours = {
            name: ranks.captured(_on(xs, algorithm=name), repeats)
            for name in dict.fromkeys((chosen, "direct"))
        }
        kernel = DirectByHand(ranks, xs)
        most = _blocks(ranks, nbytes)
        for blocks in sorted({most, max(1, most // 4)}):
            theirs = kernel.captured(blocks, repeats)
            for name, graph in ours.items():
                pairs = [(graph.seconds(), theirs.seconds()) for _ in range(3)]
                mine, other = sorted(pairs, key=lambda pair: pair[0] / pair[1])[1]
                print(
                    f"by hand{n:3} {format_bytes(nbytes):>8} {blocks:4} blocks: "
                    f"{other * 1e6:8.2f} us, ours by {name} {mine * 1e6:8.2f} us, "
                    f"{mine / other:.3f}",
                    flush=True,
                )
    ranks.synchronize()
    _ring_by_hand(ranks)


def _on(xs: list[Any], **how: Any) -> Call:
    def call(comm: Any, rank: int, stream: Any) -> Any:
        return comm.all_reduce(xs[rank], stream=stream, **how)

    return call


def _blocks(ranks: StreamRanks, nbytes: int) -> int:
    """Of an all_reduce by direct."""
    engine = ranks.comms[0].core.device.made
    assert isinstance(engine, KernelEngine)
    fits = partial(_native.packets_fit, ranks.n + 1, nbytes // 4 // ranks.n, 4)
    return engine.plane.shape(nbytes, fits).blocks


def _ring_by_hand(ranks: StreamRanks) -> None:
    """A ring of small messages: its steps are one after another."""
    kernel = RingByHand(ranks)
    theirs = kernel.captured(blocks=1, repeats=20, threads=32)
    call = call_of(ranks, "all_reduce", 16 * ranks.n, algorithm="ring")
    ours = ranks.captured(call, 20)
    pairs = [(ours.seconds(), theirs.seconds()) for _ in range(3)]
    mine, other = sorted(pairs, key=lambda pair: pair[0] / pair[1])[1]
    steps = 2 * ranks.n - 2
    print(
        f"ring by hand{ranks.n:3}: {other * 1e6:.2f} us, {other / steps * 1e6:.2f} for "
        f"each of {steps} steps, {'right' if kernel.is_right() else 'WRONG'}; ours "
        f"{mine * 1e6:.2f} us, {mine / other:.3f}",
        flush=True,
    )
    ranks.synchronize()


def replays(ranks: StreamRanks, _: float, chosen: argparse.Namespace) -> None:
    """One graph of one call, replayed very often."""
    xs = [array(1024) for _ in range(ranks.n)]

    def call(comm: Any, rank: int, stream: Any) -> Any:
        return comm.all_reduce(xs[rank], op="max", stream=stream)

    graph = ranks.captured(call, 1)
    begun = time.monotonic()
    graph.launch(chosen.replays)
    ranks.synchronize()
    cuda.synchronize(graph.stream)
    took = time.monotonic() - begun
    right = all((x.numpy() == 1).all() for x in xs)
    print(
        f"{chosen.replays} replays at {ranks.n}: {took / chosen.replays * 1e6:.2f} us "
        f"each, {'right' if right else 'WRONG'}"
    )
    ranks.each(call)
    ranks.synchronize()


PARTS = {
    "speed": speed,
    "latency": latency,
    "actions": actions,
    "bounded": bounded,
    "by_hand": by_hand,
    "replays": replays,
}

if __name__ == "__main__":
    main()
