"""From candidates to a table: who is raced, who wins, and that all ranks agree."""

import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono
from unisono.errors import BadArgument
from unisono.runtime.plan import tuned
from unisono.runtime.plan.select import choose
from unisono.runtime.plan.tuned import Tuned, TunedCollective, TunedRow, TunedWorld
from unisono.runtime.world import tuned_agreement
from unisono.schedule.collective import COLLECTIVES
from unisono.testing import world
from unisono.tune import Effort, LinkCosts, Tuner, candidates, fit, save, tune
from unisono.tune.files import destination
from unisono.tune.race import (
    MOST_RACED,
    NEAR,
    WORTH_A_TRY,
    beats,
    decided,
    nearest,
    promising,
    winner,
)

pytestmark = pytest.mark.timeout(120)

BRIEF = Effort(
    ("all_reduce", "barrier"), (8, 4096), (8, 4096, 65536), batch_s=1e-4, rounds=2
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", str(tmp_path / "deep" / "table.json"))
    return tmp_path / "deep" / "table.json"


def line(latency, byte):
    return fit([8, 1 << 20], [latency + byte * s for s in (8, 1 << 20)])


@pytest.mark.cases(2)
@pytest.mark.quick(hosts=[(0,) * 4, (0, 0, 1, 1)])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "hosts", [(0,) * 2, (0,) * 4, (0,) * 13, (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2)]
)
def test_every_candidate_is_right_and_leaves_the_same_bits(collective, hosts):
    names = candidates(collective, hosts)
    usual = choose(collective, 8, len(hosts), named=None, reproducible=False)
    assert usual.algorithm in names
    assert len(set(names)) == len(names)
    for name in names:
        made = unisono.schedule(collective, name, len(hosts))
        made.verify()
        if made.collective.reduces:
            assert made.consistency().same_bits_on_all_ranks


def test_candidates_vary_in_segments_radix_and_levels():
    names = candidates("all_reduce", (0,) * 6 + (1,) * 6)
    assert "tree:radix=8" in names
    assert "chain:segments=8" in names
    assert "hierarchical:levels=6x2,by=direct/direct,segments=4" in names
    on_one = candidates("all_reduce", (0,) * 12)
    assert any(name.startswith("hierarchical:levels=3x4") for name in on_one)
    assert any(name.startswith("hierarchical:levels=4x3") for name in on_one)


def test_predicted_cost_matches_the_hand_calculation():
    """Ring on four ranks of one host with a core each: 6 steps of a quarter."""
    costs = LinkCosts(line(2e-6, 1e-9), None, added_byte=3e-9, cores=4)
    took = costs.seconds("all_reduce", "ring", (0, 0, 0, 0), 4000)
    assert took == pytest.approx(6 * (2e-6 + 1e-6) + 3 * 3e-6)
    few = LinkCosts(line(2e-6, 1e-9), None, added_byte=3e-9, cores=2)
    took = few.seconds("all_reduce", "ring", (0, 0, 0, 0), 4000)
    assert took == pytest.approx(6 * (2e-6 + 2e-6) + 3 * 6e-6)


def test_predicted_cost_across_hosts_is_the_slower_of_link_and_ranks():
    """Direct all_gather on three hosts: two shares enter each, from two peers."""
    costs = LinkCosts(None, line(5e-6, 1e-9), message=1e-6)
    took = costs.seconds("all_gather", "direct", (0, 1, 2), 3000)
    assert took == pytest.approx(5e-6 + 2e-6 + 1e-6)
    slower = LinkCosts(line(1e-3, 0.0), line(5e-6, 1e-9), message=1e-6)
    took = slower.seconds("all_gather", "direct", (0, 1, 2), 3000)
    assert took == pytest.approx(1e-3)


@given(st.dictionaries(st.text("abcdefgh", min_size=1), st.floats(1e-6, 1.0)))
def test_candidates_near_the_best_are_raced(times):
    found = nearest(times, {})
    best = min(times.values(), default=0.0)
    assert all(times[name] <= NEAR * best for name in found)
    near = [name for name in times if times[name] <= NEAR * best]
    assert len(found) == min(len(near), MOST_RACED)


def test_predictions_are_corrected_by_measurements():
    result = {"a": 1.0, "b": 1.5, "c": 4.0, "d": 1.2}
    assert nearest(result, {}) == ["a", "d"]
    assert nearest(result, {}, refused={"a"}) == ["d", "b"]
    # Both took three times as long as was thought: then so would the others.
    assert nearest(result, {"a": 3.0, "d": 3.6}) == []
    # Those raced were worse than thought, some by far: another comes near.
    assert nearest(result | {"e": 2.0}, {"a": 2.2, "d": 1.2, "e": 2.0}) == ["b"]


def test_fastest_wins_unless_the_default_is_as_fast():
    result = dict.fromkeys("abc", 1.0)
    clear = {"a": [2.0, 2.1, 2.2], "b": [1.0, 1.1, 1.2], "c": [3.0, 3.0, 3.0]}
    found = winner(64, result, clear, "a")
    assert (found.algorithm, found.runner_up) == ("b", "a")
    assert (found.measured, found.runner_up_measured) == (1.1, 2.1)
    close = {"a": [1.11, 1.12, 1.13], "b": [1.0, 1.1, 1.2]}
    assert winner(64, result, close, "a").algorithm == "a"
    scattered = {"a": [1.5, 1.5, 1.5], "b": [1.0, 1.1, 9.0]}
    assert winner(64, result, scattered, "a").algorithm == "a"


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1)])
def test_tuning_a_world_makes_a_table_that_it_then_uses(file, hosts):
    with world(3, hosts=hosts if any(hosts) else ()) as ranks:
        found = ranks.run(lambda comm: tune(comm, BRIEF))
        again = ranks.run(tuned_agreement.agree)
    first = found[0]
    assert all(w.choices == first.choices for w in found)
    assert tuned.load(file).worlds == (first,)
    assert [p.collective for p in first.choices] == ["all_reduce", "barrier"]
    kinds = {link.kind for link in first.links}
    assert kinds == ({"inside", "across"} if any(hosts) else {"inside"})
    for part in first.choices:
        for row in part.rows:
            assert row.measured > 0
            assert row.algorithm != row.runner_up
    for table in again:
        how = {"named": None, "reproducible": False, "hosts": hosts, "itemsize": 4}
        assert choose("all_reduce", 4096, 3, tuned=table, **how).by == "table"


def test_ranks_on_hosts_of_their_own_have_links_across_only(tmp_path):
    with world(2, hosts=(0, 1)) as ranks:
        fits = ranks.run(lambda comm: Tuner(comm, BRIEF).links())
    assert [set(f) for f in fits] == [{"across"}] * 2


def a_world(n):
    row = TunedRow(8, 8, "ring", 1e-6, 1e-6)
    return TunedWorld(
        n, f"0x{n}", (tuned.machine(),), (TunedCollective("all_reduce", 4, (row,)),)
    )


def test_table_is_private_and_keeps_other_worlds(file):
    assert save(a_world(3)) == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    save(a_world(2))
    save(msgspec.structs.replace(a_world(3), when="later"))
    found = tuned.load(file)
    assert [(w.n, w.when) for w in found.worlds] == [(2, ""), (3, "later")]
    assert [p.name for p in file.parent.iterdir()] == ["table.json"]


def test_table_of_another_version_is_replaced(file):
    save(a_world(3))
    file.write_text(file.read_text().replace(unisono.__version__, "0.0.1"))
    save(a_world(2))
    assert [w.n for w in tuned.load(file).worlds] == [2]


def test_file_that_is_not_a_table_is_not_overwritten(file):
    file.parent.mkdir()
    file.write_text("dear diary")
    file.chmod(0o600)
    for refused in (destination, lambda: save(a_world(2))):
        with pytest.raises(BadArgument, match="not a tuned table"):
            refused()
    assert file.read_text() == "dear diary"


def test_damaged_default_table_is_replaced(tmp_path, monkeypatch):
    monkeypatch.delenv("UNISONO_TUNED", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    where = tuned.default_path()
    where.parent.mkdir(parents=True)
    where.write_text("{")
    save(a_world(2))
    assert [w.n for w in Tuned(tuned.load(where).worlds).worlds] == [2]


def test_table_that_cannot_be_written_is_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(BadArgument, match="cannot be written") as error:
        save(a_world(2), tmp_path / "file" / "table.json")
    kept = Path(str(error.value).rpartition("the result is in ")[2])
    assert [w.n for w in tuned.read(kept).worlds] == [2]


def test_invalid_tuning_requests_are_refused():
    with (
        world(1) as ranks,
        pytest.raises(BadArgument, match="expected 2 ranks or more"),
    ):
        ranks.run(Tuner)
    for wrong in (
        {"collectives": ("all_redcue",)},
        {"dtype": "float31"},
        {"sizes": (8, 8)},
        {"sizes": ()},
    ):
        with pytest.raises(BadArgument):
            Effort(**wrong)


def test_race_compares_rounds_not_means():
    slow_turns = [1.0, 9.0, 1.0, 9.0, 1.0, 9.0]
    assert beats(slow_turns, [1.1 * t for t in slow_turns])
    assert not beats(slow_turns, [1.01 * t for t in slow_turns])
    assert not beats(slow_turns, slow_turns)
    # Lucky twice by far, beaten four times by little.
    assert not beats([1.0] * 6, [9.0, 9.0, 0.9, 0.9, 0.9, 0.9])


def test_winner_must_win_a_second_race():
    row = TunedRow(64, 64, "ring", 1e-6, 1e-6, "direct", 2e-6, 2e-6)
    result = {"ring": 1e-6, "direct": 2e-6}
    kept = decided(row, "direct", result, {"ring": [1.0] * 4, "direct": [2.0] * 4})
    assert (kept.algorithm, kept.measured, kept.runner_up) == ("ring", 1.0, "direct")
    lost = decided(row, "direct", result, {"ring": [2.0] * 4, "direct": [2.0] * 4})
    assert (lost.algorithm, lost.predicted, lost.runner_up) == ("direct", 2e-6, "ring")


def test_promising_are_candidates_predicted_near_the_best():
    result = {"a": 1.0, "b": 0.99 * WORTH_A_TRY, "c": 1.01 * WORTH_A_TRY}
    assert promising(result) == ["a", "b"]
    assert promising({}) == []
