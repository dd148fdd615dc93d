"""PyTorch's own tools take our files: its profile reader, its flight analyser."""

import json
import time

import numpy as np
import pytest
import torch

from unisono import trace
from unisono.errors import CollectiveMismatch
from unisono.interop.torch.profiler import profiled
from unisono.runtime.observe import recorder, tracing
from unisono.testing import world
from unisono.trace.flights import to_pickle

pytestmark = pytest.mark.timeout(120)


def test_torch_ranges_are_beside_unisono_calls_in_the_trace(tmp_path):
    tracing._SPANS.clear()
    with world(1) as alone:
        (comm,) = alone.comms
        tracing.start(comm.core.session.logbook)
        with profiled(), torch.profiler.record_function("forward"):
            x = torch.ones(20, 20) @ torch.ones(20, 20)
            comm.all_reduce(x.numpy())
        doc = trace.merge([tracing.harvest(comm.core.session.logbook)])
    tracing._SPANS.clear()
    assert trace.faults(doc) == []
    slices = {e["name"]: e for e in doc["traceEvents"] if e["ph"] == "X"}
    assert slices["forward"]["cat"] == "user_annotation"
    assert slices["aten::mm"]["cat"] == "cpu_op"
    call, around = slices["all_reduce"], slices["forward"]
    middle = call["ts"] + call["dur"] / 2
    slack = 1e7  # µs; torch tells the time of day, which is years from our clock
    assert around["ts"] - slack <= middle <= around["ts"] + around["dur"] + slack


def test_ranges_are_recorded_without_operators():
    tracing._SPANS.clear()
    with profiled(operators=False), torch.profiler.record_function("mine"):
        torch.ones(3).add(1)
    names = [span.name for span in tracing._SPANS]
    (span,) = [s for s in tracing._SPANS if s.name == "mine"]
    tracing._SPANS.clear()
    assert not any(name.startswith("aten::") for name in names)
    assert 0 < span.begin <= span.end <= time.monotonic_ns() + 10**9


def recorded(comm):
    tracing.start(comm.core.session.logbook)
    comm.all_reduce(np.ones(1000, np.float32), algorithm="ring")
    comm.barrier()
    tracing.stop(comm.core.session.logbook)
    return trace.gather(comm)


def test_profile_reader_of_torch_reads_the_file(tmp_path):
    analysis = pytest.importorskip("torch._inductor.analysis.profile_analysis")
    doc, *_ = world(2).run(recorded)
    file = tmp_path / "run.pt.trace.json"
    trace.write(doc, file)
    profile = analysis.JsonProfile(str(file))
    assert len(profile.events) == len(doc["traceEvents"])
    again = json.loads(file.read_text())
    assert {"schemaVersion", "deviceProperties", "distributedInfo"} <= again.keys()
    result = again["distributedInfo"]
    assert (result["backend"], result["world_size"], result["pg_count"]) == (
        "unisono",
        2,
        1,
    )


def test_flight_analyser_of_torch_reads_the_records(tmp_path, monkeypatch):
    folder, pickles = tmp_path / "records", tmp_path / "pickles"
    monkeypatch.setenv(recorder.FLIGHT_DIR, str(folder))
    config = pytest.importorskip(
        "torch.distributed.flight_recorder.components.config_manager"
    )
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.loader import read_dir

    def rank(comm):
        comm.all_gather(np.ones(8))
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(3), 0)
        else:
            comm.recv(np.ones(3), 1)
        comm.all_reduce(np.ones(5 + comm.rank))

    with pytest.raises(CollectiveMismatch):
        world(2).run(rank)
    assert [file.name for file in to_pickle(folder, pickles)] == ["rank_0", "rank_1"]
    words = ["-p", "rank_", str(pickles)]
    args = config.JobConfig().parse_args(words)
    details, version = read_dir(args)
    found = build_db(details, args, version)
    names = [call.collective_name for call in found.collectives]
    assert names[:2] == ["gloo:all_gather", "gloo:barrier"]
