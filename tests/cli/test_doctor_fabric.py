"""What `unisono doctor` says of UCX, RDMA, GPUDirect and huge pages."""

import resource

import pytest

from unisono.cli._doctor import fabric, host
from unisono.cli._doctor.limits import memory_limit
from unisono.units import format_bytes


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system of files in place of /sys, /dev and /proc."""
    for name in ("_DEVICES", "_VERBS", "_MODULES", "_HUGE", "_MEMORY"):
        monkeypatch.setattr(fabric, name, tmp_path / name)
    (tmp_path / "_MODULES").mkdir()
    return tmp_path


def add_device(system, *, verbs=True):
    port = system / "_DEVICES" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (system / "_VERBS").mkdir()
    if verbs:
        (system / "_VERBS" / "uverbs0").touch()


def test_host_without_rdma_says_how_to_get_it(system):
    fact = fabric.rdma()
    assert not fact.there
    assert "UCX would use TCP" in fact.words
    assert "modprobe" in fact.fix


def test_devices_and_their_ports_are_named(system):
    add_device(system)
    fact = fabric.rdma()
    assert fact.there
    assert fact.words == "mlx5_0 (port 1 active InfiniBand 400 Gb/sec (4X NDR))"


def test_device_that_cannot_be_opened_is_reported(system):
    add_device(system, verbs=False)
    fact = fabric.rdma()
    assert not fact.there
    assert "--device=/dev/infiniband" in fact.fix


def test_gpu_direct(system):
    assert "modprobe nvidia-peermem" in fabric.gpu_direct().fix
    (system / "_MODULES" / "nvidia_peermem").mkdir()
    assert fabric.gpu_direct().there


@pytest.mark.parametrize(
    ("chosen", "reserved", "there"),
    [("always [madvise] never", 0, True), ("[never]", 0, False), ("[never]", 8, True)],
)
def test_huge_pages(system, chosen, reserved, there):
    (system / "_HUGE").write_text(chosen)
    (system / "_MEMORY").write_text(f"MemTotal: 1 kB\nHugePages_Total:   {reserved}\n")
    assert fabric.huge_pages().there is there


@pytest.mark.parametrize("wanted", [False, True])
def test_only_a_world_of_ucx_misses_something(system, monkeypatch, wanted):
    missing = fabric.Fact("UCX", False, "not found", "install it")
    monkeypatch.setattr(fabric, "library", lambda: missing)
    monkeypatch.setenv("UNISONO_FABRIC", "ucx" if wanted else "")
    found = {each.what: each for each in host._fabric()}
    assert [found["UCX"].ok, found["RDMA"].ok] == [not wanted] * 2
    assert found["GPUDirect"].ok
    assert ("UNISONO_FABRIC=ucx" in found["UCX"].detail) is not wanted


@pytest.mark.parametrize(
    ("soft", "shown"),
    [
        (resource.RLIM_INFINITY, (True, "unlimited")),
        (64 << 10, (False, format_bytes(64 << 10))),
    ],
)
def test_limit_of_memory_is_shown_in_words(soft, shown, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert memory_limit(resource.RLIMIT_MEMLOCK) == shown
