"""Checks of one host. Each check is one function.

A check gives a finding: what was found, whether it suffices, and if not, the command
that fixes it. `python -m unisono.cli._doctor.host` prints them for another host.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import unisono
from unisono.cli._doctor import fabric
from unisono.cli._doctor.limits import memory_limit
from unisono.devices import found
from unisono.errors import UnisonoError
from unisono.runtime.world.address import free_port
from unisono.transports.addresses import choose, interfaces, named_interfaces
from unisono.units import format_bytes

MARK = "unisono doctor: "
_FEW_DESCRIPTORS = 4096
_SMALL_SHM = 1 << 28
_TRIAL_MEMORY = 1 << 26
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")


class Finding(msgspec.Struct):
    """One line of `unisono doctor`; `fix` is the command to run if it is not `ok`."""

    what: str
    ok: bool
    detail: str
    fix: str = ""
    where: str = ""


def examine(several: bool) -> list[Finding]:
    """All that can be asked of this host alone; `several` are in the job."""
    findings = [check() for check in (_versions, _cores, _memory, _shm, _reach, _clock)]
    findings += _limits()
    findings += [_interfaces(several), _port()]
    findings += _gpu()
    findings += _fabric()
    if several:
        findings.append(_own_name())
    return findings


def _versions() -> Finding:
    python = f"unisono {unisono.__version__}, Python {platform.python_version()}"
    if importlib.util.find_spec("unisono._native") is None:
        return Finding(
            *("version", False, f"{python}, without the native core"),
            f"{sys.executable} -m pip install --force-reinstall unisono",
        )
    return Finding("version", True, f"{python} ({sys.executable})")


def _cores() -> Finding:
    allowed, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _quota()
    detail = f"{allowed} of {all_}"
    if quota is not None and quota < allowed:
        return Finding(
            *("cores", False, f"{detail}, but time for {quota:g} of them (cgroup)"),
            f"start at most {max(int(quota), 1)} ranks here, or raise the quota: "
            f"docker run --cpus={allowed} ...",
        )
    return Finding("cores", True, detail)


def _quota() -> float | None:
    """How many cores' time the container is given, if that is limited."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> Finding:
    """Ranks of one host share memory without a name, allocated in full."""
    size = format_bytes(_TRIAL_MEMORY)
    try:
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as why:
        return Finding(
            *("shared memory", False, f"memfd_create fails: {why}"),
            "run on Linux 3.17 or newer, and allow memfd_create in seccomp's profile",
        )
    try:
        os.posix_fallocate(descriptor, 0, _TRIAL_MEMORY)
    except OSError as why:
        return Finding(
            *("shared memory", False, f"{size} cannot be allocated: {why.strerror}"),
            "raise the memory limit: docker run --memory=..., sbatch --mem=...",
        )
    finally:
        os.close(descriptor)
    return Finding("shared memory", True, f"{size} allocated (memfd)")


def _shm() -> Finding:
    """unisono does not use it; torch's data loaders do, and fail if it is small."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        size = 0
    detail = f"{format_bytes(size)}; only for others, as torch's data loaders"
    fix = "docker run --shm-size=2g ..., or mount -o remount,size=2G /dev/shm"
    return Finding("/dev/shm", size >= _SMALL_SHM, detail, fix)


def _reach() -> Finding:
    """Whether the kernel copies large buffers from process to process."""
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        return Finding("single copy", True, "no ptrace_scope forbids it")
    detail = f"ptrace_scope is {scope}"
    if scope == 0 or (os.geteuid() == 0 and scope < 3):
        return Finding("single copy", True, f"{detail}: allowed")
    return Finding(
        *("single copy", False, f"{detail}: large buffers are copied twice"),
        "sudo sysctl -w kernel.yama.ptrace_scope=0",
    )


def _clock() -> Finding:
    try:
        source = _CLOCK.read_text().strip()
    except OSError:
        return Finding("clock source", True, "not reported by this system")
    fix = "boot with clocksource=tsc: reading this one is slow"
    return Finding("clock source", source in _GOOD_CLOCKS, source, fix)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_DESCRIPTORS
    detail = f"{_amount(soft)} open files at most"
    enough = hard == resource.RLIM_INFINITY or hard >= _FEW_DESCRIPTORS
    fix = f"ulimit -n {1 << 16 if hard < 0 else min(hard, 1 << 16)}"
    if not enough:
        fix = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf"
    yield Finding("descriptors", not few, detail, fix)
    _, detail = memory_limit(resource.RLIMIT_MEMLOCK)
    yield Finding("locked memory", True, f"{detail}; needed by RDMA alone")
    unlimited, detail = memory_limit(resource.RLIMIT_AS)
    yield Finding("address space", unlimited, detail, "ulimit -v unlimited")


def _amount(limit: int) -> str:
    return "any number of" if limit < 0 else str(limit)


def _interfaces(several: bool) -> Finding:
    here = {name: hosts for name, hosts in interfaces().items() if _is_up(name)}
    detail = "; ".join(
        f"{name} {', '.join(hosts)}{_speed(name)}" for name, hosts in here.items()
    )
    wanted = os.environ.get("UNISONO_INTERFACE", "")
    try:
        chosen = choose(wanted or None)
    except UnisonoError as error:
        return Finding("interfaces", False, str(error), "unset UNISONO_INTERFACE")
    if down := [n for n in named_interfaces(wanted) if n in interfaces().keys() - here]:
        names = ", ".join(down)
        return Finding(
            *("interfaces", False, f"UNISONO_INTERFACE: {names} is down ({detail})"),
            f"sudo ip link set {down[0]} up",
        )
    if chosen.rails:
        detail += f"; used together: {', '.join(map(str, chosen.rails))}"
    beyond = [name for name in here if name != "lo"]
    return Finding(
        *("interfaces", bool(beyond) or not several, detail or "none is up"),
        "sudo ip link set eth0 up, for the one that leads to the other hosts",
    )


def _is_up(name: str) -> bool:
    try:
        flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
    except (OSError, ValueError):
        return True
    return bool(flags & 1)


def _speed(name: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
        if megabits > 0:
            return f" ({megabits / 1000:g} Gbit/s)"
    return ""


def _port() -> Finding:
    port = free_port()
    fix = "see what listens: ss -ltn; or name a port with UNISONO_ADDRESS=host:port"
    return Finding(
        "ports", port > 0, f"{port or 'none of 20000 to 32000'} is free", fix
    )


def _own_name() -> Finding:
    """A host that resolves its own name to loopback gives others a useless address."""
    name = socket.gethostname()
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError as why:
        return Finding(
            *("own name", False, f"{name} cannot be resolved here: {why}"),
            f"echo '<address of this host> {name}' | sudo tee -a /etc/hosts",
        )
    detail = f"{name} is {', '.join(sorted(map(str, addresses)))}"
    loopback = all(str(host).startswith("127.") or host == "::1" for host in addresses)
    fix = f"put the address that others reach beside {name} in /etc/hosts"
    return Finding("own name", not loopback, detail, fix)


def _gpu() -> Iterator[Finding]:
    """A host without a GPU needs nothing of this, so there is nothing to mend."""
    driver, compiler, kernels = found.driver(), found.compiler(), found.kernels()
    yield Finding("GPU driver", True, driver.words)
    windows = found.windows()
    yield Finding("GPU windows", windows.usable, windows.words, windows.fix)
    if driver.usable:
        queues = found.queues()
        yield Finding("GPU queues", queues.usable, queues.words, queues.fix)
    if driver.usable or compiler.usable:
        yield Finding("NVRTC", compiler.usable, compiler.words, compiler.fix)
    else:
        yield Finding("NVRTC", True, "not found, and not needed without a GPU")
    engine = found.collectives()
    if engine.usable or found.wants_nccl():
        yield Finding("NCCL", engine.usable, engine.words, engine.fix)
    else:
        yield Finding("NCCL", True, "not found, and not needed: it is not the engine")
    yield Finding("kernel cache", kernels.usable, kernels.words, kernels.fix)


def _fabric() -> Iterator[Finding]:
    """What RDMA needs; unless the transport is UCX, nothing is missing."""
    wanted = fabric.is_wanted()
    for fact in fabric.facts():
        if fact.there or (wanted and fact.needed):
            yield Finding(fact.name, fact.there, fact.words, fact.fix)
        elif wanted:
            yield Finding(fact.name, True, f"{fact.words}; to get it: {fact.fix}")
        else:
            detail = f"{fact.words}; not needed, unless UNISONO_FABRIC=ucx"
            yield Finding(fact.name, True, detail)


def main(run: Callable[[bool], list[Finding]] = examine) -> int:
    """Print the findings of this host for the doctor elsewhere."""
    sys.stdout.write(MARK + msgspec.json.encode(run(True)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
