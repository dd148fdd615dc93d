"""Diagnosis of a job: faults are injected, and the right rank and line are named."""

import json
import os
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from diagnosis import judge
from unisono import algorithms
from unisono.cli import main
from unisono.errors import BadArgument, CollectiveMismatch, PeerLost
from unisono.runtime.observe import recorder, tracing
from unisono.testing import world
from unisono.trace import flights
from unisono.trace.flights import FlightRecord
from unisono.trace.why import why

pytestmark = pytest.mark.timeout(120)


def line_of(words):
    """The number of the line of this file that has these words at its end."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(words)]
    return number


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(recorder.FLIGHT_DIR, str(tmp_path / "records"))
    return tmp_path / "records"


@pytest.fixture
def judged(capsys):
    """What `unisono trace why` says of a folder, as JSON, and as text."""
    return partial(judge, capsys)


def sides(document):
    return {side["rank"]: (side["file"], side["number"]) for side in document["sides"]}


def test_rank_with_another_type_is_named_with_both_lines(folder, judged):
    def rank(comm):
        if comm.rank == 2:
            comm.all_gather(np.ones(8, np.float64))  # the odd one
        else:
            comm.all_gather(np.ones(8, np.float32))  # the others

    with pytest.raises(CollectiveMismatch):
        world(4).run(rank)
    result, text = judged(folder)
    assert result["ranks"] == [2]
    assert result["kind"] == "mismatch"
    assert (result["group"], result["seq"]) == ("world", 1)
    assert sides(result)[2] == (__file__, line_of("# the odd one"))
    others = {place for rank, place in sides(result).items() if rank != 2} - {("", 0)}
    assert others == {(__file__, line_of("# the others"))}
    first = text.splitlines()[0]
    assert first.startswith("rank 2 called all_gather(float64 × 32) at test_why.py:")
    # also those who came when it had failed, and were refused
    assert "where ranks 0, 1, 3 called all_gather(float32 × 32)" in first


def test_rank_with_another_shape_is_named_with_both(folder, judged):
    def rank(comm):
        comm.all_reduce(np.ones((6, 2) if comm.rank == 1 else (2, 6)))

    with pytest.raises(CollectiveMismatch):
        world(3).run(rank)
    result, text = judged(folder)
    assert (result["kind"], result["ranks"]) == ("mismatch", [1])
    first = text.splitlines()[0]
    assert first.startswith("rank 1 called all_reduce(float64[6, 2], sum) at test_why")
    assert "where ranks 0, 2 called all_reduce(float64[2, 6], sum)" in first


def test_ranks_with_different_steps_of_one_algorithm_are_named(
    folder, tmp_path, judged
):
    file = tmp_path / "mine.py"
    names = ["ring", "direct", "ring"]
    sources = [
        (Path(algorithms.__file__).parent / f"{a}.py").read_text() for a in names
    ]

    def rank(comm):
        for turn, source in enumerate(sources):
            comm.barrier()
            if comm.rank == turn:
                file.write_text(source)
                comm.explain("all_reduce", np.ones(3), algorithm=str(file))
        comm.barrier()
        comm.all_reduce(np.ones(3), algorithm=str(file))

    with pytest.raises(CollectiveMismatch):
        world(3).run(rank)
    result, text = judged(folder)
    # Who came when it had failed already was refused, and does not say which steps.
    assert result["kind"] == "mismatch"
    assert text.splitlines()[0].count(f"by {file} (steps ") == 2


def test_rank_that_skipped_a_call_is_named_with_that_line(folder, judged):
    def rank(comm):
        for step in range(4):
            comm.all_reduce(np.ones(10))
            if not (step == 2 and comm.rank == 1):
                comm.broadcast(np.ones(6))  # the one left out
            comm.all_gather(np.ones(8))  # the next

    with pytest.raises(CollectiveMismatch):
        world(3).run(rank)
    result, text = judged(folder)
    assert result["kind"] == "skipped"
    assert result["ranks"] == [1]
    assert result["collective"].startswith("broadcast")
    assert result["seq"] == 8
    others = {place for rank, place in sides(result).items() if rank != 1}
    assert others == {(__file__, line_of("# the one left out"))}
    assert sides(result)[1] == (__file__, line_of("# the next"))
    assert text.startswith("rank 1 skipped broadcast(float64 × 6, root 0) at test_why")
    seen = flights.read(folder)
    there = [r for r in (0, 2) if 8 in {e.collective_seq_id for e in seen[r].entries}]
    assert there
    for rank in there:  # and if the third one hears of it in the call before?
        kept = [e for e in seen[2 - rank].entries if e.collective_seq_id < 8]
        left = {2 - rank: msgspec.structs.replace(seen[2 - rank], entries=kept)}
        diagnosis = why(seen | left)
        assert (diagnosis.kind, diagnosis.ranks) == ("skipped", (1,))


def test_skipped_call_equal_to_the_next_is_found_by_its_line(folder, judged):
    def rank(comm):
        comm.all_reduce(np.ones(4))
        if comm.rank != 2:
            comm.all_reduce(np.ones(4))  # skipped unseen
        comm.all_reduce(np.ones(4))  # and here all goes on
        comm.barrier()

    # Nothing differs until the end: all make calls of the same kind, rank 2 one fewer.
    with pytest.raises((CollectiveMismatch, PeerLost)):
        world(3).run(rank)
    result, _ = judged(folder)
    assert result["kind"] == "skipped"
    assert result["ranks"] == [2]
    others = {place for rank, place in sides(result).items() if rank != 2}
    assert others == {(__file__, line_of("# skipped unseen"))}


def waits_for_the_others(comm, seq):
    """Return when all other ranks have come to a call."""
    others = [r for r in range(comm.world_size) if r != comm.rank]
    while any(comm.core.native.states()[r][0] < seq for r in others):
        time.sleep(0.001)


def test_rank_slow_by_200_ms_is_named_with_the_line(folder, judged):
    def rank(comm):
        for step in range(6):
            comm.barrier()
            if comm.rank == 3:
                waits_for_the_others(comm, 2 * step + 2)
                time.sleep(0.2)
            comm.all_reduce(np.ones(10))  # late here

    with world(4) as four:
        four.run(rank)
    result, text = judged(folder)
    assert result["kind"] == "late"
    assert result["ranks"] == [3]
    assert sides(result)[3] == (__file__, line_of("# late here"))
    assert "came late to all_reduce" in text
    assert "it was slow after barrier()" in text


def test_absent_rank_is_named_with_its_current_line(folder, judged):
    """The others time out; the failure reaches the stuck rank, whose monitor writes."""
    files = [folder / f"unisono-rank{r}-{os.getpid()}.json" for r in range(3)]

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            waits_for_the_others(comm, 2)
            comm.core.native.abort_unreachable(
                1, True
            )  # as when the time of the others is up
            while not files[1].exists():
                time.sleep(0.01)
            return
        with pytest.raises(TimeoutError):
            comm.all_reduce(np.ones(7))  # in vain

    three = world(3)
    three.run(rank)
    result, _ = judged(folder)
    three.close()
    assert result["kind"] == "missing"
    assert result["ranks"] == [1]
    assert sides(result)[0] == (__file__, line_of("# in vain"))
    record = msgspec.json.decode(files[1].read_bytes(), type=FlightRecord)
    assert "timeout, rank 1" in record.reason
    assert any(
        frame.filename == __file__ for stack in record.stacks for frame in stack.frames
    )


def test_correct_runs_give_no_diagnosis(folder, judged, monkeypatch):
    monkeypatch.setattr("unisono.trace.why.LATE_NS", 10**12)
    with world(2) as two:
        two.run(lambda comm: comm.all_reduce(np.ones(3)))
    result, text = judged(folder)
    assert result["kind"] == "nothing"
    assert text == "nothing is wrong in these records: no call failed\n"


def test_rank_without_a_record_is_reported(folder, judged, monkeypatch):
    monkeypatch.setattr("unisono.trace.why.LATE_NS", 10**12)
    with world(3) as three:
        three.run(lambda comm: comm.all_reduce(np.ones(3)))
    (folder / f"unisono-rank1-{os.getpid()}.json").unlink()
    result, _ = judged(folder)
    assert result["kind"] == "silent"
    assert result["ranks"] == [1]


def test_records_have_the_fields_of_pytorch(folder):
    with world(2) as two:
        two.run(lambda comm: comm.all_reduce(np.ones(3), label="grads"))
    result = json.loads((folder / f"unisono-rank0-{os.getpid()}.json").read_text())
    assert {"version", "pg_config", "pg_status", "entries", "rank"} <= result.keys()
    (config,) = result["pg_config"].values()
    assert config == {"name": "0", "desc": "world", "ranks": "[0, 1]"}
    (status,) = result["pg_status"].values()
    assert status == {
        "last_enqueued_collective": 1,
        "last_started_collective": 1,
        "last_completed_collective": 1,
    }
    (entry,) = result["entries"]
    assert {
        *("frames", "record_id", "pg_id", "process_group", "collective_seq_id"),
        *("p2p_seq_id", "op_id", "profiling_name", "time_created_ns", "input_sizes"),
        *("input_dtypes", "output_sizes", "output_dtypes", "state", "retired"),
        *("time_discovered_started_ns", "time_discovered_completed_ns", "is_p2p"),
    } <= entry.keys()
    assert entry["process_group"] == ["0", "world"]
    assert entry["label"] == "grads"
    assert entry["frames"][0]["filename"] == __file__


def test_most_severe_reason_is_kept(tmp_path):
    with world(1) as alone:
        logbook = alone.comms[0].core.session.logbook
        for grave in (
            recorder.LEFT,
            recorder.FAILED,
            recorder.REMOTE_FAILURE,
            recorder.LEFT,
        ):
            why_ = f"reason {grave}"
            file = recorder.write(logbook, str(tmp_path), why_, grave, {})
    assert json.loads(file.read_text())["reason"] == f"reason {recorder.FAILED}"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": "zero"}'])
def test_files_that_are_no_record_are_refused(tmp_path, text, capsys):
    (tmp_path / "unisono-rank0-1.json").write_text(text)
    assert main(["trace", "why", str(tmp_path)]) == 2
    assert "not a flight record" in capsys.readouterr().err


def test_folder_without_records_is_refused(tmp_path):
    with pytest.raises(BadArgument, match="no flight records"):
        flights.read(tmp_path)
    with pytest.raises(BadArgument, match="expected a folder"):
        flights.read(tmp_path / "nowhere")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(recorder.FLIGHT_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    with world(1) as alone:
        alone.run(lambda comm: comm.all_reduce(np.ones(3)))
    assert list(tmp_path.iterdir()) == []


def test_clock_offsets_of_hosts_are_applied():
    """A rank whose clock is an hour ahead is not late."""
    tracing.enable_call_sites()

    def rank(comm):
        comm.all_reduce(np.ones(3))
        return json.loads(
            msgspec.json.encode(recorder.flight(comm.core.session.logbook, "asked", {}))
        )

    result = world(2).run(rank)
    hour = 3600 * 10**9
    for entry in result[1]["entries"]:
        entry["time_created_ns"] += hour

    def diagnosis():
        decoded = [msgspec.convert(t, FlightRecord) for t in result]
        return why({f.rank: f for f in decoded})

    assert diagnosis().ranks == (1,)
    result[1]["clock_ns"] = -hour
    late = diagnosis()
    assert late.kind == "nothing" or "1 of 1" in late.summary
    assert "3600000 ms" not in late.summary
