"""The process of one rank of one system: it measures on command, and answers.

Commands arrive as lines of JSON over a Unix socket, one answer each. Between them the
process waits in a read and uses no CPU, so that it does not disturb the other systems.
When the driver ends the read ends, and so does the process. Ranks that are streams of a
GPU are threads of one process, each with a connection of its own.

A batch is timed as a whole after a barrier, without one between its calls, and with the
garbage collector off; on a device until all of its calls are done there. In-place
reductions work on the result of the call before.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from itertools import repeat
from typing import Any

import numpy as np

from unisono.cli._bench.cases import IN_PLACE, Case
from unisono.cli._bench.inputs import Array, fill, wrong
from unisono.cli._bench.systems import SYSTEMS, AnyArray, Call, System

COPIED = 64 << 20
ALL_RANKS = "all"
"""In place of a rank: the process has all of them, as threads."""


class Worker:
    """What one rank has prepared, and can measure."""

    def __init__(self, system: System, n: int) -> None:
        """Nothing is prepared yet."""
        self.system = system
        self.n = n
        self.calls: dict[str, Call] = {}
        self.buffers: dict[tuple[str, bool], tuple[AnyArray, AnyArray]] = {}
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
        self.system.forget()
        return {}

    def do_reserve(self, nbytes: int) -> dict[str, Any]:
        """Prepare for arrays of at most so many bytes."""
        self.system.reserve(nbytes)
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
            self._write_inputs(wanted, x, out)
            self.system.barrier()
            call()
            self.system.wait()
            ran = self.system.ran()
        except self.system.refusals as why:
            return {"refused": f"{type(why).__name__}: {why}"}
        self.calls[key] = call
        amiss = None
        if check:
            amiss = wrong(self.system.on_host(out), wanted, self.system.rank)
        return {"wrong": amiss, "algorithm": ran}

    def _write_inputs(self, case: Case, x: AnyArray, out: AnyArray) -> None:
        """Zeros to the result first, of which the input may be a part."""
        result = self.system.on_host(out)
        result[...] = np.zeros(1, result.dtype)
        self.system.put(out, result)
        given = self.system.on_host(x)
        fill(given, case, self.system.rank)
        self.system.put(x, given)

    def _arrays(
        self, case: Case, place: str, *, shared: bool
    ) -> tuple[AnyArray, AnyArray]:
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

    def _part(self, whole: AnyArray, length: int, case: Case) -> AnyArray:
        if length == len(whole):
            return whole
        start = self.system.rank * case.count
        return whole[start : start + length] if length else whole[:0]

    def do_measure(self, key: str, iterations: int, warmup: int) -> dict[str, Any]:
        """The seconds of one call, as the mean of a batch."""
        call = self.calls[key]
        for _ in repeat(None, warmup):
            call()
        self.system.wait()
        self.system.barrier()
        began = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        self.system.wait()
        return {"seconds": (time.perf_counter() - began) / iterations}

    def do_each(self, key: str, iterations: int) -> dict[str, Any]:
        """The seconds of every single call of a batch."""
        call, clock = self.system.waiting(self.calls[key]), time.perf_counter
        times = [0.0] * (iterations + 1)
        call()
        self.system.barrier()
        times[0] = clock()
        for i in range(1, iterations + 1):
            call()
            times[i] = clock()
        self.system.wait()
        return {"seconds": np.diff(times).tolist()}

    def do_tune(self, what: str, effort: dict[str, Any]) -> dict[str, Any]:
        """A part of `unisono tune`, on our own communicator."""
        if self.tuner is None:
            comm = self.system.comm  # type: ignore[attr-defined]  # only unisono is tuned
            self.tuner = import_module("unisono.tune").Tuner.from_plain(comm, effort)
        answer: dict[str, Any] = self.tuner.do(what)
        return answer

    def do_device_copy(self) -> dict[str, Any]:
        """The bytes per second that the GPU of rank 0 reads and writes as it copies."""
        first = self.system.rank == 0
        return {"bandwidth": self.system.copy_speed() if first else 0.0}

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
    """Join the system as one rank, or as all of them, and run the driver's commands."""
    name, address, device, rank, n, rendezvous = sys.argv[1:7]
    if rank == ALL_RANKS:
        _run_streams(address, int(n))
        return
    systems = SYSTEMS if device == "cpu" else _device_systems().DEVICE_SYSTEMS
    _run_rank(systems[name](int(rank), int(n), rendezvous), name, address, int(n))


def _device_systems() -> Any:
    """Imported only if needed: MPI's ranks have no GPU, nor what it needs."""
    return import_module("unisono.cli._bench.device_systems")


def _run_streams(address: str, n: int) -> None:
    """All ranks of unisono as threads, with a stream each."""
    on_device = _device_systems().UnisonoOnDevice
    with import_module("unisono.testing").world(n) as world:
        ranks = [
            threading.Thread(
                target=_run_rank, args=(on_device(comm), "unisono", address, n)
            )
            for comm in world.comms
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def _run_rank(system: System, name: str, address: str, n: int) -> None:
    """Run the driver's commands until it disconnects."""
    worker = Worker(system, n)
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(address)  # if the driver is gone already, so are we
        stream = connection.makefile("rw", encoding="utf-8")
        about = {"pid": os.getpid(), "device": system.about_device()}
        _say(stream, {"system": name, "rank": system.rank, **about})
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
