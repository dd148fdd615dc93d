"""`unisono bench`: on a system of threads that stands in for processes, and on both."""

import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from process_state import gone
from unisono.cli import main
from unisono.cli._bench import cases, groups, inputs
from unisono.cli._bench.cases import Case, least_bytes, sizes_between
from unisono.cli._bench.devices import Placement
from unisono.cli._bench.driver import BenchSettings
from unisono.cli._bench.figures import BenchRow, Timing, per_iteration
from unisono.cli._bench.report import BenchReport, number
from unisono.cli._bench.systems import OnHost
from unisono.cli._bench.worker import Worker
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import BadArgument
from unisono.reductions import reduce

HEAD = (
    "#       size         count      type   redop    root     time   algbw   busbw"
    "  #wrong     time   algbw   busbw  #wrong"
)
UNITS = (
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"
    "             (us)  (GB/s)  (GB/s)"
)


class ThreadSystem(OnHost):
    """A rank of a world in this process, whose collectives are NumPy's."""

    refusals = (BadArgument,)

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.barrier = world.barrier.wait

    def empty(self, count, dtype, *, shared):
        return np.empty(count, numpy_dtype(dtype))

    def ran(self):
        return self.algorithm or "numpy"

    def call(self, case, place, x, out, algorithm):
        self.algorithm = algorithm
        if case.collective in self.world.lacks:
            raise BadArgument("not offered")

        def run():
            self.world.slots[self.rank] = x.copy()
            self.barrier()
            result = self.result(case, self.world.slots)
            self.barrier()
            if result is not None:
                out[...] = result
                if self.world.spoils and len(out):
                    out[-1] += 1

        return run

    def result(self, case, xs):
        me, k = self.rank, case.count
        total = None
        if case.collective in cases.REDUCING:
            total = reduce(np.empty_like(xs[0]), xs, case.op, by="numpy")
        mine = slice(me * k, (me + 1) * k)
        here = me == case.root
        return {
            "all_reduce": lambda: total,
            "reduce": lambda: total if here else None,
            "reduce_scatter": lambda: total[mine],
            "all_gather": lambda: np.concatenate(xs),
            "gather": lambda: np.concatenate(xs) if here else None,
            "all_to_all": lambda: np.concatenate([x[mine] for x in xs]),
            "broadcast": lambda: xs[case.root],
            "scatter": lambda: xs[case.root][mine],
            "send_recv": lambda: xs[me - 1],
            "barrier": lambda: None,
        }[case.collective]()


class ThreadGroup:
    """The ranks of such a world, asked as processes are."""

    def __init__(self, name, n, *, spoils=False, lacks=(), ends_after=None):
        self.name, self.n, self.pids = name, n, list(range(100, 100 + n))
        self.devices = []
        self.barrier = threading.Barrier(n)
        self.slots = [None] * n
        self.spoils, self.lacks, self.ends_after = spoils, lacks, ends_after
        self.workers = [Worker(ThreadSystem(self, r), n) for r in range(n)]
        self.closed = None
        self.asked = []

    def ask(self, command):
        self.asked.append(command["do"])
        if self.ends_after and self.asked.count("prepare") > self.ends_after:
            raise KeyboardInterrupt
        if command["do"] == "copy":
            return [{"bandwidth": 1e10}] * self.n
        with ThreadPoolExecutor(self.n) as pool:
            return list(pool.map(lambda w: w.answer(command), self.workers))

    def close(self, *, at_once=False):
        self.closed = "at once" if at_once else "gently"


@pytest.fixture
def bench(capsys, monkeypatch):
    """Runs the verb on threads; every call adds what it started to `groups`."""

    def call(*arguments, **options):
        def start(names, n, place):
            call.groups = [ThreadGroup(name, n, **options) for name in names]
            return call.groups

        monkeypatch.setattr(groups, "start", start)
        code = main(["bench", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


BIG = ("-e", "100K", "-f", "1000")
QUICK = ("--iters", "2", "-w", "0", "--rounds", "2")


def rows_of(out):
    return [line.split() for line in out.splitlines() if line[:1] not in ("#", "")]


def test_columns_are_those_of_nccl_tests_and_then_ours(bench):
    code, out, _ = bench("all_reduce", "-n", "2", "-b", "8", "-e", "64", *QUICK)
    assert code == 0
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith(HEAD))
    assert lines[head].split()[14:] == ["algorithm", "i_p99", "floor"]
    assert lines[head + 1].startswith(UNITS)
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["8", "16", "32", "64"]
    for row in rows:
        assert row[1:5] == [str(int(row[0]) // 4), "float", "sum", "-1"]
        assert [float(cell) >= 0 for cell in row[5:13]] == [True] * 8
        assert (row[8], row[12]) == ("0", "0")
        assert row[13] == "numpy"
    assert "# Out of bounds values : 0 OK" in lines
    assert any(line.startswith("# Avg bus bandwidth    : ") for line in lines)


def test_rows_are_aligned_with_their_headers(bench):
    _, out, _ = bench("-n", "2", "-e", "8", *QUICK)
    lines = out.splitlines()
    head = next(line for line in lines if line.startswith(HEAD))
    row = next(line for line in lines if line[:1] not in ("#", ""))
    for name in ("size", "count", "type", "redop", "root", "#wrong", "algorithm"):
        end = head.rindex(name) + len(name)
        assert row[end - 1] != " "
        assert row[end : end + 1] in (" ", "")


@pytest.mark.cases(2)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_collective_is_measured_and_correct(bench, n):
    code, out, _ = bench("all", "-n", str(n), "-b", "100", *BIG, *QUICK)
    assert code == 0
    result = [line.partition(": ")[2] for line in out.splitlines() if "test" in line]
    assert result
    assert len(rows_of(out)) == 2 * 9 + 1


def test_wrong_element_is_counted_and_fails(bench):
    code, out, _ = bench("all_reduce", "-n", "3", "-e", "8", *QUICK, spoils=True)
    assert code == 1
    assert "# Out of bounds values : 6 FAILED" in out
    assert rows_of(out)[0][8] == "3"


def test_check_can_be_left_out(bench):
    code, out, _ = bench("-n", "2", "-e", "8", "-c", "0", *QUICK, spoils=True)
    assert code == 0
    assert rows_of(out)[0][8] == "N/A"


@pytest.mark.parametrize("collective", cases.COLLECTIVES)
@pytest.mark.parametrize("spoiled", [False, True])
def test_check_detects_one_wrong_element_of_each_collective(collective, spoiled):
    case = Case(collective, 3, 40_000, root=1)
    group = ThreadGroup("unisono", 3, spoils=spoiled)
    for place in case.places:
        prepare = {"do": "prepare", "key": "k", "case": case.plain(), "place": place}
        result = group.ask(prepare | {"algorithm": "", "shared": False, "check": True})
        wrong = sum(answer["wrong"] for answer in result)
        with_result = sum(bool(inputs.pieces(case, rank)) for rank in range(3))
        assert wrong == (with_result if spoiled else 0)


def test_data_in_the_wrong_place_is_detected():
    case = Case("all_gather", 4, 1 << 16)
    parts = []
    for rank in range(4):
        parts.append(np.empty(1 << 16, np.float32))
        inputs.fill(parts[-1], case, rank)
    assert inputs.wrong(np.concatenate(parts), case, 0) == 0
    for a, b in itertools.combinations(range(4), 2):
        swapped = list(parts)
        swapped[a], swapped[b] = parts[b], parts[a]
        assert inputs.wrong(np.concatenate(swapped), case, 0) > 1000
    shifted = np.roll(np.concatenate(parts), 1)
    assert inputs.wrong(shifted, case, 0) > 1000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_inputs_add_up_exactly_in_any_order(dtype, op, n):
    case = Case("all_reduce", n, inputs.PERIOD, dtype, op)
    xs = [np.empty(case.count, numpy_dtype(dtype)) for _ in range(n)]
    for rank, x in enumerate(xs):
        inputs.fill(x, case, rank)
    rng = np.random.default_rng(n)
    for _ in range(2):
        order = rng.permutation(n)
        total = xs[order[0]].copy()
        for rank in order[1:]:  # rounded after each, as a ring would
            total = reduce(np.empty_like(total), [total, xs[rank]], op, by="numpy")
        assert inputs.wrong(total, case, 0) == 0
    assert len(set(xs[0].tolist())) > 1


def test_amounts_are_those_of_nccl_tests():
    n, count = 4, 1000
    expected = {
        "all_reduce": (4000, 1.5),
        "all_gather": (16_000, 0.75),
        "reduce_scatter": (16_000, 0.75),
        "all_to_all": (16_000, 0.75),
        "gather": (16_000, 0.75),
        "scatter": (16_000, 0.75),
        "broadcast": (4000, 1.0),
        "reduce": (4000, 1.0),
        "send_recv": (4000, 1.0),
    }
    for name, (size, factor) in expected.items():
        case = Case(name, n, count)
        assert (case.size, case.factor) == (size, factor)
        row = BenchRow(case, Timing([1e-6, 2e-6, 9e-6]), None)
        algbw, busbw = row.bandwidths(row.out_of_place)
        assert algbw == pytest.approx(size / 2e-6 / 1e9)
        assert busbw == pytest.approx(algbw * factor)


def test_share_of_the_floor_above_100_percent_is_explained():
    case = Case("all_reduce", 2, 1 << 20)
    settings = BenchSettings(1, 1, 0, True, False)
    report = BenchReport({}, settings, [], Placement(0))
    for floor_s, notes in ((0.9e-3, 0), (2.05e-3, 1)):
        times = Timing([1e-3])
        report.rows = [BenchRow(case, times, times, {}, floor_s)]
        assert len(report.notes()) == notes
    assert "floor above 100 %: sums were read from caches" in report.notes()[0]


def test_lower_bound_of_two_ranks_is_two_halves_read_and_written():
    case = Case("all_reduce", 2, 1 << 20)
    assert least_bytes(case, shared=True)[1] == 2 * case.size
    assert least_bytes(case, shared=False)[1] == 4 * case.size
    for name, n in itertools.product(cases.COLLECTIVES, (2, 3, 8)):
        case = Case(name, n, 1000)
        together, busiest = least_bytes(case, shared=True)
        staged, _ = least_bytes(case, shared=False)
        assert together <= n * busiest
        assert (staged > together) == (name != "barrier")


def test_sizes_grow_by_step_or_factor():
    assert sizes_between(8, 100) == [8, 16, 32, 64]
    assert sizes_between(8, 100, factor=10) == [8, 80]
    assert sizes_between(0, 100, step=50) == [0, 50, 100]
    assert sizes_between(5, 5) == [5]


def test_sizes_that_round_to_the_same_are_one_row(bench):
    _, out, _ = bench("all_gather", "-n", "4", "-b", "1", "-e", "64", *QUICK)
    assert [row[0] for row in rows_of(out)] == ["16", "32", "64"]
    assert [row[1] for row in rows_of(out)] == ["1", "2", "4"]


def test_types_and_reductions_take_the_names_of_nccl_tests(bench):
    for given, shown in (("half", "half"), ("float8_e4m3fn", "f8e4m3"), ("int8",) * 2):
        _, out, _ = bench("-n", "2", "-e", "8", "-d", given, *QUICK)
        assert rows_of(out)[0][2] == shown
    _, out, _ = bench("reduce", "-n", "2", "-e", "8", "-o", "avg", "-r", "1", *QUICK)
    assert rows_of(out)[0][3:5] == ["avg", "1"]


KEYS = ["size", "count", "type", "redop", "root", "out_of_place", "in_place"]


def test_json_has_the_keys_of_nccl_tests(bench, tmp_path):
    file = tmp_path / "b.json"
    arguments = ["-n", "2", "-e", "16", *QUICK, "--json", "-J", str(file)]
    code, out, _ = bench("all_reduce", *arguments)
    result = json.loads(out)
    assert code == 0
    assert json.loads(file.read_text())["results"] == result["results"]
    assert {"version", "start_time", "args", "env", "config", "results"} <= set(result)
    assert result["out_of_bounds"] == {"count": 0, "okay": True}
    assert set(result["average_bus_bandwidth"]) == {"bandwidth", "okay"}
    assert result["config"]["minimum_bytes"] == 8
    assert result["config"]["step_factor"] == 2
    device = result["config"]["devices"][1]
    assert (device["rank"], device["pid"]) == (1, 101)
    for row in result["results"]:
        ours = [k for k in row if not k.endswith("_per_iter")]
        assert ours[:7] == KEYS
        for place in ("out_of_place", "in_place"):
            assert list(row[place]) == ["time", "alg_bw", "bus_bw", "nwrong"]
            single = row[f"{place}_per_iter"]
            assert single["min_us"] <= single["p50_us"] <= single["p99_us"]
            assert len(single["per_process_max_times_us"]) == 2
        assert row["experiment_name"] == "all_reduce"
        assert row["actual_iterations"] == 2


def test_csv_has_the_columns_of_the_table(bench):
    _, out, _ = bench("all_reduce", "-n", "2", "-e", "16", "--csv", *QUICK)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["size"] for row in rows] == ["8", "16"]
    assert rows[0]["out_of_place_nwrong"] == "0"
    assert rows[0]["algorithm"] == "numpy"


def test_peers_are_columns_with_a_ratio(bench):
    code, out, _ = bench("-n", "2", "-e", "16", "--vs", "gloo,mpich", *QUICK)
    assert code == 0
    head = next(line for line in out.splitlines() if line.startswith(HEAD))
    assert head.split()[17:] == ["gloo", "mpich", "ratio"]
    assert all(len(row) == 19 for row in rows_of(out))
    assert all(float(row[-1]) > 0 for row in rows_of(out))
    assert "# ratio to the best peer: median " in out
    assert [g.name for g in bench.groups] == ["unisono", "gloo", "mpich"]
    assert [g.closed for g in bench.groups] == ["gently"] * 3


def test_unsupported_peer_operations_are_noted(bench):
    lacks = {"lacks": ("broadcast",)}
    code, out, _ = bench("broadcast", "-e", "8", "--vs", "gloo", *QUICK, **lacks)
    assert code == 0
    assert rows_of(out)[0][5:13] == ["N/A"] * 8
    assert "# broadcast, gloo: not measured: BadArgument: not offered" in out


def test_ratio_is_the_middle_of_ratios_within_rounds():
    ours, slow, fast = (
        Timing([1.0, 4.0, 3.0]),
        Timing([9.0] * 3),
        Timing([2.0, 4.0, 12.0]),
    )
    row = BenchRow(Case("all_reduce", 2, 1), None, ours, {"a": slow, "b": fast})
    assert row.best_peer == "b"
    assert row.ratio == 0.5
    assert row.ratio_to("a") == pytest.approx(1 / 3)


def test_single_calls_are_as_slow_as_their_slowest_rank():
    result = per_iteration([[1e-6, 5e-6], [2e-6, 3e-6]])
    assert result["times_us"] == [2, 5]
    assert (result["min_us"], result["max_us"]) == pytest.approx((2, 5))
    assert result["p99_us"] == pytest.approx(5)


def test_all_algorithms_are_rows(bench):
    _, out, _ = bench("all_gather", "-n", "3", "-e", "8", "--algorithm", "all", *QUICK)
    names = [row[13] for row in rows_of(out)]
    assert "ring" in names
    assert "ring:both" in names
    assert len(names) == len(set(names)) > 5
    _, out, _ = bench("-n", "4", "-e", "8", "--algorithm", "ring:both,tree", *QUICK)
    assert [row[13] for row in rows_of(out)] == ["ring:both", "tree"]


def test_systems_alternate_and_each_round_begins_with_another(bench):
    order = []

    class Told(ThreadGroup):
        def ask(self, command):
            if command["do"] == "measure":
                order.append(self.name)
            return super().ask(command)

    from unisono.cli._bench.driver import BenchSettings, measure

    started = [Told(name, 1) for name in ("unisono", "a", "b")]
    measure(
        Case("send_recv", 1, 1), started, [""], BenchSettings(rounds=3, iterations=1)
    )
    assert order == ["unisono", "a", "b", "a", "b", "unisono", "b", "unisono", "a"]


def test_ctrl_c_keeps_finished_rows(bench, tmp_path):
    file = tmp_path / "b.json"
    arguments = ["-n", "2", "-e", "1K", *QUICK, "-J", str(file)]
    code, out, err = bench("all_reduce", *arguments, ends_after=4)
    assert code == 130
    assert err == ""
    assert [row[0] for row in rows_of(out)] == ["8", "16"]
    assert "# Out of bounds values : 0 OK" in out
    assert "# Collective test interrupted: all_reduce" in out
    result = json.loads(file.read_text())
    assert (result["interrupted"], len(result["results"])) == (True, 2)
    assert bench.groups[0].closed == "at once"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("all_redcue", "nearest: all_reduce"),
        ("all_reduce,sned_recv", "nearest: send_recv"),
        ("-b lots", "size 'lots'"),
        ("-b 64 -e 8", "sizes ascend"),
        ("-f 1", "at least 2"),
        ("-f 0", "at least 2"),
        ("-b 0", "stays 0"),
        ("-i 1 -e 1G", "10,000"),
        ("-n 0", "1 to 256"),
        ("-n 1000", "1 to 256"),
        ("-r 4", "ranks are 0..3"),
        ("-c 2", "0 or 1"),
        ("--rounds 0", "1 or more"),
        ("--iters 0", "1 or more"),
        ("-w -1", "0 or more"),
        ("-d float31", "nearest: float32"),
        ("-o smu", "nearest: sum"),
        ("-o band", "band has no meaning for float32"),
        ("--vs glo", "nearest: gloo"),
        ("--vs nccl", "needs --device cuda"),
        ("--ranks-as streams", "needs --device cuda"),
        ("--device gpu", "unknown device"),
        ("--algorithm rnig", "nearest: ring"),
        ("-e 1T", "take a smaller size"),
        ("--json --csv", "choose one"),
        ("-J /no/such/place.json", "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bench, command, message):
    code, _, err = bench(*command.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_missing_peer_names_the_command_that_makes_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_PEERS", str(tmp_path))
    assert main(["bench", "-n", "2", "-e", "8", "--vs", "openmpi"]) == 2
    _, err = capsys.readouterr()
    assert "make peers" in err
    assert err.count("\n") == 1


def test_plot_draws_or_says_what_it_needs(bench, tmp_path):
    file = tmp_path / "b.png"
    code, _, err = bench("-n", "2", "-e", "16", *QUICK, "--plot", str(file))
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        assert (code, "unisono[viz]" in err) == (2, True)
    else:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_numbers_keep_their_width():
    assert number(1.234, 7) == "1.23"
    assert number(123456.7, 7) == "123457"
    assert number(12345.67, 7) == "12345.7"
    assert number(123456789.0, 7) == "1.2e+08"


def test_copies_are_measured_as_lower_bound_from_one_mebibyte(bench):
    _, out, _ = bench("-n", "2", "-b", "512K", "-e", "1M", *QUICK)
    small, large = rows_of(out)
    assert small[15] == "-"
    assert large[15].endswith("%")
    assert bench.groups[0].asked.count("copy") == 2


@pytest.fixture
def running():
    """`unisono bench` as a process that is measuring, and the pids of its ranks."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "unisono", "bench", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        pids = []
        for line in process.stdout:
            if line.startswith("#  Rank"):
                pids.append(int(line.split()[6]))
            if line[:1] != "#":
                return process, pids
        raise AssertionError(process.stderr.read())

    yield start
    for process in started:
        process.kill()
        process.communicate()


LONG = ("-n", "2", "-b", "1K", "-e", "4K", "-i", "8", "--rounds", "3")


def test_processes_measure_every_collective(capsys):
    many = ["-n", "3", "-b", "300", "-e", "300K", "-f", "1000", *QUICK]
    assert main(["bench", "all", *many, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["errors"] == []
    assert result["out_of_bounds"]["count"] == 0
    assert {row["collective"] for row in result["results"]} == set(cases.COLLECTIVES)
    assert gone([device["pid"] for device in result["config"]["devices"]])
    for row in result["results"]:
        assert row["algorithm"] or row["collective"] == "send_recv"


def test_processes_measure_shared_buffers_and_named_algorithms(capsys):
    some = ["-n", "2", "-e", "32K", "-f", "4096", "--shared", *QUICK]
    assert main(["bench", *some, "--algorithm", "ring,direct", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["algorithm"] for r in result["results"]] == ["ring", "direct"] * 2


@pytest.mark.sweep
def test_ctrl_c_ends_the_processes_and_prints_the_rest(running, tmp_path):
    file = tmp_path / "b.json"
    process, pids = running(*LONG, "-J", str(file))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "# Collective test interrupted" in out
    assert json.loads(file.read_text())["interrupted"] is True
    assert len(pids) == 2
    assert gone(pids)


@pytest.mark.sweep
def test_ranks_end_when_the_driver_is_killed(running):
    process, pids = running(*LONG)
    process.kill()
    assert gone(pids)


@pytest.mark.sweep
def test_killed_rank_is_a_one_line_error(running):
    process, pids = running(*LONG)
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("unisono: bench: unisono")
    assert err.count("\n") == 1
    assert gone(pids)
