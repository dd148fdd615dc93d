"""The table of published measurements: complete, split alike, and judged by it."""

import math
from dataclasses import replace

import pytest
from benchmarks.published import __main__ as table
from benchmarks.published.fitting import (
    BEFORE,
    calibrated,
    predicted,
    search,
    tokens_per_second,
    topology,
)
from benchmarks.published.judging import (
    Judged,
    judged_collectives,
    judged_lines,
    judged_training,
    kind_of,
    summary,
    usual,
)
from benchmarks.published.tables import (
    PublishedCall,
    _rate,
    by_source,
    calls,
    fabric,
    halves,
    judged_alone,
    shape,
    sources,
    steps,
)

from unisono.simulate.engines import Calibration, modelled
from unisono.simulate.kernels import find_device


def test_every_row_has_a_source_with_an_address():
    about = sources()
    assert {row.source for row in calls()} == set(about["collectives"])
    assert {row.source for row in steps()} == set(about["training"])
    for kind in ("collectives", "training"):
        for one in about[kind].values():
            assert one["url"].startswith("https://")
            assert one["about"]


def test_table_is_as_large_as_it_says():
    assert len(by_source(calls())) == 32
    assert len(calls()) == 496
    assert len(steps()) == 313
    assert sum(not row.why_not for row in steps()) == 306
    gpus = " ".join(one["about"] for one in sources()["collectives"].values())
    for gpu in ("A100", "H100", "H200", "B200", "GB200", "MI300X"):
        assert gpu in gpus


def test_bandwidths_become_times():
    row = {r.nbytes: r for r in by_source(calls())["azure-nd-h100-v5"]}[1 << 33]
    assert row.seconds == pytest.approx((1 << 33) * 1.75 / 478.87e9)
    assert all(0 < row.seconds < 10 for row in calls())
    assert fabric("gcp-a3-mega-2").across == 200e9


def test_halves_are_every_second_row_and_few_are_all_judged():
    assert halves([1, 2, 3, 4, 5]) == ([1, 3, 5], [2, 4])
    assert halves([1, 2]) == ([], [1, 2])
    first, second = halves(calls())
    assert not {id(r) for r in first} & {id(r) for r in second}
    assert halves(calls()) == (first, second)


def test_summary_is_median_and_ninth_decile():
    assert summary([0.1, 0.3, 0.2]) == pytest.approx((0.2, 0.28))
    assert all(math.isnan(x) for x in summary([]))
    constants = [Calibration(latency=x, across=0.96) for x in (2, 1, 4)]
    assert usual(constants).latency == 3  # what nothing has moved does not count
    assert usual(constants).across == 0.96


def test_search_finds_what_times_were_made_with():
    def cost(at):
        return abs(math.log(at[0] / 3)) + abs(at[1] - 0.5)

    found = search(cost, [1, 1])
    assert found == pytest.approx([3, 0.5], rel=0.05)


def test_calibration_is_found_again():
    true = Calibration(2.0, 0.7, 0.96, 0.6, 8.0, 1.0)
    rows = [
        PublishedCall("azure-nd-h100-v5", "all_reduce", 1 << k, 0.0)
        for k in range(10, 34)
    ]
    made = [replace(row, seconds=predicted(row, true)) for row in rows]
    found = calibrated(made[::2])
    for row in made[1::2]:
        assert predicted(row, found) == pytest.approx(row.seconds, rel=0.08)
    assert predicted(made[0], BEFORE) != pytest.approx(made[0].seconds, rel=0.2)


def test_half_of_a_cluster_tells_the_other_half():
    first, second = halves(by_source(calls())["aws-p5-1"])
    given = calibrated(first)
    middle, most = summary(abs(predicted(r, given) / r.seconds - 1) for r in second)
    assert middle <= 0.10
    assert most <= 0.25


def test_cluster_whose_network_adds_up_is_judged_by_that_path():
    (name,) = [one for one in by_source(calls()) if fabric(one).network_sums]
    rows = by_source(calls())[name]
    given = calibrated(halves(rows)[0])
    for row in rows:
        found = modelled("nccl").time("all_reduce", fabric(name), row.nbytes, given)
        assert found.algorithm == "switches"
        assert found.seconds == pytest.approx(row.seconds, rel=0.03)


def test_calls_are_predicted_by_the_library_that_made_them():
    rows = by_source(calls())["gloo-40gbe-4"]
    assert kind_of("gloo-40gbe-4") == ("gloo", True)
    assert kind_of("aws-p5-1") == ("nccl", False)
    first, second = halves(rows)
    given = calibrated(first)
    middle, most = summary(abs(predicted(r, given) / r.seconds - 1) for r in second)
    assert middle <= 0.05
    assert most <= 0.25
    installed = modelled("gloo").latency[True]
    assert installed == pytest.approx(given.latency, rel=0.05)


def test_mpi_has_the_latency_and_the_eager_rate_of_the_fit():
    names = [name for name in by_source(calls()) if kind_of(name) == ("mpi", True)]
    assert names == [f"lassen-mpi-{n}" for n in (4, 8, 16, 32, 64, 128)]
    found = []
    for name in names:
        first, second = halves(by_source(calls())[name])
        found.append(calibrated(first))
        errors = [abs(predicted(r, found[-1]) / r.seconds - 1) for r in second]
        assert summary(errors)[0] <= 0.10
    fitted, installed = usual(found), modelled("mpi")
    assert installed.latency[True] == pytest.approx(fitted.latency, rel=0.05)
    assert installed.small[True] == pytest.approx(fitted.small, rel=0.05)


def test_xla_has_the_latency_of_the_fit_and_tells_a_larger_slice():
    names = [name for name in by_source(calls()) if kind_of(name) == ("xla", False)]
    assert names[:2] == [f"tpu-recipes-tpu7x-2x2x{n}" for n in (1, 2)]
    found = [calibrated(halves(by_source(calls())[name])[0]) for name in names[:2]]
    (row,) = by_source(calls())["tpu-recipes-v6e-256"]
    assert predicted(row, usual(found)) == pytest.approx(row.seconds, rel=0.20)
    assert modelled("xla").latency[False] == pytest.approx(
        usual(found).latency, rel=0.05
    )


@pytest.mark.sweep
def test_lines_through_one_half_tell_the_other():
    errors = judged_lines()
    assert len(errors) > 100
    assert summary(errors)[0] <= 0.10


@pytest.mark.sweep
def test_collectives_are_within_what_is_asked_for():
    judged, found = judged_collectives()
    middle, most = summary(e for one in judged for e in one.errors)
    assert middle <= 0.10
    assert most <= 0.25
    for several in (False, True):
        some = [c for name, c in found.items() if kind_of(name) == ("nccl", several)]
        fitted = usual(some)
        for constant in ("latency", "fill", "channels", "small"):
            installed = getattr(modelled("nccl"), constant)[several]
            assert installed == pytest.approx(getattr(fitted, constant), rel=0.05)


@pytest.mark.sweep
def test_training_steps_are_within_what_is_asked_for():
    judged, found = judged_training()
    middle, most = summary(e for one in judged for e in one.errors)
    assert middle <= 0.08
    assert most <= 0.20
    for name, device in found.items():
        for constant in ("matmul", "attention", "elementwise", "contention"):
            installed = getattr(find_device(name), constant)
            assert installed == pytest.approx(getattr(device, constant), rel=0.05)


@pytest.mark.parametrize("name", ["llm-foundry-a100-80gb", "llm-foundry-h100-80gb"])
def test_steps_are_near_with_the_constants_that_are_installed(name):
    rows = [row for row in by_source(steps())[name] if not row.why_not][1::6]
    errors = [
        abs(tokens_per_second(r, find_device(r.device)) / r.tokens_per_second - 1)
        for r in rows
    ]
    middle, most = summary(errors)
    assert middle <= 0.08
    assert most <= 0.20


@pytest.mark.parametrize(
    ("source", "most"), [("megatron-2021", 0.18), ("megatron-2022", 0.11)]
)
def test_megatrons_steps_are_near_though_nothing_is_fitted_to_them(source, most):
    rows = [row for row in by_source(steps())[source] if row.ranks <= 1024]
    assert judged_alone(source)
    assert {row.pp for row in rows} >= {1, 8}
    for row in rows[::2]:
        found = tokens_per_second(row, find_device("a100"))
        assert found == pytest.approx(row.tokens_per_second, rel=most)


@pytest.mark.parametrize(
    ("source", "size", "most"),
    [
        ("maxtext-v4", 22e9, 0.05),
        ("maxtext-v5e", 16e9, 0.05),
        ("maxtext-v5p", 32e9, 0.05),
        ("tpu-recipes-v6e", 8e9, 0.05),
    ],
)
def test_slices_of_tpus_are_near(source, size, most):
    rows = by_source(steps())[source]
    row = rows[1]  # of the judged half
    assert shape(row.model, row.sequence).parameters == pytest.approx(size, rel=0.05)
    spelled = topology(row)
    assert spelled.startswith(f"cloud:{row.ranks // row.per_host}x{row.per_host},")
    found = tokens_per_second(row, find_device(row.device))
    assert found == pytest.approx(row.tokens_per_second, rel=most)


def test_maxtext_counts_attention_with_its_mask():
    row = by_source(steps())["maxtext-v5e"][0]
    # 6 operations a parameter, and half of 12 a head, feature and pair of tokens
    weights = 32 * (4 * 5120 * 8192 + 2 * 5120 * 32768) + 5120 * 32768
    each = 6 * weights + 6 * 32 * 8192 * 2048
    assert row.tokens_per_second == pytest.approx(120e12 * 256 / each, rel=1e-3)


def test_gpt3_as_megatron_ran_it_is_in_the_table():
    rows = by_source(steps())["megatron-2021"]
    (row,) = [r for r in rows if r.model == "megatron-174.6b" and r.ranks == 1024]
    assert (row.tp, row.pp, row.dp, row.sequences) == (8, 8, 16, 1536)
    assert (row.recompute, row.attention, row.batch) == ("full", "plain", 0)
    # 96 B s l h^2 (1 + s/6h + V/16lh) operations at 140 Tflop/s a GPU
    operations = 96 * 2048 * 1536 * 96 * 12288**2
    operations *= 1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)
    seconds = operations / (1024 * 140e12)
    assert 1536 * 2048 / row.tokens_per_second == pytest.approx(seconds, rel=1e-3)


def test_seconds_and_unknown_units():
    row = by_source(steps())["megatron-2022"][0]
    assert row.tokens_per_second == pytest.approx(4 * 2048 / 1.42)
    with pytest.raises(ValueError, match="unit km: expected"):
        _rate(row, 1.0, "km")


def test_table_of_errors_names_sources_and_aims():
    one = Judged("aws-p5-1", 3, (0.1, 0.2), (0.3,))
    text = "\n".join(table.lines("collectives", [one]))
    assert "| 3 | 2 | 15.0% | 19.0% | 30.0% | 30.0% |" in text
    assert "| asked for | | | 10% | 25% |" in text
    page = table.PAGE.read_text("utf-8")
    for name in (*sources()["collectives"], *sources()["training"]):
        assert f"[{name}]" in page
