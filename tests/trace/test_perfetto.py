"""Perfetto's own trace processor opens our files, and finds in them what was done.

It is a program that PyPI's package `perfetto` fetches when it is first asked. No test
fetches it: `make perfetto` does, and then runs these. Or UNISONO_TRACE_PROCESSOR says
where one lies, or it is on the path.
"""

import json
import os
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from unisono import trace
from unisono.chrome import Sheet
from unisono.runtime.observe import tracing
from unisono.simulate import simulate, to_chrome
from unisono.testing import world
from unisono.trace.document import read

pytestmark = pytest.mark.timeout(300)

NAMED = "UNISONO_TRACE_PROCESSOR"
SHELL = "trace_processor_shell"
FETCHED = Path.home() / ".local/share/perfetto/prebuilts"
N = 4

ON_THREADS = """
slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid)
"""
ARROWS = """
select source.pid as source, sent.name as sent, sent.ts as since, sent.dur as during,
  sink.pid as sink, came.name as came, came.ts as until, came.dur as lasting
from flow
join slice sent on flow.slice_out = sent.id
join slice came on flow.slice_in = came.id
join thread_track source_track on sent.track_id = source_track.id
join thread source_thread on source_track.utid = source_thread.utid
join process source on source_thread.upid = source.upid
join thread_track sink_track on came.track_id = sink_track.id
join thread sink_thread on sink_track.utid = sink_thread.utid
join process sink on sink_thread.upid = sink.upid
"""
COMPLAINTS = """
select name, value from stats
where value != 0 and (severity != 'info' or name like 'flow%')
"""
CROSSED = """
select count(*) from slice part join slice whole on part.parent_id = whole.id
where part.ts < whole.ts or part.ts + part.dur > whole.ts + whole.dur
"""
COUNTED = """
select process.pid, counter.ts, counter.value from counter
join process_counter_track on counter.track_id = process_counter_track.id
join process using (upid) where process_counter_track.name = 'bytes in flight bytes'
"""


def found_shell():
    """Where a trace processor lies, or None; a wrong name is the test's to fail on."""
    fetched = sorted(FETCHED.glob(f"{SHELL}-*[0-9a-f]"))
    nearest = fetched[-1] if fetched else None
    return os.environ.get(NAMED) or shutil.which(SHELL) or nearest


@pytest.fixture
def opened():
    """opened(file): a function that answers SQL about it, a tuple for each row.

    Its columns need names that differ.
    """
    package = pytest.importorskip(
        "perfetto.trace_processor", reason="PyPI's package perfetto is not installed"
    )
    shell = found_shell()
    if shell is None:
        pytest.skip(f"no {SHELL} here: make perfetto fetches it, or set {NAMED}")
    processors = []

    def load(file):
        config = package.TraceProcessorConfig(bin_path=str(shell), load_timeout=60)
        processors.append(package.TraceProcessor(trace=str(file), config=config))
        ask = processors[-1].query

        def rows(query):
            answer = ask(query)
            return [tuple(row.__dict__.values()) for row in answer]

        return rows

    yield load
    for processor in processors:
        processor.close()


def agree(ask, doc):
    """What Perfetto has made of a file is what the file says."""
    events = {ph: [e for e in doc["traceEvents"] if e["ph"] == ph] for ph in "XsfCM"}
    assert ask(COMPLAINTS) == []
    assert ask("select count(*) from slice where dur < 1 or ts < 0") == [(0,)]
    assert ask(CROSSED) == [(0,)]
    slices = ask(
        "select pid, tid, slice.name, category, ts, dur, thread.name as thread "
        f"from {ON_THREADS}"
    )
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events["M"]
        if e["name"] == "thread_name"
    }
    assert Counter(slices) == Counter(
        (*where(e), e["name"], e["cat"], *ns(e), names[where(e)]) for e in events["X"]
    )
    ranks = {
        (e["pid"], e["args"]["name"])
        for e in events["M"]
        if e["name"] == "process_name"
    }
    assert ranks <= set(ask("select pid, name from process where name is not null"))
    main = "select count(*) from thread where is_main_thread and name is not null"
    assert ask(main) == [(0,)]
    arrows = ask(ARROWS)
    assert len(arrows) == len(events["s"]) == len(events["f"])
    assert Counter(arrows) == Counter(meant(events))
    counters = [(e["pid"], ns(e)[0], e["args"]["bytes"]) for e in events["C"]]
    assert sorted(ask(COUNTED)) == sorted(counters)


def ns(event):
    """When it begins and how long it lasts."""
    return round(event["ts"] * 1e3), round(event.get("dur", 0) * 1e3)


def where(event):
    return event["pid"], event["tid"]


def meant(events):
    """The arrows of a file: what the innermost slices at their two ends are."""
    threads = defaultdict(list)
    for e in events["X"]:
        threads[where(e)].append(e)
    ends = {e["id"]: e for e in events["f"]}
    for leaves in events["s"]:
        result = []
        for end in (leaves, ends[leaves["id"]]):
            at = ns(end)[0]
            around = [e for e in threads[where(end)] if ns(e)[0] <= at < sum(ns(e))]
            innermost = max(around, key=lambda e: e["ts"])
            result += [innermost["pid"], innermost["name"], *ns(innermost)]
        assert (
            result[2] <= result[6]
        )  # since its version 52 Perfetto turns others round
        yield tuple(result)


def train(comm, file):
    """A few steps of data parallelism; what this rank called meanwhile."""
    import torch
    from torch import nn

    from unisono.parallel import DDP

    with trace.recording(comm, file):
        before = len(comm.records())
        model = DDP(
            nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)),
            comm,
            bucket_cap_mb=0.005,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with trace.span(f"step {step}"):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 64) * (comm.rank + step)).square().mean()
                loss.backward()
                optimizer.step()
                comm.all_reduce(loss.detach().numpy())
        if comm.rank == 0:
            comm.send(np.ones(1000), 1)
        elif comm.rank == 1:
            comm.recv(np.ones(1000))
        comm.barrier()
        called = comm.records()[before:]
    return Counter(call["profiling_name"] for call in called if not call["is_p2p"])


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
def test_perfetto_reads_a_training_run_of_four_ranks(opened, tmp_path, hosts):
    torch = pytest.importorskip("torch")
    file = tmp_path / "run.pt.trace.json.gz"
    tracing._SPANS.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        called = world(N, hosts=hosts, timeout_s=60).run(train, file)
    finally:
        torch.set_num_threads(threads)
    ask = opened(file)
    agree(ask, read(file))
    calls = ask(
        f"select pid, slice.name, count(*) from {ON_THREADS} "
        "where category = 'collective' group by 1, 2"
    )
    assert {(rank, name): count for rank, name, count in calls} == {
        (rank, name): count
        for rank, mine in enumerate(called)
        for name, count in mine.items()
    }
    assert all(mine["all_reduce"] >= 8 for mine in called)
    steps = ask("select distinct name from slice where name like 'step %' order by 1")
    assert steps == [(f"step {k}",) for k in range(4)]
    ((sent,),) = ask(
        "select sum(extract_arg(arg_set_id, 'args.bytes')) from slice "
        "where category = 'message' and name = 'send to 1'"
    )
    assert sent == 8000
    assert ask(f"select count(distinct pid) from ({COUNTED})") == [(N,)]


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling"])
def test_perfetto_reads_a_simulated_run(opened, tmp_path, algorithm):
    file = tmp_path / "model.json"
    found = simulate(algorithm, "switch:4", 1 << 20, "events")
    file.write_text(to_chrome(found))
    ask = opened(file)
    agree(ask, json.loads(file.read_text()))
    assert ask("select count(*) from flow") == [(found.messages,)]


def test_perfetto_reads_adjacent_and_nested_slices(opened, tmp_path):
    """Neighbours an odd nanosecond apart, one within another, one that came early."""
    sheet = Sheet()
    for k in range(100):
        begin, end = k * 1.001, (k + 1) * 1.001
        outer = sheet.slice(0, "sends", f"outer {k}", begin, end)
        inner = sheet.slice(0, "sends", f"inner {k}", begin + 0.1, end)
        early = sheet.slice(3, "messages", f"recv {k}", begin, end + 0.0005)
        same = sheet.slice(1, "receives", f"of both {k}", begin + 0.1, end)
        later = sheet.slice(2, "receives", f"later {k}", end, end + 0.5)
        sheet.arrow(outer, later, 5)
        sheet.arrow(outer, same, 5)
        sheet.arrow(inner, same, 5)
        sheet.arrow(inner, early, 1)
    doc = sheet.document()
    assert trace.faults(doc) == []
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(doc))
    ask = opened(file)
    agree(ask, doc)
    ends = ask(
        "select distinct substr(sent.name, 1, 5) || ' ' || substr(came.name, 1, 4) "
        "from flow join slice sent on slice_out = sent.id "
        "join slice came on slice_in = came.id order by 1"
    )
    assert [result for (result,) in ends] == [
        *("inner from", "inner of b", "outer late", "outer of b")
    ]
