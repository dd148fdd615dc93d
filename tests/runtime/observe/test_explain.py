"""Descriptions of calls: `explain` before them, flight records after."""

import numpy as np
import pytest

import unisono
from unisono.errors import BadArgument, CollectiveTimeout
from unisono.runtime.plan.select import choose
from unisono.schedule.collective import COLLECTIVES
from unisono.testing import world


def test_explain_shows_what_would_run(worlds):
    def explained(comm):
        x = np.zeros(1 << 18, np.float32)
        return [
            comm.explain("all_reduce", x),
            comm.explain("all_reduce", x[:4]),
            comm.explain("all_reduce", x, algorithm="ring"),
            comm.explain("all_gather", x),
            comm.explain("broadcast", x, root=2),
            comm.explain("barrier"),
        ]

    text = worlds(3).run(explained)
    large, small, named, gathered, cast, barrier = text[0]
    assert large.startswith("all_reduce of 1 MiB on 3 ranks by direct")
    assert "by naive" in small
    assert "runner-up  ring" in large
    assert "one pass in rank order" in large
    assert "the caller named it" in named
    assert "in the schedule's order" in named
    assert gathered.startswith("all_gather of 3 MiB")
    assert "root's data" in cast
    assert barrier.startswith("barrier of 0 B")


@pytest.mark.parametrize("what", COLLECTIVES)
def test_choice_and_runner_up_exist(what):
    for n in (1, 2, 3, 5):
        for nbytes in (0, 8, 1 << 12, 1 << 20):
            found = choose(what, nbytes, n, named=None, reproducible=False)
            unisono.schedule(what, found.algorithm, n)
            unisono.schedule(what, found.runner_up, n)


def test_explain_shows_measured_times(worlds):
    def measured(comm):
        x = np.zeros(3333, np.float32)
        before = comm.explain("all_reduce", x)
        for _ in range(3):
            comm.all_reduce(x)
        return before, comm.explain("all_reduce", x)

    before, after = worlds(2).run(measured)[0]
    assert "not yet" in before
    assert "the median of 3 calls" in after


def test_explain_refuses_invalid_calls(worlds):
    def refused(comm):
        for wrong in (
            lambda: comm.explain("all_reduse", np.ones(2)),
            lambda: comm.explain("all_reduce"),
            lambda: comm.explain("all_reduce", np.ones(2), algorithm="rong"),
        ):
            with pytest.raises(BadArgument):
                wrong()

    worlds(1).run(refused)


def test_environment_variable_chooses_algorithms(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGORITHM", "all_reduce=ring;broadcast=tree")

    def run(comm):
        comm.all_reduce(np.ones(3))
        comm.broadcast(np.ones(3))
        comm.all_gather(np.ones(3))
        return [r["algorithm"] for r in comm.records()]

    with world(3) as w:
        assert w.run(run) == [["ring", "tree", "direct"]] * 3


FIELDS = {
    *("record_id", "pg_id", "collective_seq_id", "profiling_name", "algorithm"),
    *("label", "op", "root", "input_dtypes", "input_sizes", "peer", "tag", "state"),
    *(
        "content",
        "shape",
        "codec",
        "encoded_bytes",
        "decoded_bytes",
        "process_group",
        "p2p_seq_id",
    ),
    *("device", "stream", "timed"),
    *("op_id", "is_p2p", "output_dtypes", "output_sizes", "retired", "duration_ms"),
    "frames",
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
}


def test_every_call_is_recorded():
    def recorded(comm):
        comm.all_reduce(np.ones(5, np.int32), op="max", algorithm="ring")
        comm.broadcast(np.ones(7), root=1)
        comm.all_reduce(np.ones(2), async_op=True).wait()
        if comm.rank == 0:
            comm.send(np.ones(3), 1, tag=4)
        else:
            comm.recv(np.ones(3), 0, tag=4)
        other = comm.duplicate()
        other.barrier()
        return comm.records()

    with world(2) as w:
        found = w.run(recorded)
    for rank, records in enumerate(found):
        assert all(set(r) == FIELDS for r in records)
        assert {r["state"] for r in records} == {"completed"}
        reduced, cast, later, message = records[:4]
        assert reduced["profiling_name"] == "all_reduce"
        assert (reduced["op"], reduced["algorithm"]) == ("max", "ring")
        assert reduced["input_dtypes"] == ["int32"]
        assert reduced["input_sizes"] == [[5]]
        assert reduced["collective_seq_id"] == 1
        assert (cast["profiling_name"], cast["root"]) == ("broadcast", 1)
        assert later["collective_seq_id"] == 3
        assert message["profiling_name"] == ("send", "recv")[rank]
        assert (message["peer"], message["tag"]) == (1 - rank, 4)
        assert records[-1]["profiling_name"] == "barrier"
        assert records[-1]["pg_id"] != reduced["pg_id"]
        ids = [r["record_id"] for r in records]
        assert ids == sorted(set(ids))
        for r in records:
            assert (
                r["time_created_ns"]
                <= r["time_discovered_started_ns"]
                <= r["time_discovered_completed_ns"]
            )


def test_last_2000_calls_are_kept():
    def recorded(comm):
        x = np.ones(1)
        for _ in range(2100):
            comm.all_reduce(x)
        return comm.records()

    with world(1) as w:
        (records,) = w.run(recorded)
    assert len(records) == 2000
    assert records[-1]["collective_seq_id"] == 2100


def test_failed_calls_are_recorded_as_failed():
    def failed(comm):
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                comm.all_reduce(np.ones(1), timeout_s=0.05)
            return comm.records()[-1]["state"]
        return None  # and never comes

    with world(2) as w:
        assert w.run(failed)[0] == "failed"


def test_labels_are_recorded_and_compared(worlds):
    def labelled(comm):
        x = np.ones(5)
        comm.all_reduce(x, label="bucket 3")
        assert comm.records()[-1]["label"] == "bucket 3"
        assert comm.records()[-1]["algorithm"] == "naive"
        comm.all_reduce(x)
        assert comm.records()[-1]["label"] == ""
        with pytest.raises(unisono.CollectiveMismatch) as raised:
            comm.all_reduce(x, label=f"layer {comm.rank}", async_op=True).wait()
        return raised.value.calls

    result = worlds(2).run(labelled)
    assert result[0] == result[1]
    assert result[0][1] == "all_reduce(float64 × 5, sum) by naive for layer 1"
