"""Calls on CUDA arrays in flight records, traces, diagnoses and live states."""

import os
import pickle
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

import emulated
import unisono
from device_cases import to_device
from diagnosis import judge
from forked import until_broken
from unisono import _native, trace
from unisono.cli import main
from unisono.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from unisono.runtime.observe import monitor, recorder, tracing
from unisono.testing import world, world_across
from unisono.trace import flights
from unisono.trace.summary import summarise
from unisono.trace.why import why

COUNT = 1000
REPLAYS = 5


class Rank:
    """A rank with a stream of its own."""

    def __init__(self, comm):
        self.comm = comm
        self.stream = _native.CudaStream(0)

    def all_reduce(self, count=COUNT, **how):
        x = to_device(np.ones(count, np.float32))
        return self.comm.all_reduce(x, stream=self.stream, **how)

    def on_device(self):
        return [r for r in self.comm.records() if r["device"] is not None]


def recorded(comm):
    me = Rank(comm)
    me.all_reduce(label="grads")
    comm.barrier()
    me.all_reduce(op="max", algorithm="ring", async_op=True).synchronize(30)
    hosts = [r for r in comm.records() if r["device"] is None]
    return me.on_device(), hosts, me.stream.handle


def test_calls_are_in_the_flight_recorder():
    with world(2) as w:
        results = w.run(recorded)
    for calls, hosts, stream in results:
        assert [c["collective_seq_id"] for c in calls] == [1, 2]
        assert [c["algorithm"] for c in calls] == ["naive", "ring"]
        assert [c["op"] for c in calls] == ["sum", "max"]
        assert [c["label"] for c in calls] == ["grads", ""]
        assert calls[0]["stream"] == stream
        assert calls[1]["stream"] not in (0, stream)  # of asynchronous calls
        for call in calls:
            assert call["profiling_name"] == "all_reduce"
            assert call["device"] == "cuda:0"
            assert call["input_sizes"] == [[COUNT]]
            assert call["input_dtypes"] == ["float32"]
            assert call["state"] == "completed"
            assert call["retired"]
            assert not call["timed"]  # nothing was traced
            assert call["time_discovered_started_ns"] is None
            assert call["time_created_ns"] <= call["time_discovered_completed_ns"]
        # Calls on the host have numbers of their own.
        numbers = [h["collective_seq_id"] for h in hosts]
        assert numbers == list(range(1, len(hosts) + 1))


def many(comm):
    me = Rank(comm)
    x = to_device(np.ones(4, np.float32))
    for _ in range(3000):
        comm.all_reduce(x, op="max", stream=me.stream)
    comm.synchronize(60)
    return me.on_device()


def test_the_last_calls_of_many_are_kept_with_their_numbers():
    with world(2) as w:
        for calls in w.run(many):
            numbers = [c["collective_seq_id"] for c in calls]
            assert numbers == list(range(1001, 3001))
            assert {c["state"] for c in calls} == {"completed"}


def traced(comm, file):
    me = Rank(comm)
    me.all_reduce(7)  # the ranks connect; not traced
    comm.synchronize(30)
    comm.barrier()
    with trace.recording(comm, file):
        for _ in range(3):
            me.all_reduce()
        me.all_reduce(async_op=True).wait()
        comm.all_reduce(np.ones(5))
    return me.on_device()


def test_trace_shows_when_calls_were_launched_began_and_ended(tmp_path):
    file = tmp_path / "run.json"
    with world(3) as w:
        results = w.run(lambda comm: traced(comm, file))
    doc = trace.read(file)
    assert trace.faults(doc) == []
    slices = [e for e in doc["traceEvents"] if e["ph"] == "X"]
    for rank, records in enumerate(results):
        mine = [e for e in slices if e["pid"] == rank and e["cat"] == "collective"]
        calls = [e for e in mine if "device" in e["args"]]
        assert [e["args"]["Seq"] for e in calls] == [2, 3, 4, 5]
        assert len([e for e in mine if "device" not in e["args"]]) == 1
        for call in calls:
            args = call["args"]
            assert call["name"] == args["collective"] == "all_reduce"
            assert (args["dtype"], args["algorithm"]) == ("float32", "naive")
            assert (args["bytes"], args["device"]) == (4 * COUNT, "cuda:0")
            assert args["stream"].startswith("0x")
            assert 0 <= args["launched"] <= call["ts"]
            assert args["line"].startswith(__file__)
        assert [e["args"]["async"] for e in calls] == [False, False, False, True]
        timed = [r for r in records if r["timed"]]
        assert [r["collective_seq_id"] for r in timed] == [2, 3, 4, 5]
        for r in timed:
            created, ended = r["time_created_ns"], r["time_discovered_completed_ns"]
            assert created <= r["time_discovered_started_ns"] < ended
    named = [e for e in doc["traceEvents"] if e["name"] == "thread_name"]
    lanes = {e["args"]["name"] for e in named}
    assert {"calls", "calls on cuda", "arrival on cuda"} <= lanes


def test_summary_has_calls_on_devices_apart(tmp_path, capsys):
    file = tmp_path / "run.json"
    with world(2) as w:
        w.run(lambda comm: traced(comm, file))
    rows = {row.on_device: row for row in summarise(trace.read(file)).rows}
    assert (rows[True].calls, rows[True].nbytes) == (4, 4 * COUNT)
    assert (rows[False].calls, rows[False].nbytes) == (1, 40)
    assert rows[True].time > 0
    assert main(["trace", "summary", str(file)]) == 0
    assert "all_reduce on cuda by naive" in capsys.readouterr().out
    assert main(["trace", "diff", str(file), str(file)]) == 0
    assert "all_reduce on cuda by naive" in capsys.readouterr().out


def late(comm, file, others):
    """Rank 1 makes its call when those of the others have begun on the device."""
    me = Rank(comm)
    me.all_reduce()
    comm.synchronize(30)
    with trace.recording(comm, file):
        if comm.rank == 1:
            others.wait()
        me.all_reduce()
        if comm.rank != 1:
            while me.on_device()[-1]["state"] != "started":
                time.sleep(0.001)
            others.wait()


def test_trace_names_the_rank_that_came_last(tmp_path):
    file = tmp_path / "run.json"
    with world(3) as w:
        others = threading.Barrier(3, timeout=30)
        w.run(lambda comm: late(comm, file, others))
    doc = trace.read(file)
    arrivals = {
        e["pid"]: e["name"]
        for e in doc["traceEvents"]
        if e.get("cat") == "arrival on cuda"
    }
    waited = "until rank 1 arrived"
    assert arrivals == {0: waited, 1: "all had arrived", 2: waited}
    (who,) = summarise(doc).late
    assert (who.rank, who.last) == (1, 1)
    assert who.cost > 0


def captured(comm):
    """A graph of two calls, replayed; then a call."""
    me = Rank(comm)
    emulated.initialize()
    tracing.start(comm.core.session.logbook)
    x = to_device(np.ones(COUNT, np.float32))
    comm.all_reduce(x, op="max", stream=me.stream)
    comm.synchronize(30)
    emulated.begin_capture(me.stream.handle)
    comm.all_reduce(x, op="max", stream=me.stream)
    comm.all_reduce(x, op="min", stream=me.stream)
    graph = emulated.instantiate(emulated.end_capture(me.stream.handle))
    for _ in range(REPLAYS):
        emulated.launch_graph(graph, me.stream.handle)
    emulated.synchronize(me.stream.handle)
    comm.all_reduce(x, op="max", stream=me.stream)
    comm.synchronize(30)
    tracing.stop(comm.core.session.logbook)
    return me.on_device(), trace.gather(comm)


def test_captured_calls_are_recorded_and_not_timed():
    with world(2) as w:
        results = w.run(captured)
    for calls, _ in results:
        states = [(c["state"], c["collective_seq_id"], c["timed"]) for c in calls]
        assert states == [
            ("completed", 1, True),
            ("captured", 0, False),
            ("captured", 0, False),
            ("completed", 2 * REPLAYS + 2, True),  # replays count
        ]
        assert calls[1]["time_discovered_completed_ns"] is None
    doc = results[0][1]
    assert trace.faults(doc) == []
    kinds = [e["cat"] for e in doc["traceEvents"] if e.get("cat") == "captured"]
    assert len(kinds) == 4
    assert sum(row.calls for row in summarise(doc).rows if row.on_device) == 2


def test_progress_is_seen_from_outside(monkeypatch):
    monkeypatch.setenv(monitor.MONITOR, "1")

    def rank(comm):
        me = Rank(comm)
        me.all_reduce()
        me.all_reduce(op="max")
        comm.synchronize(30)
        return monitor.state(comm.core.session)["communicators"]

    with world(2) as w:
        for rows in w.run(rank):
            host, there = rows
            assert (host["name"], there["name"]) == ("world", "world on cuda")
            assert there["seq"] == 2
            assert there["call"] == f"all_reduce(float32 × {COUNT}, max) by naive"
            assert not there["inside"]
            assert "device communicator" in host["call"]


def test_host_traffic_does_not_count_calls_on_devices():
    def rank(comm):
        me = Rank(comm)
        comm.all_reduce(np.ones(COUNT, np.float32), algorithm="direct")
        me.all_reduce(algorithm="direct")
        comm.synchronize(30)
        links = monitor.TrafficCounter().report(comm.core.session, [comm.core])
        (group,) = links["groups"]
        return sum(group["sent_to"]), group["sent_bytes"], group["guessed"]

    with world(2) as w:
        for counted, sent, guessed in w.run(rank):
            assert counted == sent
            assert guessed == 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(recorder.FLIGHT_DIR, str(tmp_path / "records"))
    return tmp_path / "records"


@pytest.fixture
def judged(capsys):
    """What `unisono trace why` says of a folder, as JSON, and as text."""
    return partial(judge, capsys)


def error_of(call):
    try:
        call()
    except unisono.UnisonoError as error:
        return error
    return None


def absent(comm):
    me = Rank(comm)
    me.all_reduce()
    comm.synchronize(30)
    comm.barrier()
    comm.timeout_s = 1.5
    if comm.rank == 1:
        until_broken(comm)
        return None
    me.all_reduce()  # in vain
    return error_of(lambda: comm.synchronize(30))


@pytest.mark.sweep
def test_absent_rank_is_in_the_record_and_in_the_diagnosis(folder, judged):
    with world(3) as w:
        errors = w.run(absent)
    described = f"all_reduce(float32 × {COUNT}, sum)"
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveTimeout)
        assert (error.ranks, error.seq, error.collective) == ((1,), 2, "all_reduce")
        assert f"{described} by naive on CUDA arrays (call 2 there)" in str(error)
        assert any("the last calls of this rank are in" in n for n in error.__notes__)
    record = flights.read(folder)[0]
    assert (record.error.type, record.error.seq) == ("CollectiveTimeout", 2)
    assert record.error.ranks == [1]
    assert record.error.on_device
    last = [e for e in record.entries if e.device][-1]
    assert (last.state, last.collective_seq_id) == ("failed", 2)
    assert "# in vain" in line_text(last.frames[1])  # the first is in the class Rank
    result, text = judged(folder)
    assert (result["kind"], result["ranks"], result["seq"]) == ("missing", [1], 2)
    assert result["collective"] == f"{described} on CUDA arrays"
    assert f"rank 1 did not call {described} on CUDA arrays at test_plane" in text
    assert "where ranks 0, 2 waited" in text


def line_text(frame):
    with open(frame.filename) as file:
        return file.readlines()[frame.line - 1]


def different(comm):
    me = Rank(comm)
    me.all_reduce()
    comm.synchronize(30)
    if comm.rank == 2:
        comm.barrier()  # the others' calls have begun: none of them is refused
        me.all_reduce(algorithm="ring")
    else:
        me.all_reduce()
        comm.barrier()
    return error_of(lambda: comm.synchronize(30))


def test_different_calls_are_in_the_diagnosis(folder, judged, monkeypatch):
    # A rank adds the algorithm itself, and an error does not wait long for that.
    for limit in ("_NAMES_S", "_MOMENT_S"):
        monkeypatch.setattr(f"unisono.runtime.observe.failures.{limit}", 60)
    with world(3) as w:
        errors = w.run(different)
    described = f"all_reduce(float32 × {COUNT}, sum)"
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        assert error.seq == 2
        assert error.calls[2] == f"{described} by ring"
        other = next(rank for rank in error.calls if rank != 2)
        assert error.calls[other] == f"{described} by naive"
        assert "call 2 on CUDA arrays differs between ranks" in str(error)
    result, text = judged(folder)
    assert (result["kind"], result["ranks"], result["seq"]) == ("mismatch", [2], 2)
    first = text.splitlines()[0]
    assert first.startswith(f"rank 2 called {described} on CUDA arrays by ring at ")
    assert f"where ranks 0, 1 called {described} on CUDA arrays by naive" in first


def killed(comm):
    me = Rank(comm)
    me.all_reduce()
    comm.synchronize(30)
    if comm.rank == 1:
        comm.barrier()  # the others' calls have begun: none of them is refused
        os.kill(os.getpid(), signal.SIGKILL)
    me.all_reduce()
    comm.barrier()
    error = error_of(lambda: comm.synchronize(30))
    return type(error).__name__, error.ranks, error.seq, str(error)


@pytest.mark.sweep
def test_killed_rank_is_in_the_diagnosis(folder, judged):
    env = {"UNISONO_ADDRESS": "", recorder.FLIGHT_DIR: str(folder)}
    with world_across([3], env=env, grace_s=40).start(killed) as running:
        ends = running.wait()
    for end in (ends[0], ends[2]):
        name, ranks, seq, text = end.result
        assert (name, ranks, seq) == (PeerLost.__name__, (1,), 2)
        assert f"all_reduce(float32 × {COUNT}, sum) by naive on CUDA arrays" in text
    result, text = judged(folder)
    assert (result["kind"], result["ranks"], result["seq"]) == ("missing", [1], 2)
    assert "on CUDA arrays" in result["collective"]
    assert "rank 1: it left no record" in text


def repeated(comm):
    """A graph's call, for which rank 1 does not come."""
    me = Rank(comm)
    emulated.initialize()
    x = to_device(np.ones(COUNT, np.float32))
    comm.all_reduce(x, stream=me.stream)
    comm.synchronize(30)
    emulated.begin_capture(me.stream.handle)
    comm.all_reduce(x, stream=me.stream, timeout_s=0.3)
    graph = emulated.instantiate(emulated.end_capture(me.stream.handle))
    comm.barrier()
    if comm.rank == 0:
        emulated.launch_graph(graph, me.stream.handle)
        emulated.synchronize(me.stream.handle)
    until_broken(comm)
    return error_of(lambda: comm.synchronize(30))


def test_failure_in_a_graph_is_reported_as_its_rank_has_it(folder, judged):
    with world(2) as w:
        errors = w.run(repeated)
    assert all(isinstance(error, CollectiveTimeout) for error in errors)
    assert all((error.ranks, error.seq) == ((1,), 2) for error in errors)
    result, text = judged(folder)
    assert (result["kind"], result["ranks"], result["seq"]) == ("failed", [1], 2)
    assert "the kernel of rank 0" in text


def test_records_for_torch_have_calls_on_devices_in_a_group_of_their_own(
    folder, tmp_path
):
    with world(2) as w:
        w.run(recorded)
    (file, _) = flights.to_pickle(folder, tmp_path / "torch")
    record = pickle.loads(file.read_bytes())
    there = [e for e in record["entries"] if e["device"]]
    assert [e["collective_seq_id"] for e in there] == [1, 2]
    names = {tuple(e["process_group"]) for e in there}
    ((number, name),) = names
    assert name == "world on cuda"
    assert record["pg_config"][number]["ranks"] == "[0, 1]"
    assert {e["pg_id"] for e in there}.isdisjoint(
        e["pg_id"] for e in record["entries"] if not e["device"]
    )


def test_correct_calls_give_no_diagnosis(folder, monkeypatch):
    monkeypatch.setattr("unisono.trace.why.LATE_NS", 10**12)
    with world(2) as w:
        w.run(recorded)
    assert why(flights.read(folder)).kind == "nothing"
