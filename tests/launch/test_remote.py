"""Ranks on hosts with networks of their own: nothing is shared but what ssh carries.

The hosts are network namespaces; the stand-in for ssh enters them.
"""

import io
import os
import re
import shutil
import sys

import pytest

from unisono.errors import ConnectFailed
from unisono.launch import remote
from unisono.launch.hostfile import HostSpec
from unisono.launch.output import RankOutput
from unisono.launch.remote import RemoteOptions, launch_on_hosts
from unisono.testing import Hosts, needs_hosts

pytestmark = pytest.mark.timeout(90)

ENTER = """#!/bin/sh
case $1 in
{cases}
esac
shift
exec nsenter --net=/proc/{pid}/fd/$network env UNISONO_HOST_ID=$id sh -c "$*"
"""
WORLD = """
import os, signal, sys
import numpy as np
import unisono
comm = unisono.init()
x = np.full(100_000, comm.rank + 1.0)
comm.all_reduce(x)
print(f"sum {x[0]:g} of {comm.world_size}", flush=True)
if "die" in sys.argv and comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


@pytest.fixture
def network(tmp_path):
    if shutil.which("nsenter") is None:
        pytest.skip("nsenter is not installed: apt install util-linux")
    with Hosts(2) as hosts:
        cases = "\n".join(
            f"  {host.address}) network={host._network}; id={host.name};;"
            for host in hosts
        )
        ssh = tmp_path / "enter"
        ssh.write_text(ENTER.format(cases=cases, pid=os.getpid()))
        ssh.chmod(0o755)
        yield [host.address for host in hosts], str(ssh)


def launched(network, *arguments):
    addresses, ssh = network
    out, err = io.BytesIO(), io.BytesIO()
    outcome = launch_on_hosts(
        [sys.executable, "-c", WORLD, *arguments],
        [HostSpec(addresses[0], 2), HostSpec(addresses[1], 1)],
        RankOutput(out, err),
        RemoteOptions(sys.executable, "/", [ssh]),
        environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        grace_s=2.0,
    )
    return outcome, out.getvalue().decode(), err.getvalue().decode()


@needs_hosts()
def test_world_across_networks_runs(network):
    """Rank 0 listens at the first host's own address, with a secret: no loopback."""
    outcome, out, err = launched(network)
    assert outcome.exit_code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] sum 6 of 3" for r in range(3)]


@needs_hosts()
def test_rank_killed_on_another_host_is_named_first(network):
    outcome, _, err = launched(network, "die")
    first = outcome.first_failure
    assert (first.rank, first.hostname, first.signal) == (2, network[0][1], "SIGKILL")
    assert outcome.exit_code == 137
    assert re.search(r"\[[01]\] .*PeerLost.*rank 2", err)  # the same of both: once
    assert (
        f"rank 2 on host {first.hostname} (pid {first.pid}) failed" in outcome.report()
    )


def test_agent_that_does_not_answer_times_out(monkeypatch, tmp_path):
    ssh = tmp_path / "silent"
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(remote, "_CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(ConnectFailed, match="host a: no agent has answered within"):
        launch_on_hosts(
            ["true"],
            [HostSpec("a", 1)],
            RankOutput(io.BytesIO(), io.BytesIO()),
            RemoteOptions(sys.executable, "/", [str(ssh)]),
        )


def test_hosts_that_are_waited_for_are_told(monkeypatch, tmp_path):
    ssh, told = tmp_path / "silent", []
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(remote, "_CONNECT_TIMEOUT_S", 0.4)
    monkeypatch.setattr(remote, "_QUIET_S", 0.1)
    with pytest.raises(ConnectFailed):
        launch_on_hosts(
            ["true"],
            [HostSpec("a", 1), HostSpec("b", 1)],
            RankOutput(io.BytesIO(), io.BytesIO()),
            RemoteOptions(sys.executable, "/", [str(ssh)]),
            tell=told.append,
        )
    assert told == ["waiting for an answer by ssh from a, b (at most 0.4 s)"]


def test_login_that_prints_endlessly_is_an_error(tmp_path):
    ssh = tmp_path / "endless"
    ssh.write_text("#!/bin/sh\nexec yes\n")
    ssh.chmod(0o755)
    with pytest.raises(ConnectFailed, match="host a: the login prints more than 1 MiB"):
        launch_on_hosts(
            ["true"],
            [HostSpec("a", 1)],
            RankOutput(io.BytesIO(), io.BytesIO()),
            RemoteOptions(sys.executable, "/", [str(ssh)]),
        )
