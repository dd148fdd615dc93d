"""The process of one rank of one system: it measures on command, and answers.

Commands arrive as lines of JSON over a Unix socket, one answer each. Between them the
process waits in a read and uses no CPU, so that it does not disturb the other systems.
When the driver ends the read ends, and so does the process.

A batch is timed as a whole after a barrier, without one between its calls, and with the
garbage collector off. In-place reductions work on the result of the call before.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import repeat
from typing import Any

import numpy as np

from unisono.cli._bench.cases import IN_PLACE, Case
from unisono.cli._bench.inputs import Array, fill, wrong
from unisono.cli._bench.systems import SYSTEMS, Call, System

COPIED = 64 << 20


class Worker:
    """What one rank has prepared, and can measure."""

    def __init__(self, system: System, n: int) -> None:
        """Nothing is prepared yet."""
        self.system = system
        self.n = n
        self.calls: dict[str, Call] = {}
        self.buffers: dict[tuple[str, bool], tuple[Array, Array]] = {}
        self.copied: tuple[Array, Array] | None = None
        self.tuner: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command: the method of that name, with its other values."""
        todo = dict(command)
        method = getattr(self, "do_" + todo.pop("do"))
        answer: dict[str, Any] = method(**todo)
        return answer

    def do_forget(self) -> dict[str, Any]:
        """Let go of all that was prepared."""
        self.calls.clear()
        self.buffers.clear()
        return {}

    def do_prepare(
        self,
        key: str,
        case: dict[str, Any],
        place: str,
        algorithm: str,
        *,
        shared: bool,
        check: bool,
    ) -> dict[str, Any]:
        """Bind the call, run it once, and count what it got wrong."""
        wanted = Case(**case)
        try:
            x, out = self._arrays(wanted, place, shared=shared)
            call = self.system.call(wanted, place, x, out, algorithm)
            out[...] = np.zeros(1, out.dtype)
            fill(x, wanted, self.system.rank)
            self.system.barrier()
            call()
            ran = self.system.ran()
        except self.system.refusals as why:
            return {"refused": f"{type(why).__name__}: {why}"}
        self.calls[key] = call
        amiss = wrong(out, wanted, self.system.rank) if check else None
        return {"wrong": amiss, "algorithm": ran}

    def _arrays(self, case: Case, place: str, *, shared: bool) -> tuple[Array, Array]:
        """Input and result; in place one of them is the other, or a part of it."""
        if (place, shared) not in self.buffers:
            give, get = case.lengths(self.system.rank)
            if place == IN_PLACE:
                whole = self.system.empty(max(give, get), case.dtype, shared=shared)
                x, out = self._part(whole, give, case), self._part(whole, get, case)
            else:
                x = self.system.empty(give, case.dtype, shared=shared)
                out = self.system.empty(get, case.dtype, shared=shared)
            self.buffers[place, shared] = x, out
        return self.buffers[place, shared]

    def _part(self, whole: Array, length: int, case: Case) -> Array:
        if length == len(whole):
            return whole
        start = self.system.rank * case.count
        return whole[start : start + length] if length else whole[:0]

    def do_measure(self, key: str, iterations: int, warmup: int) -> dict[str, Any]:
        """The seconds of one call, as the mean of a batch."""
        call = self.calls[key]
        for _ in repeat(None, warmup):
            call()
        self.system.barrier()
        began = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        return {"seconds": (time.perf_counter() - began) / iterations}

    def do_each(self, key: str, iterations: int) -> dict[str, Any]:
        """The seconds of every single call of a batch."""
        call, clock = self.calls[key], time.perf_counter
        times = [0.0] * (iterations + 1)
        call()
        self.system.barrier()
        times[0] = clock()
        for i in range(1, iterations + 1):
            call()
            times[i] = clock()
        return {"seconds": np.diff(times).tolist()}

    def do_tune(self, what: str, effort: dict[str, Any]) -> dict[str, Any]:
        """A part of `unisono tune`, on our own communicator."""
        if self.tuner is None:
            comm = self.system.comm  # type: ignore[attr-defined]  # only unisono is tuned
            self.tuner = import_module("unisono.tune").Tuner.from_plain(comm, effort)
        answer: dict[str, Any] = self.tuner.do(what)
        return answer

    def do_copy(self, ranks: int, repeats: int) -> dict[str, Any]:
        """The bytes per second that this rank reads and writes, if it takes part."""
        if self.system.rank >= ranks:
            self.system.barrier()
            return {"bandwidth": 0.0}
        if self.copied is None:
            self.copied = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)
        source, target = self.copied
        self.system.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            np.copyto(target, source)
        return {"bandwidth": 2 * COPIED * repeats / (time.perf_counter() - began)}


def main() -> None:
    """Join the system, then run the driver's commands until it disconnects."""
    name, address, rank, n, rendezvous = sys.argv[1:6]
    system = SYSTEMS[name](int(rank), int(n), rendezvous)
    worker = Worker(system, int(n))
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(address)  # if the driver is gone already, so are we
        stream = connection.makefile("rw", encoding="utf-8")
        _say(stream, {"system": name, "rank": system.rank, "pid": os.getpid()})
        _obey(worker, stream)
    worker.do_forget()
    system.close()


def _obey(worker: Worker, stream: Any) -> None:
    gc.collect()
    gc.disable()
    for line in stream:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as why:
            _say(stream, {"error": f"{type(why).__name__}: {why}"})
            raise
        _say(stream, answer)


def _say(stream: Any, thing: dict[str, Any]) -> None:
    stream.write(json.dumps(thing) + "\n")
    stream.flush()
