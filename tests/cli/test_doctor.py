"""`unisono doctor`: what it finds here, and what it says when something is amiss."""

import errno
import json
import resource

import pytest

from fake_ssh import stand_in
from unisono.cli import main
from unisono.cli._doctor import host
from unisono.cli._doctor.host import Finding, examine
from unisono.cli._doctor.rank import WorldFindings
from unisono.cli._doctor.report import of_world
from unisono.devices.found import Found
from unisono.runtime.world.address import free_port

pytestmark = pytest.mark.timeout(120)

WORLD = WorldFindings(
    hosts=["a", "a", "b"],
    wrong={"all_reduce of 1 int64": 0, "broadcast of 1 int64": 0},
    offsets_s={"b (rank 2)": 0.01},
    measured=[0, 1, 2],
    latency_us=[[None, 1.0, 50.0], [1.0, None, 50.0], [50.0, 50.0, None]],
    bandwidth_gbs=[[None, 5.0, 0.1], [5.0, None, 0.1], [0.1, 0.1, None]],
)


def test_doctor_checks_this_host(capfd):
    code = main(["doctor"])
    out = capfd.readouterr().out
    assert code == (1 if "FIX" in out else 0)
    lines = [line for line in out.splitlines() if line[:3] in ("OK ", "FIX")]
    asked = {line[5:19].strip() for line in lines}
    assert asked >= {"version", "shared memory", "single copy", "descriptors", "ports"}
    assert "OK   world          2 ranks connected, 1 host" in out
    assert "every element equal to NumPy's" in out
    assert "latency of 8 bytes, one way (µs)" in out
    assert "bandwidth of 4 MiB, one way (GB/s)" in out


@pytest.mark.sweep
def test_json_has_the_matrices(capfd):
    main(["doctor", "--json", "-n", "3"])
    result = json.loads(capfd.readouterr().out)
    world = result["world"]
    assert world["measured"] == [0, 1, 2]
    assert not any(world["wrong"].values())
    assert len(world["wrong"]) == 18
    for matrix in (world["latency_us"], world["bandwidth_gbs"]):
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                assert (value is None) == (i == j)
                assert value == matrix[j][i]
                assert value is None or value > 0
    assert {"what", "ok", "detail", "fix", "where"} <= result["findings"][0].keys()


@pytest.mark.sweep
def test_doctor_checks_each_host(capfd, tmp_path):
    ssh, _ = stand_in(tmp_path)
    code = main(["doctor", "--ssh", ssh, "--hosts", "a,down,bare", "--json"])
    result = json.loads(capfd.readouterr().out)
    assert code == 1
    of = {name: [f for f in result["findings"] if f["where"] == name] for name in "a"}
    assert {f["what"] for f in of["a"]} >= {"ssh", "cores", "ports", "own name"}
    ssh_of = {f["where"]: f for f in result["findings"] if f["what"] == "ssh"}
    assert ssh_of["a"]["ok"]
    assert "cannot be reached" in ssh_of["down"]["detail"]
    assert "give the path of Python" in ssh_of["bare"]["detail"]
    # One host is left, and its ranks are a world.
    assert len(result["world"]["hosts"]) == 2
    assert not result["world"]["failed"]


def test_doctor_checks_a_world_across_hosts(capfd, tmp_path):
    ssh, _ = stand_in(tmp_path)
    where = ["--hosts", "a,b", "--address", f"127.0.0.1:{free_port()}", "--json"]
    main(["doctor", "--ssh", ssh, *where])
    world = json.loads(capfd.readouterr().out)["world"]
    assert (world["failed"], world["hosts"]) == ("", ["a", "b"])


def test_doctor_reports_unreachable_hosts(capfd, tmp_path):
    ssh, _ = stand_in(tmp_path)
    assert main(["doctor", "--ssh", ssh, "--hosts", "down"]) == 1
    out = capfd.readouterr().out
    assert out.startswith("FIX  ssh            down: host down: cannot be reached")


def named(findings, what):
    return next(found for found in findings if found.what == what)


def test_doctor_finds_too_few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        found = named(examine(False), "descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not found.ok
    assert "300 open files" in found.detail
    assert found.fix


def test_doctor_finds_a_kernel_that_forbids_single_copy(monkeypatch, tmp_path):
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(host, "_YAMA", scope)
    assert named(examine(False), "single copy").ok
    scope.write_text("0\n")
    assert named(examine(False), "single copy").ok
    scope.write_text("3\n")
    found = named(examine(False), "single copy")
    assert not found.ok
    assert "sysctl -w kernel.yama.ptrace_scope=0" in found.fix


def test_doctor_finds_a_host_without_a_name(monkeypatch):
    monkeypatch.setattr(host.socket, "gethostname", lambda: "no-such-host.invalid")
    found = named(examine(True), "own name")
    assert not found.ok
    assert "/etc/hosts" in found.fix


def test_doctor_finds_an_interface_that_is_down(monkeypatch):
    monkeypatch.setattr(host, "_is_up", lambda name: name != "lo")
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    found = named(examine(False), "interfaces")
    assert (found.ok, found.fix) == (False, "sudo ip link set lo up")
    monkeypatch.setenv("UNISONO_INTERFACE", "nope7")
    found = named(examine(False), "interfaces")
    assert not found.ok
    assert "UNISONO_INTERFACE=nope7" in found.detail


def test_doctor_names_network_cards_that_are_used_together(monkeypatch):
    here = {"eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]}
    for module in ("transports.addresses", "cli._doctor.host"):
        monkeypatch.setattr(f"unisono.{module}.interfaces", lambda: here)
    monkeypatch.setenv("UNISONO_INTERFACE", "eth0,eth1")
    monkeypatch.setattr(host, "_is_up", lambda name: True)
    found = named(examine(False), "interfaces")
    assert found.ok
    assert "used together: 10.0.0.1 on eth0, 10.1.0.1 on eth1" in found.detail
    monkeypatch.setattr(host, "_is_up", lambda name: name == "eth0")
    found = named(examine(False), "interfaces")
    assert not found.ok
    assert "UNISONO_INTERFACE: eth1 is down" in found.detail
    assert found.fix == "sudo ip link set eth1 up"


def no_memory(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_doctor_finds_a_slow_clock_and_little_memory(monkeypatch, tmp_path):
    clock = tmp_path / "clock"
    clock.write_text("hpet\n")
    monkeypatch.setattr(host, "_CLOCK", clock)
    monkeypatch.setattr(host, "_quota", lambda: 0.5)
    monkeypatch.setattr(host.os, "posix_fallocate", no_memory)
    monkeypatch.setattr(host, "_SMALL_SHM", 1 << 60)
    monkeypatch.setattr(host, "free_port", lambda: 0)
    found = examine(False)
    bad = {one.what for one in found if not one.ok}
    assert bad == {"clock source", "cores", "shared memory", "/dev/shm", "ports"}
    assert all(one.fix for one in found if not one.ok)


NOWHERE = Found(False, "was not found", "pip install nvidia-cuda-nvrtc")


def test_host_without_a_gpu_needs_no_compiler(monkeypatch):
    monkeypatch.setattr(host.found, "driver", lambda: Found(False, "none"))
    monkeypatch.setattr(host.found, "compiler", lambda: NOWHERE)
    found = examine(False)
    assert named(found, "GPU driver").ok
    assert named(found, "NVRTC").ok
    assert "not needed without a GPU" in named(found, "NVRTC").detail


def test_doctor_finds_too_few_queues(monkeypatch):
    monkeypatch.setattr(host.found, "driver", lambda: Found(True, "CUDA 13.0"))
    monkeypatch.setattr(host.found, "compiler", lambda: Found(True, "13.0"))
    monkeypatch.setattr(host.found, "windows", lambda: Found(True, "somewhere"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    unset = named(examine(False), "GPU queues")
    assert unset.ok
    assert "8 (CUDA_DEVICE_MAX_CONNECTIONS is not set)" in unset.detail
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    one = named(examine(False), "GPU queues")
    assert not one.ok
    assert one.fix == "unset CUDA_DEVICE_MAX_CONNECTIONS"


def test_doctor_knows_the_queues_under_mps(monkeypatch, tmp_path):
    monkeypatch.setattr(host.found, "driver", lambda: Found(True, "CUDA 13.0"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    found = named(examine(False), "GPU queues")
    assert found.ok
    assert "2 (CUDA_DEVICE_MAX_CONNECTIONS is not set, under MPS)" in found.detail
    assert "set CUDA_DEVICE_MAX_CONNECTIONS=8 if streams wait" in found.detail


def test_doctor_finds_a_gpu_without_a_compiler(monkeypatch):
    monkeypatch.setattr(host.found, "driver", lambda: Found(True, "CUDA 13.0"))
    monkeypatch.setattr(host.found, "compiler", lambda: NOWHERE)
    found = named(examine(False), "NVRTC")
    assert (found.ok, found.fix) == (False, "pip install nvidia-cuda-nvrtc")


def test_doctor_finds_that_nccl_is_missing_where_it_is_the_engine(monkeypatch):
    monkeypatch.setattr(
        host.found, "collectives", lambda: Found(False, "was not found", "pip install")
    )
    monkeypatch.delenv("UNISONO_CUDA_ENGINE", raising=False)
    assert named(examine(False), "NCCL").ok
    monkeypatch.setenv("UNISONO_CUDA_ENGINE", "nccl")
    found = named(examine(False), "NCCL")
    assert (found.ok, found.fix) == (False, "pip install")


def test_doctor_finds_a_cache_that_others_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert named(examine(False), "kernel cache").ok
    (tmp_path / "unisono" / "kernels").mkdir(parents=True)
    (tmp_path / "unisono" / "kernels").chmod(0o777)
    found = named(examine(False), "kernel cache")
    assert not found.ok
    assert "chmod go-w" in found.detail


def test_world_findings_become_lines():
    assert all(found.ok for found in of_world(WORLD, several=True))
    wrong = of_world(
        WorldFindings(["a"], {"all_reduce": 3}, {}, [0], [[None]], [[None]]),
        several=False,
    )
    assert named(wrong, "answers") == Finding(
        "answers", False, "all_reduce: 3 wrong", named(wrong, "answers").fix
    )
    late = of_world(
        WorldFindings(["a", "b"], {}, {"b (rank 1)": -2.0}, [], [], []), several=True
    )
    assert named(late, "clock").fix == "sudo timedatectl set-ntp true"
    assert "-2000.000 ms" in named(late, "clock").detail
    failed = WorldFindings(
        [], {}, {}, [], [], [], failed="ConnectFailed: rank 1 is missing"
    )
    [line] = of_world(failed, several=True)
    assert not line.ok
    assert "firewall" in line.fix


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "-n 0: a world has at least one rank"),
        (["--python", "x"], "this is for other hosts"),
        (["--hosts", "a b"], "is not a host"),
    ],
)
def test_doctor_refuses_invalid_options(capfd, options, message):
    assert main(["doctor", *options]) == 2
    assert message in capfd.readouterr().err
