"""This machine as a topology: measured where a table says so, and it says which."""

import pytest

import unisono
from unisono.cli import main
from unisono.runtime.plan.tuned import TunedLink, TunedWorld, machine
from unisono.simulate import simulate
from unisono.tune import save, this_machine, topology_named


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", str(tmp_path / "table.json"))
    return tmp_path / "table.json"


def measured(n=2, placement="0x2", kind="inside"):
    small = TunedLink(kind, 8, 1024, 2e-6, 0.0, 1e-9, 0.0)
    large = TunedLink(kind, 4096, 1 << 20, 3e-6, 0.0, 4e-10, 0.0)
    return TunedWorld(n, placement, (machine(),), (), (small, large), 1e-10)


def test_missing_table_gives_default_bandwidths_and_a_note(monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", "0")
    assert "defaults, not measured: `unisono tune` measures" in this_machine().about


def test_table_gives_measured_links_and_is_named(file):
    save(measured(), file)
    where = topology_named("this")
    assert "as measured by `unisono tune` on 2 ranks" in where.about
    links = where.wiring.links
    memory = links.kind == links.kinds.index("memory")
    assert links.bandwidth[memory] == pytest.approx(2.5e9)
    assert links.latency[memory] == pytest.approx(1e-6)
    assert where.reduce == 1e-10
    if where.n > 1:
        found = simulate("chain:segments=1", where, 1 << 20, collective="broadcast")
        assert found.time >= 2e-6 + (1 << 20) * 4e-10 * 0.999


def test_worlds_across_hosts_are_not_used_for_this_machine(file):
    save(measured(4, "0x2.1x2", "across"), file)
    assert "defaults" in this_machine().about


def test_table_of_another_version_is_refused_with_the_reason(file, capsys):
    save(measured(), file)
    file.write_text(file.read_text().replace(f'"{unisono.__version__}"', '"0.0.1"'))
    about = this_machine().about
    assert "the tuned table is refused" in about
    assert "0.0.1" in about
    assert main(["topology", "show", "this"]) == 0
    assert "is refused" in capsys.readouterr().out


def test_table_of_another_machine_is_refused_with_the_reason(file):
    save(measured(), file)
    file.write_text(file.read_text().replace(machine(), "Abacus, 1 core"))
    assert "is of Abacus" in this_machine().about


def test_damaged_table_is_refused_with_the_reason(file):
    file.write_text("{}")
    file.chmod(0o600)
    assert "not a tuned table" in this_machine().about
