"""What ranks record: every call, every transfer, nothing when it is switched off."""

import json
import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

import unisono
from unisono import trace
from unisono.errors import BadArgument, Corrupted
from unisono.runtime.observe import tracing
from unisono.runtime.world.clocks import compare_clocks
from unisono.testing import world, world_across
from unisono.trace.document import read, read_parts

pytestmark = pytest.mark.timeout(60)

PAIRED = """
select count(*) from flow s join flow f on s.id = f.id where s.ph = 's' and f.ph = 'f'
"""
LOOSE = """
select count(*) from flow where not exists (
  select * from slice where slice.pid = flow.pid and slice.tid = flow.tid
  and slice.ts <= flow.ts and flow.ts < slice.ts + slice.dur)
"""


def work(comm):
    """Ten collectives of several kinds, and a message."""
    for _ in range(4):
        comm.all_reduce(np.ones(1000), algorithm="ring")
    comm.barrier()
    comm.broadcast(np.ones(5), root=1)
    comm.reduce_scatter(np.ones(4 * comm.world_size))
    big = np.ones(1 << 17)
    comm.all_reduce(big)
    comm.all_gather(big[:1000])
    comm.all_reduce(np.ones(100), async_op=True).wait()
    if comm.rank == 0:
        comm.send(big, 1)
    elif comm.rank == 1:
        comm.recv(big)


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
def test_trace_of_four_ranks_answers_sql(tmp_path, tables, hosts):
    file = tmp_path / "run.pt.trace.json.gz"

    def rank(comm):
        with trace.recording(comm, file):
            work(comm)

    world(4, hosts=hosts).run(rank)
    doc = read(file)
    assert trace.faults(doc) == []
    ask = tables(doc)
    calls = ask("select pid, count(*) from slice where cat='collective' group by pid")
    assert calls == [(rank, 10) for rank in range(4)]
    kinds = dict(ask("select name, count(*) from slice where cat='message' group by 1"))
    assert kinds == {"send to 1": 1, "recv from 0": 1}
    assert ask("select count(*) from slice where dur <= 0 or ts < 0") == [(0,)]
    arrows = ask("select count(*) from flow where ph='s'")
    assert arrows == ask("select count(*) from flow where ph='f'") == ask(PAIRED)
    assert arrows[0][0] > 0
    assert ask(LOOSE) == [(0,)]
    ((least, most),) = ask("select min(value), max(value) from counter")
    assert least == 0
    assert most > 0


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling"])
@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
def test_there_is_an_arrow_for_every_transfer_of_the_schedule(algorithm, hosts):
    def rank(comm):
        tracing.start(comm.core.session.logbook)
        comm.all_reduce(np.ones(1000), algorithm=algorithm)
        tracing.stop(comm.core.session.logbook)
        return trace.gather(comm)

    doc, *_ = world(4, hosts=hosts).run(rank)
    schedule = unisono.schedule("all_reduce", algorithm, n=4)
    transfers = sum(len(step.flat()[0]) for step in schedule)
    arrows = {
        (e["pid"], e["ph"], e["id"]) for e in doc["traceEvents"] if e["ph"] in "sf"
    }
    assert len(arrows) == 2 * transfers


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
def test_coded_messages_have_arrows_and_encoding_times(tables, hosts):
    def rank(comm):
        tracing.start(comm.core.session.logbook)
        comm.all_reduce(np.ones(4000, np.float32), algorithm="ring", codec="fp8")
        tracing.stop(comm.core.session.logbook)
        return trace.gather(comm)

    doc, *_ = world(4, hosts=hosts).run(rank)
    assert trace.faults(doc) == []
    ask = tables(doc)
    assert ask("select count(*) from flow where ph='s'") == [(24,)]
    assert ask("select count(distinct pid) from slice where cat='encoding'") == [(4,)]
    (call,) = {
        e["args"]["codec"] for e in doc["traceEvents"] if e.get("cat") == "collective"
    }
    assert call.startswith("fp8")


def test_arrow_leads_to_the_rank_that_sent():
    def rank(comm):
        tracing.start(comm.core.session.logbook)
        comm.all_reduce(np.ones(1000), algorithm="ring")
        tracing.stop(comm.core.session.logbook)
        return trace.gather(comm)

    doc, *_ = world(5).run(rank)
    ends = {}
    for e in doc["traceEvents"]:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], {})[e["ph"]] = e["pid"]
    pairs = {(end["s"], end["f"]) for end in ends.values()}
    assert pairs == {(r, (r + 1) % 5) for r in range(5)}


def test_nothing_is_recorded_unless_it_is_on():
    def rank(comm):
        comm.all_reduce(np.ones(3))
        comm.barrier()  # the switch is for all of a process, so for both
        trace.start()
        comm.barrier()
        comm.all_reduce(np.ones(4))
        comm.barrier()  # or another rank might switch this one off too early
        trace.stop()
        comm.barrier()
        comm.all_reduce(np.ones(5))
        return tracing.harvest(comm.core.session.logbook)

    def counts(part):
        return np.frombuffer(part.calls, tracing.CALLED)["count"].tolist()

    for part in world(2).run(rank):
        assert 4 in counts(part)
        assert 3 not in counts(part)
        assert 5 not in counts(part)
        assert part.lost == (0, 0)


def test_recording_can_be_switched_on_again():
    with world(1) as alone:
        (comm,) = alone.comms
        for count, on in ((1, True), (2, False), (3, True)):
            (tracing.start if on else tracing.stop)(comm.core.session.logbook)
            comm.all_reduce(np.ones(count))
        part = tracing.harvest(comm.core.session.logbook)
    assert np.frombuffer(part.calls, tracing.CALLED)["count"].tolist() == [1, 3]


def test_overwritten_events_are_counted(monkeypatch):
    monkeypatch.setenv(tracing.EVENTS, "16")
    with world(1) as alone:
        (comm,) = alone.comms
        tracing.start(comm.core.session.logbook)
        for _ in range(10):
            comm.all_reduce(np.ones(4))
        part = tracing.harvest(comm.core.session.logbook)
    assert len(part.calls) == 2 * tracing.CALLED.itemsize
    assert part.lost[0] == 8
    assert part.lost[1] > 0
    doc = trace.merge([part])
    assert trace.faults(doc) == []
    assert doc["otherData"]["lost_calls"] == {0: 8}


@pytest.mark.parametrize("events", ["0", "-1", "many", "1e6", str(1 << 40)])
def test_invalid_number_of_events_is_refused(monkeypatch, events):
    monkeypatch.setenv(tracing.EVENTS, events)
    with world(1) as alone, pytest.raises(BadArgument, match="expected a number"):
        tracing.start(alone.comms[0].core.session.logbook)


def test_call_has_the_line_that_made_it():
    with world(1) as alone:
        (comm,) = alone.comms
        tracing.start(comm.core.session.logbook)
        comm.all_reduce(np.ones(4))
        comm.all_reduce(np.ones(4), algorithm="naive")
        part = tracing.harvest(comm.core.session.logbook)
    doc = trace.merge([part])
    lines = [
        e["args"]["line"] for e in doc["traceEvents"] if e.get("cat") == "collective"
    ]
    names = [line.rpartition(":")[0] for line in lines]
    numbers = [int(line.rpartition(":")[2]) for line in lines]
    assert names == [__file__] * 2
    assert numbers[1] == numbers[0] + 1


def test_clocks_of_hosts_are_aligned():
    def rank(comm):
        tracing.start(comm.core.session.logbook)
        comm.barrier()
        tracing.stop(comm.core.session.logbook)
        return tracing.harvest(comm.core.session.logbook)

    parts = world(2).run(rank)
    apart = trace.merge([parts[0], shifted(parts[1], 10**12)])
    span = [e["ts"] for e in apart["traceEvents"] if e["ph"] == "X"]
    assert max(span) - min(span) > 10**8  # microseconds
    theirs = shifted(parts[1], 10**12)
    theirs.clock = (-(10**12), 0)
    together = trace.merge([parts[0], theirs])
    assert together["traceEvents"] == trace.merge(parts)["traceEvents"]


def shifted(part, ns):
    """The same rank, with a clock that is ahead."""
    calls = np.frombuffer(part.calls, tracing.CALLED).copy()
    moments = np.frombuffer(part.moments, tracing.MOMENT).copy()
    for name in ("created", "begun", "ended"):
        calls[name] += ns
    for name in ("begin", "end"):
        moments[name] += ns
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    fields |= {"calls": calls.tobytes(), "moments": moments.tobytes()}
    return tracing.TracePart(**fields)


def test_hosts_compare_their_clocks_over_the_job():
    def rank(comm):
        compare_clocks(comm)
        return comm.core.session.logbook.clock

    clocks = world(4, hosts=(0, 0, 1, 2)).run(rank)
    assert clocks[:2] == [(0, 0), (0, 0)]
    for offset, doubt in clocks[
        2:
    ]:  # it is one clock, so none is off by more than that
        assert abs(offset) <= doubt


def test_ranges_are_beside_the_calls():
    with world(1) as alone:
        (comm,) = alone.comms
        tracing._SPANS.clear()
        with trace.span("before it is on"):
            pass
        tracing.start(comm.core.session.logbook)
        with trace.span("forward"):
            comm.all_reduce(np.ones(3))
        doc = trace.merge([tracing.harvest(comm.core.session.logbook)])
    slices = {e["name"]: e for e in doc["traceEvents"] if e["ph"] == "X"}
    ours, call = slices["forward"], slices["all_reduce"]
    assert "before it is on" not in slices
    assert ours["ts"] <= call["ts"]
    assert call["ts"] + call["dur"] <= ours["ts"] + ours["dur"]


def test_ranks_write_their_parts_to_the_given_folder(tmp_path, monkeypatch):
    folder = tmp_path / "not yet there"
    monkeypatch.setenv(tracing.TRACE, str(folder))
    with world(2) as two:
        two.run(lambda comm: comm.all_reduce(np.ones(3)))
    assert [part.rank for part in read_parts(folder)] == [0, 1]
    assert sorted(os.listdir(folder)) == [
        f"rank{r}-{os.getpid()}.trace" for r in (0, 1)
    ]


def across(comm):
    comm.all_reduce(np.ones(5000))
    return comm.core.session.logbook.clock


@pytest.mark.sweep
def test_processes_on_several_hosts_leave_parts_on_one_clock(tmp_path, monkeypatch):
    monkeypatch.setenv(tracing.TRACE, str(tmp_path))
    clocks = world_across([2, 1]).run(across)
    assert clocks[:2] == [(0, 0), (0, 0)]
    offset, doubt = clocks[2]
    assert 0 <= abs(offset) <= doubt  # it is this machine's clock, and that is known
    assert doubt > 0
    doc = read(tmp_path)
    assert trace.faults(doc) == []
    assert doc["otherData"]["clock_doubt_ns"] == {2: doubt}
    calls = [e["pid"] for e in doc["traceEvents"] if e.get("cat") == "collective"]
    assert set(calls) == {0, 1, 2}
    arrows = {e["id"]: e["pid"] for e in doc["traceEvents"] if e["ph"] == "f"}
    assert 2 in arrows.values()


def test_trace_package_is_an_attribute_of_unisono():
    code = "import unisono; unisono.trace.faults({'traceEvents': []})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_truncated_part_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(tracing.TRACE, str(tmp_path))
    with world(1) as alone:
        alone.run(lambda comm: comm.all_reduce(np.ones(3)))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Corrupted, match="not a rank's part"):
        read_parts(tmp_path)


def test_part_of_another_version_is_refused(tmp_path):
    with world(1) as alone:
        part = tracing.harvest(alone.comms[0].core.session.logbook)
    part.version += 1
    (tmp_path / "rank0-1.trace").write_bytes(msgspec.msgpack.encode(part))
    with pytest.raises(Corrupted, match="record it again"):
        read_parts(tmp_path)


def test_every_event_has_what_loaders_ask_for(tmp_path):
    doc = good()
    for event in doc["traceEvents"]:
        assert {"ph", "name", "pid", "ts"} <= event.keys()
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert {"cat", "dur", "tid", "args"} <= event.keys()
            assert isinstance(event["tid"], int)
    calls = [e["args"] for e in doc["traceEvents"] if e.get("cat") == "collective"]
    for args in calls:
        assert args["Collective name"] == "all_reduce"
        assert args["In msg nelems"] == args["Out msg nelems"] == 100
        assert (args["Group size"], args["Process Group Name"]) == (2, "0")
    file = tmp_path / "run.pt.trace.json.gz"
    trace.write(doc, file)
    assert read(file) == json.loads(json.dumps(doc))


def test_holistic_trace_analysis_loads_the_file(tmp_path):
    loader = pytest.importorskip("hta.common.trace", reason="HTA is not installed")
    doc = good()
    file = tmp_path / "run.pt.trace.json.gz"
    trace.write(doc, file)
    _, table, *_ = loader.parse_trace_file(str(file))
    assert len(table) == sum(e["ph"] == "X" for e in doc["traceEvents"])


def test_recording_without_a_communicator_is_refused(monkeypatch):
    monkeypatch.setattr("unisono.trace.record.open_sessions", list)
    with pytest.raises(BadArgument, match=r"call unisono\.init first"):
        trace.start()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"traceEvents": 3}', "\x1f\x8b not packed"]
)
def test_files_that_are_no_trace_are_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("latin1"))
    with pytest.raises(BadArgument, match=r"trace|not a"):
        read(file)


def test_folder_without_parts_is_refused(tmp_path):
    with pytest.raises(BadArgument, match="no parts"):
        read(tmp_path)
    with pytest.raises(BadArgument, match="cannot be read"):
        read(tmp_path / "nothing")


def good():
    """A small trace that is right."""
    with world(2) as two:
        docs = two.run(recorded)
    return docs[0]


def recorded(comm):
    tracing.start(comm.core.session.logbook)
    comm.all_reduce(np.ones(100), algorithm="ring")
    tracing.stop(comm.core.session.logbook)
    return trace.gather(comm)


def test_faults_of_a_trace_are_found():
    doc = good()
    assert trace.faults(doc) == []
    text = json.dumps(doc)

    def spoilt(change):
        other = json.loads(text)
        change(other["traceEvents"])
        return trace.faults(other)

    def first(events, phase):
        return next(e for e in events if e["ph"] == phase)

    assert spoilt(lambda es: first(es, "X").update(dur=-1.0))
    assert spoilt(lambda es: first(es, "X").update(ts=-5.0))
    assert spoilt(lambda es: es.remove(first(es, "s")))
    assert spoilt(lambda es: es.remove(first(es, "f")))
    assert spoilt(lambda es: first(es, "f").update(ts=1e12))
    assert spoilt(lambda es: first(es, "C")["args"].update(bytes=-1))
    longer = next(e for e in doc["traceEvents"] if e.get("cat") == "receives")
    crossing = {**longer, "ts": longer["ts"] + longer["dur"] / 2}
    assert spoilt(lambda es: es.append(crossing))


def test_several_threads_may_record_at_once():
    with world(1) as alone:
        (comm,) = alone.comms
        tracing.start(comm.core.session.logbook)

        def calls():
            for _ in range(50):
                comm.all_reduce(np.ones(10), async_op=True).wait()

        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        doc = trace.merge([tracing.harvest(comm.core.session.logbook)])
    assert trace.faults(doc) == []
    names = [e["name"] for e in doc["traceEvents"] if e.get("cat") == "collective"]
    assert names == ["all_reduce"] * 200
