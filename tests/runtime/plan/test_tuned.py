"""Tables of what is quick: who may use them, what is refused, and that all agree."""

import logging
import os
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.errors import BadArgument
from unisono.runtime.plan import tuned
from unisono.runtime.plan.select import choose
from unisono.runtime.plan.tuned import (
    Tuned,
    TunedCollective,
    TunedRow,
    TunedTable,
    TunedWorld,
)
from unisono.runtime.world import tuned_agreement
from unisono.testing import world

pytestmark = pytest.mark.timeout(60)


def row(nbytes, upto, algorithm, **more):
    return TunedRow(nbytes, upto, algorithm, 1e-5, 2e-5, "direct", 3e-5, 4e-5, **more)


PARTS = (
    TunedCollective(
        "all_reduce", 4, (row(8, 90, "recursive_doubling"), row(1024, 1024, "ring"))
    ),
    TunedCollective("all_gather", 0, (row(8, 8, "ring"),)),
)


def a_world(n=2, placement="0x2", machines=None, parts=PARTS):
    return TunedWorld(n, placement, machines or (tuned.machine(),), parts)


def write(path, *worlds, version=unisono.__version__, machine=None):
    table = TunedTable(version, machine or tuned.machine(), worlds or (a_world(),))
    path.write_bytes(msgspec.json.encode(table))
    path.chmod(0o600)
    return path


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", str(tmp_path / "table.json"))
    tuned.warn_unused.cache_clear()
    return tmp_path / "table.json"


def chosen(table, nbytes=8, itemsize=4, collective="all_reduce", n=2, **more):
    given_ = {"named": None, "reproducible": False, **more}
    return choose(collective, nbytes, n, tuned=table, itemsize=itemsize, **given_)


@pytest.mark.parametrize(
    ("nbytes", "algorithm"),
    [
        *((0, "recursive_doubling"), (8, "recursive_doubling")),
        *((90, "recursive_doubling"), (91, "ring"), (1024, "ring"), (1 << 40, "ring")),
    ],
)
def test_nearest_size_that_was_measured_decides(nbytes, algorithm):
    found = chosen(Tuned([a_world()]), nbytes)
    assert found.algorithm == algorithm
    assert found.by == "table"
    assert found.row.measured == 2e-5
    assert (found.predicted, found.runner_up_predicted) == (1e-5, 3e-5)
    assert found.runner_up == "direct"


def test_calls_not_in_the_table_are_chosen_by_rules():
    table = Tuned([a_world()])
    for same in (
        {"collective": "broadcast"},
        {"itemsize": 8},
        {"n": 3},
        {"hosts": (0, 1)},
        {"reproducible": True},
    ):
        assert chosen(table, **same) == chosen(None, **same)
        assert chosen(table, **same).by != "table"


def test_itemsize_is_ignored_without_reduction():
    for itemsize in (1, 2, 8):
        found = chosen(Tuned([a_world()]), 8, itemsize, collective="all_gather")
        assert found.by == "table"


def test_named_algorithm_overrides_the_table(monkeypatch):
    table = Tuned([a_world()])
    assert chosen(table, named="tree").by == "caller"
    monkeypatch.setenv("UNISONO_ALGORITHM", "tree")
    assert chosen(table).by == "variable"


@settings(max_examples=50)
@given(
    nbytes=st.integers(0, 1 << 30),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    hosts=st.lists(st.integers(0, 2), min_size=2, max_size=4),
    names=st.permutations([5, 6, 7]),
)
def test_choice_depends_only_on_what_all_ranks_know(nbytes, itemsize, hosts, names):
    """Copies of the table, and other names of the hosts, make no difference."""
    place = tuned.placement_of(len(hosts), hosts)
    first = Tuned([a_world(len(hosts), place)])
    result = msgspec.msgpack.encode(first.worlds)
    other = Tuned(msgspec.msgpack.decode(result, type=tuple[TunedWorld, ...]))
    options = {"n": len(hosts)}
    one = chosen(first, nbytes, itemsize, hosts=tuple(hosts), **options)
    two = chosen(
        other, nbytes, itemsize, hosts=tuple(names[h] for h in hosts), **options
    )
    assert one == two


def test_table_round_trip(file):
    write(file)
    assert tuned.load(file).worlds == (a_world(),)
    assert tuned.tuned_here().worlds == (a_world(),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a tuned table"),
        ("[]", "not a tuned table"),
        ('{"unisono": 3}', "not a tuned table"),
        ('{"unisono":"1","machine":"m","worlds":[],"more":1}', "not a tuned table"),
    ],
)
def test_invalid_files_are_refused(file, text, message):
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(BadArgument, match=message):
        tuned.read(file)


def parts(algorithm="ring", collective="all_reduce", ends=(8,), **more):
    return (
        TunedCollective(
            collective, 4, tuple(row(8, e, algorithm, **more) for e in ends)
        ),
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (a_world(parts=parts("rong")), "nearest"),
        (a_world(parts=parts("evil.py")), "installed"),
        (a_world(parts=parts("ring:radix=3")), "ring"),
        (a_world(parts=parts("hierarchical:by=x.py/ring")), "installed"),
        (a_world(parts=parts(collective="all_redcue")), "no collective"),
        (a_world(parts=parts(ends=(9, 8))), "do not ascend"),
        (a_world(parts=parts(ends=(8, 8))), "do not ascend"),
        (a_world(parts=parts(ends=())), "do not ascend"),
        (a_world(3, "0x2"), "places 2 ranks"),
        (a_world(2, "home"), "expected the host"),
    ],
)
def test_invalid_tables_are_refused(file, made, message):
    write(file, made)
    with pytest.raises(BadArgument, match=message):
        tuned.read(file)


def test_table_that_others_can_write_is_not_read(file):
    write(file).chmod(0o620)
    with pytest.raises(BadArgument, match="chmod 600"):
        tuned.read(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(BadArgument):
        tuned.read(file)


def test_tables_of_other_machines_or_versions_are_refused(file):
    write(file, version="0.0.1")
    with pytest.raises(BadArgument, match=r"made by unisono 0\.0\.1"):
        tuned.load(file)
    write(file, machine="an abacus")
    with pytest.raises(BadArgument, match=r"another machine \(an abacus\)"):
        tuned.load(file)


def test_variable_of_zero_means_no_table(monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", "0")
    assert tuned.path() is None
    assert not tuned.is_there()
    assert tuned.tuned_here() is None


def test_without_a_folder_no_file_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv("UNISONO_TUNED", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert not tuned.is_there()
    assert tuned.default_path().parent == tmp_path / "unisono" / "tuned"


def agreed(n, hosts=()):
    with world(n, hosts=hosts) as ranks:
        return ranks.run(tuned_agreement.agree)


def test_all_ranks_hold_the_table_of_rank_0(file):
    write(file, a_world(3, "0x3"), a_world(2, "0x2"), a_world(9, "0x9"))
    found = agreed(3)
    assert [w.n for w in found[0].worlds] == [3, 2]  # no group has nine
    assert all(t.worlds == found[0].worlds for t in found)
    assert {t.origin for t in found} == {str(file)}


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_refused_table_is_unused_on_all_with_one_warning(file, hosts, caplog):
    write(file, version="0.0.1")
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert agreed(2, hosts) == [None, None]
        assert agreed(2, hosts) == [None, None]
    messages = [r.getMessage() for r in caplog.records if "tuned" in r.getMessage()]
    assert len(messages) == 1
    assert "made by unisono 0.0.1" in messages[0]
    assert "unisono tune" in messages[0]


def test_unknown_machine_disables_the_table(file, monkeypatch, caplog):
    write(file, a_world(2, "0x2", ("another machine",)))
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert agreed(2) == [None, None]
    assert "rank 0" in caplog.text
    assert "is not in the table" in caplog.text


def test_only_worlds_of_all_machines_count(file, monkeypatch):
    here = tuned.machine()
    both = a_world(2, "0x2", (here, "a loom"))
    write(file, both, a_world(3, "0x3", (here,)))

    names = {}
    for module in (tuned, tuned_agreement):
        monkeypatch.setattr(module, "machine", lambda: names[threading.get_ident()])

    def as_if(comm):
        names[threading.get_ident()] = here if comm.rank < 2 else "a loom"
        return tuned_agreement.agree(comm)

    with world(3) as ranks:
        found = ranks.run(as_if)
    assert [t.worlds for t in found] == [(both,)] * 3


def test_missing_file_means_no_table_on_any_rank(file, caplog):
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert agreed(2) == [None, None]
    assert "cannot be read" in caplog.text


def test_broadcast_table_has_a_size_limit(file, monkeypatch):
    write(file, a_world(3, "0x3"), a_world(2, "0x2"))
    alone = len(
        msgspec.msgpack.encode(tuned_agreement._Agreed((a_world(3, "0x3"),), str(file)))
    )
    monkeypatch.setattr(tuned_agreement, "MOST_AGREED", alone)
    assert [w.n for w in agreed(3)[2].worlds] == [3]


def ran(comm):
    """In a process of its own: what ran, and what explain says."""
    x = np.zeros(5, np.float32)
    comm.all_reduce(x)
    half = comm.split(0)
    half.all_reduce(x)
    names = [r["algorithm"] for r in comm.records() if r["input_sizes"] == [[5]]]
    return names, comm.explain("all_reduce", x)


@pytest.mark.sweep
def test_processes_and_groups_use_the_table(file, monkeypatch):
    write(file)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for names, result in unisono.spawn(ran, 2, timeout_s=100):
        assert names == ["recursive_doubling"] * 2
        assert f"chosen by  the table {file}" in result
        assert "predicted  10 µs" in result
        assert "tuned      20 µs, measured at 8 B" in result
        assert "runner-up  direct, predicted 30 µs, measured 40 µs" in result


@pytest.mark.sweep
def test_processes_without_a_table_choose_by_rules(file, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for names, result in unisono.spawn(ran, 2, timeout_s=100):
        assert names == ["naive"] * 2
        assert "there is no table" in result


@pytest.mark.sweep
def test_only_the_file_of_rank_0_counts(file, tmp_path):
    """Each rank has a file of its own; across hosts as well."""
    other = write(tmp_path / "other.json", a_world(parts=parts("direct")))
    mine = parts("recursive_doubling")
    write(file, a_world(2, "0.1", parts=mine), a_world(2, "0x2", parts=mine))
    from unisono.testing.across import world_across

    def env_of(rank):
        return {"UNISONO_TUNED": str(file if rank == 0 else other)}

    for hosts in ([1, 1], [2]):  # over TCP in both cases
        for names, _ in world_across(hosts, env_of=env_of).run(ran):
            assert names == ["recursive_doubling"] * 2
