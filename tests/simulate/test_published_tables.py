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
)
from benchmarks.published.judging import (
    Judged,
    judged_collectives,
    judged_lines,
    judged_training,
    summary,
    usual,
)
from benchmarks.published.tables import (
    PublishedCall,
    by_source,
    calls,
    fabric,
    halves,
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
    assert len(by_source(calls())) == 22
    assert len(calls()) == 350
    assert len(steps()) == 227
    assert sum(not row.why_not for row in steps()) == 217
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
        some = [c for name, c in found.items() if (fabric(name).hosts > 1) is several]
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


def test_table_of_errors_names_sources_and_aims():
    one = Judged("aws-p5-1", 3, (0.1, 0.2), (0.3,))
    text = "\n".join(table.lines("collectives", [one]))
    assert "| 3 | 2 | 15.0% | 19.0% | 30.0% | 30.0% |" in text
    assert "| asked for | | | 10% | 25% |" in text
    page = table.PAGE.read_text("utf-8")
    for name in (*sources()["collectives"], *sources()["training"]):
        assert f"[{name}]" in page
