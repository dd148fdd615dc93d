"""The shared-memory protocol, explored exhaustively: docs/protocol.md.

The same program runs the product's own sources under an explorer of all executions that
the memory model of C++ allows. It must find nothing in them, and every planted fault.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from planted_faults import FAULTS, Fault
from protocol_model import build, explore, operation_at

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler"),
    pytest.mark.timeout(1800),  # it computes, and the machine may be busy
    pytest.mark.sweep,  # to compile it takes a minute
]

WITHOUT_TIMEOUTS = {"newest": 1, "timeouts": 0}
# What is explored to the end, and with what options.
SOUND: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("arrival", 2, {}),
    ("arrival", 2, {"retries": 1}),
    ("windows", 2, {}),
    ("windows, one way", 2, {}),
    ("windows, then others", 2, {}),
    ("exposed", 2, {}),
    ("exposed, in pieces", 2, {}),
    ("one aborts", 2, {}),
    ("several abort", 2, {}),
    ("one aborts, exposed", 2, {}),
    ("several abort, exposed", 2, {}),
    ("one aborts, read by others", 2, {}),
    ("one has closed", 2, {}),
    ("one aborts, one has closed", 2, {}),
    ("mismatch", 2, {}),
    ("guard", 2, {}),
    ("guard", 3, {}),
    ("sleeping", 2, {"retries": 2}),
    ("sleeping", 2, WITHOUT_TIMEOUTS),
    ("driven", 2, WITHOUT_TIMEOUTS),
    ("messages", 2, {"retries": 2}),
    ("long message", 2, {"retries": 3}),
    ("message aborted", 2, {"retries": 2}),
    ("message aborted after another", 2, {"retries": 2}),
)
LARGE: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("arrival", 3, {}),
    ("windows, one way", 3, {}),
    ("exposed, in pieces", 3, {}),
    ("one aborts", 3, {}),
    ("several abort", 3, {}),
    ("one has closed", 3, {}),
    ("one aborts, one has closed", 3, {}),
    ("mismatch", 3, {}),
    ("sleeping", 3, WITHOUT_TIMEOUTS),
    ("exposed", 2, {"retries": 1}),
)
# Orders that no scenario needs: threads find a segment under a lock. Between processes
# it comes by a socket, which orders as well and is not modelled.
UNNEEDED = (".outbox.load(", ".outbox.store(")
# What two threads may read under C++; anything else is a mistake of the explorer.
LITMUS = {
    "store buffering, release": "00 01 10 11",
    "store buffering, seq_cst": "01 10 11",
    "store buffering, fences": "01 10 11",
    "store and look, seq_cst": "01 10 11",
    "store and look, acq_rel": "00 01 10 11",
    "message, relaxed": "00 01 10 11",
    "message, release": "00 01 11",
    "message, release only": "00 01 10 11",
    "message, fences": "00 01 11",
    "coherence": "00 01 02 11 12 22",
    "release sequence, by adding": "00 10 21",
    "waiting": "7",
}
ALL_OF_FOUR = {f"{i:04b}" for i in range(16)}


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"))


def _sound(program: Path, scenario: str, number: int, **options: Any) -> None:
    found = explore(program, scenario, number, **options)
    assert not found.error, "\n".join([found.error, *found.trace])
    assert found.all
    assert found.complete > 0, "no execution got to its end: nothing is shown"


@pytest.mark.parametrize("name", LITMUS)
def test_outcomes_are_those_of_the_memory_model(program: Path, name: str) -> None:
    assert explore(program, name).outcomes == LITMUS[name].split()


def test_readers_may_disagree_on_order_of_writers_unless_all_is_seq_cst(
    program: Path,
) -> None:
    assert set(explore(program, "independent, acquire").outcomes) == ALL_OF_FOUR
    seen = explore(program, "independent, seq_cst").outcomes
    assert set(seen) == ALL_OF_FOUR - {"1010"}


def test_races_and_endless_waits_are_found(program: Path) -> None:
    race = explore(program, "release sequence, by storing")
    assert "at the same time" in race.error
    assert "for ever" in explore(program, "waiting in vain").error


def _same_outcomes(program: Path, seeds: range) -> None:
    for seed in seeds:
        for newest in (0, 1):
            reduced = explore(program, "random", seed, newest=newest)
            full = explore(program, "random", seed, newest=newest, reduce=0)
            assert reduced.outcomes == full.outcomes, f"seed {seed}"


def test_reduced_search_finds_what_full_search_finds(program: Path) -> None:
    _same_outcomes(program, range(12))


@pytest.mark.sweep
def test_reduced_search_finds_what_full_search_finds_in_many_programs(
    program: Path,
) -> None:
    _same_outcomes(program, range(12, 400))


@pytest.mark.parametrize(("scenario", "ranks", "options"), SOUND)
def test_protocol_holds(
    program: Path, scenario: str, ranks: int, options: dict[str, int]
) -> None:
    _sound(program, scenario, ranks, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(("scenario", "ranks", "options"), LARGE)
def test_protocol_holds_for_more_scenarios(
    program: Path, scenario: str, ranks: int, options: dict[str, int]
) -> None:
    _sound(program, scenario, ranks, **options)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found(program: Path, fault: Fault) -> None:
    found = explore(program, fault.scenario, fault=fault.name, **fault.options)
    assert found.error


@pytest.mark.sweep
def test_every_order_of_the_protocol_is_needed(program: Path) -> None:
    """For one that is not, to leave it out is a fault that no scenario finds."""
    reached: dict[int, list[tuple[str, int, dict[str, int]]]] = defaultdict(list)
    for scenario in SOUND:
        name, ranks, options = scenario
        for site in explore(program, name, ranks, **options).ordered:
            reached[site].append(scenario)
    weakened = {site: operation_at(program, site) for site in reached}
    wanted = {site: text for site, text in weakened.items() if text is not None}
    assert len(set(wanted.values())) >= 20, "operations are no longer recognised"
    not_found = {
        text
        for site, text in wanted.items()
        if not any(word in text for word in UNNEEDED)
        and not any(
            explore(program, name, ranks, weakened=site, **options).error
            for name, ranks, options in reached[site]
        )
    }
    assert not not_found


def test_missed_wake_costs_a_sleep_and_nothing_else(program: Path) -> None:
    # The look at who sleeps is not ordered after the store: so it is by design.
    found = explore(program, "sleeping", retries=2)
    assert found.timeouts > 0
    assert not found.error
