"""How fast the simulator is, and how near it comes to what others have published.

    python benchmarks/simulation.py

Writes benchmarks/results/simulation.json, which docs/simulation.md quotes. Sources of
the published figures and of the parameters are named there and below.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

import unisono
from unisono.schedule import Schedule, Step
from unisono.schedule.collective import Ints
from unisono.schedule.step import together
from unisono.simulate import simulate
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.events import loaded
from unisono.simulate.messages import chunk_bytes
from unisono.topology import Topology, parse
from unisono.topology.files import loads

RESULTS = Path(__file__).parent / "results" / "simulation.json"
GIB = 1 << 30
T = TypeVar("T")


def rings(topology: Topology, channels: int) -> Schedule:
    """Several rings at once, as NCCL has them: each leaves a host by another GPU.

    Ring k visits the GPUs of every host beginning with number k, and carries its part
    of the data.
    """
    n, each = topology.n, topology.per_host
    plain = unisono.schedule("all_reduce", "ring", n=n)
    rank = np.arange(n)
    orders = [rank // each * each + (rank % each + k) % each for k in range(channels)]

    def make() -> Iterator[Step]:
        for step in plain:
            yield together(_channel(step, order, k) for k, order in enumerate(orders))

    def _channel(step: Step, order: Ints, k: int) -> Step:
        src, dst, chunk, mask, _ = step.flat()
        chunk = chunk * channels + k
        return Step(order[src], order[dst], chunk, chunk, mask.copy(), step.phase)

    return plain.but(num_chunks=n * channels, make=make, name=f"{channels} rings")


SHARP = """
name = "8 H100 on a switch that adds up"
ranks = 9
hosts = [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
overhead = "1us"

[kinds.nvlink]
latency = "2.4us"
bandwidth = "{bandwidth}GB/s"

[[links]]
between = [["0..7"], ["8"]]
kind = "nvlink"
"""
"""The switch is rank 8: it has a link to every GPU, and adding costs it nothing."""


def sharp(gpus: int = 8) -> Schedule:
    """An all_reduce inside the switch, as NCCL does it with NVLink SHARP.

    Each GPU has a share. The switch adds up what all have of it, hands the sum to the
    one whose share it is, takes it back, and copies it to all.
    """
    hub = gpus
    share, gpu = np.divmod(np.arange(gpus * gpus), gpus)
    own = np.arange(gpus)

    def make() -> Iterator[Step]:
        yield Step(gpu, np.full_like(gpu, hub), share, share, reduces=True)
        yield Step(np.full_like(own, hub), own, own, own, reduces=False)
        yield Step(own, np.full_like(own, hub), own, own, reduces=False)
        yield Step(np.full_like(gpu, hub), gpu, share, share, reduces=False)

    plain = unisono.schedule("all_reduce", "naive", n=gpus + 1)
    return plain.but(num_chunks=gpus, make=make, name="sharp")


def inside_the_switch() -> float:
    """The bus bandwidth of that, as nccl-tests counts it: as if 8 GPUs made a ring."""
    found = 450 * 0.82 * 0.85  # line rate, NCCL's part of it, its factor for SHARP
    where, schedule = loads(SHARP.format(bandwidth=found)), sharp()
    schedule.verify()
    seconds = simulate(schedule, where, 4 * GIB, "events", segments=64, reduce=0).time
    return 2 * 7 / 8 * 4 * GIB / seconds


def published() -> list[dict[str, object]]:
    """Bus bandwidths, as published and as simulated.

    Several rings, and trees in segments, do not step together: they are simulated by
    events.
    """
    four, three = parse("dgx-a100:4"), parse("dgx-a100:3,nics=4")
    five = parse("dgx-h100:5,nics=4")
    rings(four, 8).verify()
    trees = "hierarchical:by=direct/double_tree"
    cases: list[tuple[str, float, float, str]] = [
        (
            "ring all_reduce, 8 x H100, 4 GiB",
            367.5e9,
            simulate("ring", "dgx-h100:1", 4 * GIB).busbw,
            "github.com/NVIDIA/nccl/issues/1455: 365 to 370 GB/s with NCCL_ALGO=RING",
        ),
        (
            "all_reduce inside the switch (NVLink SHARP), 8 x H100, 4 GiB",
            480e9,
            inside_the_switch(),
            "github.com/NVIDIA/nccl/issues/1455: 480 GB/s with NCCL_ALGO=NVLS",
        ),
        (
            "ring all_reduce, 8 x A100, 4 GiB",
            232.5e9,
            simulate("ring", "dgx-a100:1", 4 * GIB).busbw,
            "github.com/NVIDIA/nccl-tests/issues/175: 232.54 GB/s measured",
        ),
        (
            "8 rings all_reduce, 4 x DGX A100 with 8 x 200 Gb/s, 4 GiB",
            192e9,
            simulate(rings(four, 8), four, 4 * GIB, "events").busbw,
            "github.com/NVIDIA/nccl/issues/812: 192 GB/s measured by its maintainers",
        ),
        (
            "8 rings all_reduce, 3 x 8 A100 with 4 x 200 Gb/s, 128 MiB",
            96e9,
            simulate(rings(three, 8), three, GIB // 8, "events").busbw,
            "github.com/NVIDIA/nccl-tests/issues/119: peak of about 96 GB/s",
        ),
        (
            "8 rings all_reduce, 5 x 8 H100 with 4 x 400 Gb/s, 1 GiB",
            190e9,
            simulate(rings(five, 8), five, GIB, "events").busbw,
            "github.com/NVIDIA/nccl/issues/1368: 190 GB/s with NCCL_ALGO=Ring",
        ),
        (
            "double trees all_reduce, 5 x 8 H100 with 4 x 400 Gb/s, 1 GiB",
            150e9,
            simulate(trees, five, GIB, "events", segments=16).busbw,
            "github.com/NVIDIA/nccl/issues/1368: 150 GB/s with NCCL_ALGO=Tree",
        ),
    ]
    return [
        {
            "case": case,
            "published": result,
            "simulated": found,
            "error": found / result - 1,
            "source": source,
        }
        for case, result, found, source in cases
    ]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds of a call, and its result."""
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def speed() -> list[dict[str, object]]:
    """Seconds on one core for the cases that the design promises."""
    rows: list[dict[str, object]] = []
    for algorithm, topology in (
        ("ring", "switch:1024"),
        ("ring", "dgx-h100:128,nics=1"),
        ("ring", "switch:4096"),
        ("hierarchical", "dgx-h100:128"),
        ("hierarchical", "dgx-h100:2048"),
    ):
        where = parse(topology)
        seconds, _ = timed(partial(simulate, algorithm, where, GIB, "steps"))
        rows.append({"what": f"{algorithm} on {topology}, steps", "seconds": seconds})
    million = parse("dgx-h100:131072")
    first, _ = timed(lambda: simulate("hierarchical", million, GIB, "closed"))
    again, _ = timed(
        lambda: [simulate("hierarchical", million, b, "closed") for b in range(1000)]
    )
    rows.append({"what": "closed form, 1,048,576 ranks, the law", "seconds": first})
    rows.append({"what": "closed form, each further call", "seconds": again / 1000})
    return rows


def events() -> list[dict[str, object]]:
    """Events per second on one core."""
    rows: list[dict[str, object]] = []
    for algorithm, topology in (
        ("ring", "switch:1024"),
        ("ring", "dgx-h100:64,nics=1"),
        ("rabenseifner", "dgx-h100:128,nics=1"),
        ("hierarchical:levels=8x128", "dgx-h100:128"),
    ):
        where = parse(topology)
        schedule = unisono.schedule("all_reduce", algorithm, n=where.n)
        world = SimulatedWorld.of(where, Conditions())
        ready, simulator = timed(
            partial(loaded, schedule, world, chunk_bytes(schedule, GIB))
        )
        seconds, count = timed(partial(simulator.run, world.start, world.n))
        rows.append(
            {
                "what": f"{algorithm} on {topology}",
                "events": count,
                "loading": ready,
                "seconds": seconds,
                "events_per_second": count / seconds,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Everything, to the screen and to the file."""
    record = {
        "machine": platform.processor() or platform.machine(),
        "published": published(),
        "speed": speed(),
        "events": events(),
    }
    print(json.dumps(record, indent=1))
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
