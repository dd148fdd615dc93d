"""Traces of PyTorch's profiler and of Chakra, with other collectives."""

import gzip
import json

import numpy as np
import pytest

import unisono
from unisono.errors import BadArgument, NotOffered
from unisono.interop import chakra, kineto
from unisono.interop.chakra import ChakraNode
from unisono.interop.what_if import read, what_if
from unisono.simulate import Fabric, engine
from unisono.simulate.engines import MeasuredCalls, MeasuredEngine
from unisono.simulate.engines.measured import Line, dump
from unisono.simulate.groups import EqualGroups
from unisono.topology import parse

MIB = 1 << 20


def event(name, ts, dur, cat="kernel", tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0} | {
        "tid": tid,
        "args": args,
    }


def reduced(ts, dur, name="allreduce", **args):
    facts = {"Collective name": name, "In msg nelems": MIB, "Out msg nelems": MIB}
    facts |= {"dtype": "BFloat16", "Group size": 8} | args
    return event("ncclDevKernel_AllReduce", ts, dur, tid=2, **facts)


@pytest.fixture
def profiled(tmp_path):
    """Two all_reduces: the first half hidden, the second not; and what is unknown."""
    events = [
        event("gemm", 0, 1000),
        reduced(500, 1000),
        event("gemm", 1500, 500),
        reduced(2000, 1000),
        reduced(3000, 10, name="mystery"),
        event("record_param_comms", 490, 5, "cpu_op", **{"Collective name": "x"}),
    ]
    path = tmp_path / "step.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_kineto_collectives_have_size_time_and_what_hid_them(profiled):
    trace = kineto.load(profiled)
    first, second = trace.calls
    assert (first.collective, first.nbytes, first.ranks) == ("all_reduce", 2 * MIB, 8)
    assert first.seconds == pytest.approx(1e-3)
    assert first.hidden == pytest.approx(0.5e-3)
    assert second.hidden == 0
    assert trace.seconds == pytest.approx(3010e-6)
    assert trace.left_out == 1
    assert trace.with_times([0.4e-3, 0.1e-3]) == pytest.approx(3010e-6 - 1400e-6)


def test_what_if_tells_the_step_with_simulated_collectives(profiled):
    where = parse("dgx-h100:1")
    groups = EqualGroups(where, np.arange(8).reshape(1, 8))
    seconds, name = groups.time("all_reduce", 2 * MIB)
    found = what_if(profiled, where)
    assert found.before == pytest.approx(3010e-6)
    shown = max(0.0, seconds - 0.5e-3) + seconds
    assert found.after == pytest.approx(3010e-6 - 1500e-6 + shown)
    (one,) = found.calls
    assert (one.times, one.algorithm) == (2, name)
    assert one.after == pytest.approx(2 * seconds)
    coded = what_if(profiled, where, codec="fp8")
    assert coded.calls[0].after < one.after
    slower = what_if(profiled, "cloud:2x8", algorithm="ring")
    assert slower.after > found.after
    assert slower.calls[0].algorithm == "ring"


@pytest.mark.parametrize("name", ["nccl", "gloo", "mpi", "xla"])
def test_calls_of_another_engine_take_what_its_model_says(profiled, name):
    where = parse("dgx-h100:1")
    called = engine(name).time("all_reduce", Fabric.of(where), 2 * MIB)
    found = what_if(profiled, where, engine=name)
    (one,) = found.calls
    assert found.engine == name
    assert one.after == pytest.approx(2 * called.seconds)
    assert one.algorithm == f"{name}'s {called.algorithm}, {called.protocol}"
    ours = what_if(profiled, where)
    assert ours.engine == "unisono"
    assert one.after != pytest.approx(ours.calls[0].after)
    assert found.after == pytest.approx(
        3010e-6 - 1500e-6 + max(0.0, called.seconds - 0.5e-3) + called.seconds
    )


def test_groups_of_another_engine_share_the_cards_of_a_host(profiled):
    whole = what_if(profiled, "dgx-h100:1", engine="nccl")
    two = what_if(profiled, "dgx-h100:2", engine="nccl")
    assert two.after == pytest.approx(whole.after)  # each group is on a host of its own
    with pytest.raises(BadArgument, match="nearest: nccl"):
        what_if(profiled, "dgx-h100:1", engine="ncl")
    for given in ({"algorithm": "ring"}, {"codec": "fp8"}):
        (option,) = given
        with pytest.raises(BadArgument, match=f"{option} is for schedules"):
            what_if(profiled, "dgx-h100:1", engine="nccl", **given)


def test_measured_engine_answers_for_groups_of_all_ranks(profiled, tmp_path):
    file = tmp_path / "cluster.json"
    lines = (Line(8, 1 << 30, 20e-6, 1e-11),)
    file.write_bytes(
        dump(MeasuredEngine("ours", (MeasuredCalls("all_reduce", 8, lines),)))
    )
    found = what_if(profiled, "dgx-h100:1", engine=str(file))
    (one,) = found.calls
    assert one.after == pytest.approx(2 * (20e-6 + 2 * MIB * 1e-11))
    assert one.algorithm == "measured"
    with pytest.raises(NotOffered, match="whole machines alone, not groups"):
        what_if(profiled, "dgx-h100:2", engine=str(file))


def test_call_that_an_engine_has_not_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([reduced(0, 10, name="scatter")]))
    with pytest.raises(NotOffered, match="scatter is not modelled"):
        what_if(path, "dgx-h100:1", engine="nccl")


def test_calls_of_a_kind_are_simulated_once(profiled, monkeypatch):
    made = []
    usual = EqualGroups._quickest
    monkeypatch.setattr(
        EqualGroups, "_quickest", lambda *call: made.append(call) or usual(*call)
    )
    assert what_if(profiled, "switch:8").calls[0].times == 2
    assert len(made) == 1


def test_what_if_refuses_groups_that_do_not_divide_the_topology(profiled):
    with pytest.raises(BadArgument, match="does not divide the 12 ranks"):
        what_if(profiled, "switch:12")


def test_groups_are_as_far_apart_as_their_ranks(tmp_path):
    path = tmp_path / "t.json"
    ranks = {"Process Group Ranks": "[0, 8]", "Group size": 2}
    path.write_text(json.dumps([reduced(0, 10, **ranks)]))
    across = what_if(path, "dgx-h100:2").after
    path.write_text(json.dumps([reduced(0, 10, **{"Group size": 2})]))
    assert what_if(path, "dgx-h100:2").after < across


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": []}'])
def test_files_that_are_no_traces_are_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(BadArgument, match="trace"):
        kineto.load(path)


def test_profile_that_torch_wrote_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        what = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=what, record_shapes=True) as profile:
            dist.all_reduce(torch.ones(1000))
        profile.export_chrome_trace(str(tmp_path / "t.json"))
    finally:
        dist.destroy_process_group()
    (call,) = kineto.load(tmp_path / "t.json").calls
    assert (call.collective, call.nbytes, call.itemsize) == ("all_reduce", 4000, 4)
    assert what_if(tmp_path / "t.json", "switch:4").calls[0].times == 1


NODES = [
    ChakraNode(1, "forward", "compute", (), 0.0, 1e-3, {"is_cpu_op": False}),
    ChakraNode(
        *(2, "sum", "collective", (1,), 1e-3, 2e-3),
        {"comm_type": 0, "comm_size": MIB, "pg_name": "0", "weight": 0.5, "low": -3},
    ),
    ChakraNode(3, "beside", "compute", (1,), 1e-3, 1e-3),
    ChakraNode(4, "step", "compute", (2, 3), 3e-3, 1e-3),
]


def test_chakra_nodes_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "step.0.et"
    path.write_bytes(chakra.dumps(NODES))
    assert chakra.load(path) == NODES


def test_chakra_bytes_are_those_of_the_format(tmp_path):
    """A file written by hand: version 0.0.4, then node 1 of kind 7 after node 300."""
    attribute = b"\x0a\x09comm_size\x48\x80\x08"
    node = b"\x08\x01\x12\x01a\x18\x07\x2a\x02\xac\x02\x52" + bytes([len(attribute)])
    data = b"\x07\x0a\x050.0.4" + bytes([len(node + attribute)]) + node + attribute
    read_back = ChakraNode(1, "a", "collective", (300,), attributes={"comm_size": 1024})
    (tmp_path / "a.et").write_bytes(data)
    assert chakra.load(tmp_path / "a.et") == [read_back]
    assert chakra.dumps([read_back]) == data


def test_chakra_trace_is_run_again_with_other_collectives(tmp_path):
    path = tmp_path / "step.0.et"
    path.write_bytes(chakra.dumps(NODES))
    trace = read(path)
    assert trace.seconds == pytest.approx(4e-3)
    assert trace.with_times([0.0]) == pytest.approx(3e-3)
    found = what_if(path, "dgx-h100:1")
    assert found.after == pytest.approx(3e-3)  # hidden beside what does not wait
    assert found.calls[0].ranks == 8


def test_operator_that_waits_for_its_kernel_is_run_again(tmp_path):
    """The kernel has it as its parent, which is nothing that the kernel waits for."""
    kernel = ChakraNode(2, "sum", "compute", (), 0.0, 2e-3, parents=(1,))
    nodes = [ChakraNode(1, "wait", "compute", (2,), 0.0, 1e-3), kernel]
    path = tmp_path / "step.0.et"
    path.write_bytes(chakra.dumps(nodes))
    assert chakra.load(path) == nodes
    assert read(path).seconds == pytest.approx(3e-3)


def test_nodes_that_wait_for_each_other_are_refused(tmp_path):
    path = tmp_path / "step.0.et"
    nodes = [ChakraNode(1, "a", "compute", (2,)), ChakraNode(2, "b", "compute", (1,))]
    path.write_bytes(chakra.dumps(nodes))
    with pytest.raises(BadArgument, match="wait for each other in a circle"):
        what_if(path, "switch:4")


def test_cut_chakra_file_is_refused(tmp_path):
    path = tmp_path / "step.0.et"
    path.write_bytes(chakra.dumps(NODES)[:-3])
    with pytest.raises(BadArgument, match="not a Chakra execution trace"):
        chakra.load(path)


@pytest.mark.parametrize(("name", "times"), [("ring", 6), ("recursive_doubling", 8)])
def test_schedule_as_chakra_has_every_message_on_both_ranks(tmp_path, name, times):
    schedule = unisono.schedule("all_reduce", name, n=4)
    files = chakra.save(schedule, tmp_path / "out", nbytes=4096)
    ranks = [chakra.load(path) for path in files]
    sent = {n.id: n.attributes for r in ranks for n in r if n.kind == "send"}
    got = {n.id: n.attributes for r in ranks for n in r if n.kind == "recv"}
    assert sent == got
    assert sum(f["comm_size"] for f in sent.values()) == times * 4096
    for nodes in ranks:
        seen = set()
        for node in nodes:
            assert set(node.after) <= seen
            seen.add(node.id)
