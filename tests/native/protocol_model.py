"""Builds the model of the shared-memory protocol from the sources, and runs it.

What is compiled is a copy of `native/`, into which the faults of `planted_faults.py`
are written, each switched off unless asked for by name. How the rest works is in
`native/test/model/explorer.hpp`, what is shown by it in docs/protocol.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planted_faults import FAULTS, SUPPORT

from unisono.runtime.plan.plans import lowered, offsets, verified
from unisono.schedule.program import Program

NATIVE = Path(__file__).parents[2] / "native"
# Of the product, what runs in the model.
PRODUCT = [
    "engine/collective",
    "engine/collective_in_place",
    "engine/collective_movement",
    "engine/collective_wait",
    "engine/collective_trace",
    "engine/collective_streams",
    "engine/collective_shares",
    "memory/zero_copy",
    "memory/cross_memory",
    "engine/comm_failure",
    "engine/comm",
    "engine/comm_queue",
    "p2p/channel",
    "p2p/channel_receive",
    "engine/task",
    "support/fork",
    "memory/host_peers",
    "memory/host_peers_messages",
]
SCENARIOS = ["litmus", "world", "calls", "failures", "waits", "messages"]
OWN = ["explorer", "hooks", "main"]  # not instrumented
# What the model stands in for.
WRAPPED = [
    "memcpy",
    "pthread_mutex_lock",
    "pthread_mutex_trylock",
    "pthread_mutex_unlock",
    "sched_yield",
    "clock_gettime",
    "syscall",
    "memfd_create",
    "posix_fallocate",
    "munmap",
    "close",
    "fcntl",
    "mmap",
]
PLAIN = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-tsan"]
INSTRUMENTED = [*PLAIN, "-fsanitize=thread", "-fno-builtin-memcpy"]
# Where the words of the protocol are used, and how that reads.
ORDERED_IN = {
    "engine/collective.cpp",
    "memory/zero_copy.cpp",
    "p2p/channel.cpp",
    "p2p/channel_receive.cpp",
}
OPERATION = re.compile(r"(\.|->)(load|store|fetch_\w+|exchange|compare_\w+)\(|_fence\(")
COLLECTIVES = (
    ("naive", "all_reduce", "naive"),
    ("direct", "all_reduce", "direct"),
    ("gather", "all_gather", "direct"),
    ("broadcast", "broadcast", "naive"),
)


def compiler() -> list[str]:
    """The system's compiler, behind a cache if there is one."""
    return [
        *(["ccache"] if shutil.which("ccache") else []),
        os.environ.get("CXX", "g++"),
    ]


def _run(command: Sequence[str | Path], within: Path | None = None) -> str:
    # Where there is a cache, what it holds must not depend on the folder.
    cached = {**os.environ, "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=within, env=cached
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _copied(to: Path) -> None:
    """The sources with all faults in them, switched off."""
    shutil.copytree(NATIVE, to, dirs_exist_ok=True)
    for name in sorted({change.file for change in (*SUPPORT, *FAULTS)}):
        text = (to / name).read_text()
        for change in (*SUPPORT, *FAULTS):
            if change.file == name:
                times = text.count(change.original)
                assert times == 1, f"{change.name}: {times} times in {name}"
                text = text.replace(change.original, change.planted)
        declared = "namespace model { bool planted(const char *); }\n"
        (to / name).write_text(declared + text)


def _stubs(objects: Iterable[Path], into: Path) -> Path:
    """What the model leaves out ends it, should it be called after all."""
    whole = into / "whole.o"
    _run(["ld", "-r", "-o", whole, *objects])
    missing = re.findall(r" U (_ZT?N?K?\w*7unisono\w*)", _run(["nm", "-u", whole]))
    calls = "".join(
        f'void {name}(void) {{ unmodelled("{name}"); }}\n' for name in missing
    )
    source = into / "stubs.c"
    source.write_text("void unmodelled(const char *);\n" + calls)
    stubs = into / "stubs.o"
    _run([*compiler(), "-x", "c", "-c", source, "-o", stubs])
    return stubs


def _joined(to: Path, names: Iterable[str]) -> None:
    """Compiled as one, which takes a third of the time."""
    to.write_text("".join(f'#include "{name}.cpp"\n' for name in names))


def build(into: Path) -> Path:
    """The program that explores; `into` is an empty folder."""
    _copied(into)
    model = "test/model"
    _joined(into / model / "product.cpp", PRODUCT)
    _joined(into / model / "scenarios.cpp", (f"{model}/{name}" for name in SCENARIOS))
    sources = [
        ("product", INSTRUMENTED),
        ("scenarios", INSTRUMENTED),
        *((name, PLAIN) for name in OWN),
    ]

    def compiled(name: str, flags: Sequence[str]) -> Path:
        source = f"{model}/{name}.cpp"
        command = [*compiler(), *flags, "-I.", "-c", source, "-o", f"{name}.o"]
        _run(command, within=into)
        return into / f"{name}.o"

    with ThreadPoolExecutor(2) as two:
        objects = list(two.map(lambda one: compiled(*one), sources))
    program = into / "model_of_the_protocol"
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    stubs = _stubs(objects, into)
    _run([*compiler(), "-no-pie", *wraps, *objects, stubs, "-o", program])
    (into / "programs.txt").write_text(_programs())
    return program


def _rows(rows: Sequence[Sequence[int]]) -> str:
    return " ".join(map(str, (len(rows), *(x for row in rows for x in row)))) + "\n"


def _column(values: Iterable[int]) -> str:
    return _rows([(int(v),) for v in values])


def _program(program: Program) -> str:
    """As `tables` in runtime/plan/plans.py gives it to the core."""
    actions: list[tuple[int, ...]] = []
    sources: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    deliveries: list[int] = []
    for number, a in enumerate(program.actions, 1):
        first = len(sources), len(waits), len(deliveries)
        sources += [(int(s.home), s.rank, s.index) for s in a.sources]
        waits += [(w.rank, w.count) for w in a.waits]
        deliveries += a.delivers
        end = len(sources), len(waits), len(deliveries)
        places = (-1 if p is None else p for p in (a.window, a.output))
        runs = (x for pair in zip(first, end, strict=True) for x in pair)
        awaited = int(number in program.awaited)
        actions.append((a.chunk, *places, int(a.completes), *runs, -1, 0, awaited))
    exits = [(w.rank, w.count) for w in program.exits]
    tables = _rows(actions) + _rows(sources) + _rows(waits) + _rows(exits)
    lists = (program.lead, program.readers, deliveries)
    return tables + "".join(map(_column, lists))


def _programs() -> str:
    """What lower makes of the collectives that scenarios use."""
    text = ""
    for name, collective, algorithm in COLLECTIVES:
        for n in (2, 3):
            contract = verified(collective, algorithm, n, 0).contract
            ones = contract.chunk_sizes(contract.num_chunks)
            text += f"{name} {n}\n" + "".join(map(_column, offsets(contract, ones)))
            for exposed in range(4):
                made = lowered(collective, algorithm, n, 0, exposed)
                text += "".join(map(_program, made.programs))
    return text


@dataclass(frozen=True)
class Report:
    """What exploring a scenario showed; as in explorer.hpp."""

    executions: int
    complete: int
    waiting: int
    pruned: int
    timeouts: int
    events: int
    longest: int
    all: bool
    error: str
    trace: list[str] = field(repr=False)
    outcomes: list[str] = field(repr=False)
    ordered: list[int] = field(repr=False)


def explore(program: Path, scenario: str, number: int = 2, **options: Any) -> Report:
    """Explores a scenario; `number` is that of its ranks, or a seed."""
    arguments = {"programs": program.parent / "programs.txt", "scenario": scenario}
    words = [f"{key}={value}" for key, value in (arguments | options).items()]
    return Report(**json.loads(_run([program, *words, f"number={number}"])))


def operation_at(program: Path, site: int) -> str | None:
    """The line, as the model has it, that returns to `site`, if it uses such a word."""
    inlined = _run(["addr2line", "-i", "-e", program, hex(site - 1)])
    frames = re.findall(r"(\w+/\w+\.[ch]pp):(\d+)", inlined)  # the innermost first
    own = [frame for frame in frames if (program.parent / frame[0]).exists()]
    file, line = own[0] if own else ("", "")
    if file not in ORDERED_IN:
        return None
    text = (program.parent / file).read_text().splitlines()[int(line) - 1].strip()
    return f"{file}: {text}" if OPERATION.search(text) else None
