"""`unisono bench --device cuda`, on an emulated driver."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from process_state import gone
from unisono.cli import main
from unisono.cli._bench import devices, plot
from unisono.cli._bench.cases import (
    IN_PLACE,
    ON_DEVICES,
    OUT_OF_PLACE,
    REDUCING,
    Case,
    device_bytes,
)
from unisono.cli._bench.device_systems import GlooOnDevice, UnisonoOnDevice
from unisono.cli._bench.devices import DeviceUse, Placement, RankDevice
from unisono.cli._bench.figures import BenchRow, Timing
from unisono.cli._bench.worker import Worker
from unisono.errors import BadArgument, PeerLost
from unisono.testing import world

pytestmark = pytest.mark.one_in(3)

QUICK = ("--iters", "2", "-w", "0", "--rounds", "2")
THIRTEEN = 13


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("UNISONO_CUDA_DRIVER", "emulated")
    monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "2")


@pytest.fixture
def bench(capsys):
    """Runs the verb on emulated GPUs: its code and what it printed."""

    def call(*arguments):
        code = main(["bench", *arguments, "--device", "cuda", *QUICK])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def result_of(bench):
    """The JSON document of a run that must succeed."""

    def call(*arguments):
        code, out, err = bench(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def rows_of(out):
    return [line.split() for line in out.splitlines() if line[:1] not in ("#", "")]


def test_processes_measure_every_collective_of_cuda_arrays(result_of):
    result = result_of("all", "-n", "3", "-b", "300", "-e", "30K", "-f", "100")
    assert result["errors"] == []
    assert result["out_of_bounds"] == {"count": 0, "okay": True}
    assert [row["collective"] for row in result["results"][::2]] == list(ON_DEVICES)
    config = result["config"]
    assert (config["device"], config["ranks_as"]) == ("cuda", "processes")
    assert (config["nthreads"], config["ngpus"]) == (1, 1)
    assert [d["device"] for d in config["devices"]] == [0, 0, 0]
    assert config["devices"][0]["device_info"] == "Emulated GPU"
    pids = {d["pid"] for d in config["devices"]}
    assert len(pids) == 3
    assert gone(pids)
    for row in result["results"]:
        assert row["out_of_place"]["time"] > 0
        assert row["out_of_place"]["nwrong"] == 0
        assert row["algorithm"]


def test_streams_are_threads_of_one_process(result_of):
    sizes = ["-b", "1K", "-e", "1M", "-f", "1024"]
    result = result_of("all_gather", "-n", "2", *sizes, "--ranks-as", "streams")
    config = result["config"]
    assert (config["ranks_as"], config["nthreads"]) == ("streams", 2)
    assert len({d["pid"] for d in config["devices"]}) == 1
    assert config["copy_bw"] > 0
    small, large = result["results"]
    for place in (OUT_OF_PLACE, IN_PLACE):
        assert small[place]["copy_share"] is None
        assert large[place]["copy_share"] > 0
        assert large[place]["bus_bw"] is None
        assert large[place]["nwrong"] == 0


def test_all_algorithms_are_rows(result_of):
    some = ["all_gather", "-n", "3", "-e", "8", "--algorithm"]
    result = result_of(*some, "all", "--ranks-as", "streams")
    names = [row["algorithm"] for row in result["results"]]
    assert "ring" in names
    assert "ring:both" in names
    assert len(names) == len(set(names)) > 5
    assert {row["in_place"]["nwrong"] for row in result["results"]} == {0}
    named = result_of(*some, "ring:both,direct")
    assert [r["algorithm"] for r in named["results"]] == ["ring:both", "direct"]


@pytest.mark.sweep
def test_ranks_with_a_gpu_each_have_a_bus_bandwidth(result_of, monkeypatch):
    monkeypatch.setenv("UNISONO_EMULATED_GPUS", "2")
    result = result_of("all_reduce", "-n", "2", "-b", "1M", "-e", "1M")
    assert [d["device"] for d in result["config"]["devices"]] == [0, 1]
    assert result["config"]["copy_bw"] is None
    assert result["average_bus_bandwidth"]["bandwidth"] > 0
    row = result["results"][0]["in_place"]
    assert row["bus_bw"] == pytest.approx(row["alg_bw"])
    assert row["copy_share"] is None


def test_ranks_that_share_two_gpus_have_neither(result_of, monkeypatch):
    monkeypatch.setenv("UNISONO_EMULATED_GPUS", "2")
    result = result_of("broadcast", "-n", "3", "-b", "1M", "-e", "1M")
    assert [d["device"] for d in result["config"]["devices"]] == [0, 1, 0]
    assert result["average_bus_bandwidth"]["bandwidth"] is None
    row = result["results"][0]["in_place"]
    assert (row["bus_bw"], row["copy_share"]) == (None, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "bool"])
def test_element_types_are_read_back_and_checked(result_of, dtype):
    some = ["reduce_scatter", "-n", "2", "-e", "64", "-b", "64", "-d", dtype]
    result = result_of(*some, "-o", "max", "--ranks-as", "streams")
    row = result["results"][0]
    assert row["dtype"] == dtype
    assert (row["out_of_place"]["nwrong"], row["in_place"]["nwrong"]) == (0, 0)


def test_table_has_thirteen_columns_and_then_the_share_of_the_copy_speed(bench):
    some = ["-n", "2", "-b", "512K", "-e", "1M", "--ranks-as", "streams"]
    code, out, _ = bench(*some)
    assert code == 0
    lines = out.splitlines()
    head = next(line for line in lines if line.startswith("#       size"))
    assert head.split()[THIRTEEN + 1 :] == ["algorithm", "i_p99", "copy"]
    small, large = rows_of(out)
    assert (small[7], small[11]) == ("N/A", "N/A")
    assert (float(small[6]) > 0, float(small[10]) > 0) == (True, True)
    assert small[THIRTEEN + 2] == "-"
    assert large[THIRTEEN + 2].endswith("%")
    assert "# Avg bus bandwidth    : N/A (ranks share a GPU)" in lines
    assert '# buffers: comm.empty(device="cuda")' in lines
    assert any(line.startswith("# ranks: streams, on CUDA devices") for line in lines)
    assert any(line.startswith("# copy: ") for line in lines)
    assert sum("[cuda] Emulated GPU" in line for line in lines) == 2
    assert "# note: the driver is emulated" in out


def test_csv_names_the_column(bench):
    _, out, _ = bench("-n", "2", "-e", "8", "--csv", "--ranks-as", "streams")
    head, row = (line.split(",") for line in out.splitlines())
    assert head[-1] == "copy"
    assert row[head.index("out_of_place_busbw")] == "N/A"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("barrier", "barrier: not offered on CUDA arrays"),
        ("all_reduce,send_recv", "send_recv: not offered on CUDA arrays"),
        ("--per-host 1", "inside one host"),
        ("--ranks-as threads", "unknown kind of ranks 'threads'"),
        ("--ranks-as streams -n 33", "at most 32 ranks"),
        ("--vs mpich", "the peers are nccl, gloo"),
        ("--algorithm rnig", "nearest: ring"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bench, command, message):
    code, _, err = bench("-e", "8", *command.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_more_than_the_memory_of_a_gpu_is_refused(bench, monkeypatch):
    monkeypatch.setenv("UNISONO_EMULATED_MEMORY", str(64 << 20))
    code, _, err = bench("-n", "2", "-b", "32M", "-e", "32M")
    assert code == 2
    assert "need 192 MiB, and a GPU has 64 MiB" in err
    assert err.count("\n") == 1


def test_no_driver_is_said_in_one_line():
    command = [sys.executable, "-m", "unisono", "bench", "-e", "8", "--device", "cuda"]
    there = os.environ | {"UNISONO_CUDA_DRIVER": "/nowhere/libcuda.so.1"}
    ended = subprocess.run(command, env=there, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("unisono: --device cuda: CUDA's driver library")
    assert ended.stderr.count("\n") == 1


def test_nccl_needs_a_gpu_for_each_rank(bench, monkeypatch):
    monkeypatch.setattr(devices, "num_devices", lambda: 2)
    code, _, err = bench("-n", "3", "-e", "8", "--vs", "nccl")
    assert code == 2
    assert "NCCL refuses two ranks on one GPU" in err
    assert "3 ranks, but GPUs here: 2" in err
    assert "-n 2" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("peer", ["nccl", "gloo"])
def test_peers_need_a_torch_with_cuda(bench, monkeypatch, peer):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "num_devices", lambda: 8)
    code, _, err = bench("-n", "8", "-e", "8", "--vs", peer)
    assert code == 2
    assert f"--vs {peer}: torch {torch.__version__} has no CUDA" in err
    assert "install a torch for CUDA" in err


def test_nccl_needs_a_torch_with_nccl(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(devices, "num_devices", lambda: 2)
    with pytest.raises(BadArgument, match="without NCCL"):
        devices.check_peers(["nccl"], 2)
    devices.check_peers(["gloo"], 4)


def gpu(ordinal, *, has_mps=False, is_emulated=False):
    return RankDevice(ordinal, "GPU", 1 << 30, has_mps, is_emulated)


def test_processes_that_share_a_gpu_without_mps_are_told_so():
    processes, streams = Placement(device="cuda"), Placement(0, "cuda", "streams")
    shared = DeviceUse((gpu(0), gpu(1), gpu(0), gpu(1)))
    (note,) = shared.notes(processes)
    assert note.startswith("2 processes share a GPU without MPS")
    assert "nvidia-cuda-mps-control -d" in note
    assert "\n" not in note
    assert shared.notes(streams) == []
    assert DeviceUse((gpu(0), gpu(1))).notes(processes) == []
    assert DeviceUse((gpu(0, has_mps=True),) * 2).notes(processes) == []
    (other,) = DeviceUse((gpu(0, is_emulated=True),) * 2).notes(processes)
    assert "emulated" in other


def test_what_ranks_share_decides_what_is_reported():
    one, two = DeviceUse((gpu(0), gpu(0))), DeviceUse((gpu(0), gpu(1)))
    mixed, alone = DeviceUse((gpu(0), gpu(1), gpu(0))), DeviceUse((gpu(0),))
    assert [u.has_links for u in (one, two, mixed, alone)] == [False, True, False, True]
    assert [u.is_one_device for u in (one, two, mixed, alone)] == [True, *[False] * 3]
    row = BenchRow(Case("all_reduce", 2, 1 << 20), Timing([1e-3]), None, device=one)
    assert np.isnan(row.bandwidths(row.out_of_place)[1])
    assert plot.lines_of([row]) == {}
    row.in_place = Timing([2e-3])
    at, times, shown = plot.lines_of([row])["unisono"]
    assert (at, times) == ([4 << 20], [2e3])
    assert shown == pytest.approx([(4 << 20) / 2e-3 / 1e9])


def test_share_is_what_must_be_read_and_written_over_the_copy_speed():
    case = Case("all_reduce", 4, 1 << 20)
    use = DeviceUse((gpu(0),) * 4, copy_speed=1e12)
    row = BenchRow(case, Timing([1e-4]), Timing([2e-4]), device=use)
    bytes_ = 2 * 4 * case.size
    assert row.copy_share(OUT_OF_PLACE) == pytest.approx(bytes_ / 1e-4 / 1e12)
    assert row.copy_share(IN_PLACE) == pytest.approx(bytes_ / 2e-4 / 1e12)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_at_least_those_of_inputs_and_results(n):
    for name, place in itertools.product(ON_DEVICES, (OUT_OF_PLACE, IN_PLACE)):
        case = Case(name, n, 1000)
        moved = device_bytes(case, place)
        results = sum(case.lengths(rank)[1] for rank in range(n)) * 4
        own = 0 if place == OUT_OF_PLACE or name in REDUCING else results / n
        reads = n * case.size if name in REDUCING else results - own
        assert moved == pytest.approx(reads + results - own), (name, place)


class SpoilingDevice(UnisonoOnDevice):
    """Changes the last element of every result."""

    def call(self, case, place, x, out, algorithm):
        call = super().call(case, place, x, out, algorithm)

        def spoiled():
            call()
            self.wait()
            values = self.on_host(out)
            values[-1:] += 1
            self.put(out, values)

        return spoiled


@pytest.mark.parametrize("system", [UnisonoOnDevice, SpoilingDevice])
def test_one_wrong_element_on_a_device_is_detected(system):
    case = Case("reduce_scatter", 2, 20_000)

    def wrong(comm, place):
        worker = Worker(system(comm), 2)
        prepare = {"do": "prepare", "key": "k", "case": case.plain(), "place": place}
        how = {"algorithm": "", "shared": True, "check": True}
        return worker.answer(prepare | how)["wrong"]

    with world(2) as ranks:
        for place in (OUT_OF_PLACE, IN_PLACE):
            assert ranks.run(wrong, place) == [int(system is SpoilingDevice)] * 2


def test_arrays_of_all_cases_are_in_the_same_memory():
    with world(1) as ranks:
        system = UnisonoOnDevice(ranks.comms[0])
        system.reserve(4096)
        first = [system.empty(8, "float32", shared=True) for _ in range(2)]
        system.forget()
        again = [system.empty(1024, "float32", shared=True) for _ in range(2)]
        assert [x.view.address for x in first] == [x.view.address for x in again]
        assert [len(x) for x in (*first, *again)] == [8, 8, 1024, 1024]
        assert first[0].view.address != first[1].view.address
        system.forget()
        assert len(system.empty(1025, "float32", shared=True)) == 1025


def test_a_failed_call_is_raised_by_the_wait():
    called = threading.Event()

    def rank(comm):
        system = UnisonoOnDevice(comm)
        x, out = (system.empty(4, "float32", shared=True) for _ in range(2))
        call = system.call(Case("all_reduce", 2, 4), OUT_OF_PLACE, x, out, "")
        call()
        system.wait()
        if comm.rank == 1:
            called.wait()
            comm.close()
            return
        call()
        called.set()
        with pytest.raises(PeerLost, match="rank 1"):
            system.wait()

    with world(2) as ranks:
        ranks.run(rank)


def test_killed_streams_are_a_one_line_error():
    command = [sys.executable, "-m", "unisono", "bench", "-n", "2", "--device", "cuda"]
    command += ["-b", "1K", "-e", "4K", "-i", "8", "--ranks-as", "streams"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        pids = []
        for line in process.stdout:
            if line.startswith("#  Rank"):
                pids.append(int(line.split()[6]))
            if line[:1] != "#":
                break
        os.kill(pids[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert err.startswith("unisono: bench: unisono")
    assert err.count("\n") == 1
    assert gone(pids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "broadcast"])
def test_peers_on_tensors_of_a_device(monkeypatch, tmp_path, dtype, collective):
    """The CPU stands in for the device: what differs is where torch puts tensors."""
    torch = pytest.importorskip("torch")
    cpu, waited = torch.device("cpu"), []
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    case = Case(collective, 1, 100, dtype)
    system = GlooOnDevice(0, 1, str(tmp_path / "gloo"))
    try:
        worker = Worker(system, 1)
        prepare = {"do": "prepare", "key": "k", "case": case.plain()}
        how = {"place": case.compared, "algorithm": "", "shared": False, "check": True}
        assert worker.answer(prepare | how) == {"wrong": 0, "algorithm": ""}
        waited.clear()
        measured = {"do": "measure", "key": "k", "iterations": 2, "warmup": 1}
        assert worker.answer(measured)["seconds"] > 0
        assert len(waited) == 3  # before the barrier, in it, and at the end
        x, _ = worker.buffers[case.compared, False]
        assert torch.is_tensor(x)
    finally:
        system.close()
