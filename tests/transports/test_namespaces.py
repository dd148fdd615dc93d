"""Ranks on hosts that are network namespaces: true interfaces, routes and scopes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.transports.secret import make_secret

SCRIPT = Path(__file__).parent / "namespaced.py"


def why_not():
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no `ip` to make network namespaces with"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "the system allows no network namespaces"


pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "they can be made"),
    pytest.mark.one_in(3),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts():
    """Two hosts with a cable between them: 10.77.0.1 and .2, fd77::1 and ::2."""
    names = [f"unisono-{os.getpid()}-{letter}" for letter in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ends = [f"un{os.getpid() % 100000}{letter}" for letter in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name, "name", f"wire{number}")
            inside = ("-n", name)
            ip(*inside, "link", "set", "lo", "up")
            wire = ("dev", f"wire{number}")
            ip(*inside, "addr", "add", f"10.77.0.{number}/24", *wire)
            ip(*inside, "addr", "add", f"fd77::{number}/64", *wire, "nodad")
            # A fixed link-local address, there at once.
            ip(*inside, "addr", "add", f"fe80::77:{number}/64", *wire, "nodad")
            ip(*inside, "link", "set", f"wire{number}", "up")
        yield names


def start(host, *call):
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, SCRIPT, json.dumps(call)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends_of(processes):
    ends = []
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            ends.append(json.loads(out.splitlines()[-1]))
    return ends


def connect(hosts, wheres, secret, interface=None):
    """Ranks 0 and 2 on the first host, 1 on the second."""
    places = [hosts[0], hosts[1], hosts[0]]
    ranks = enumerate(zip(places, wheres, strict=True))
    return ends_of(
        [start(host, "rank", r, 3, at, secret, interface) for r, (host, at) in ranks]
    )


@pytest.mark.sweep
@pytest.mark.parametrize("host", ["10.77.0.{}", "fd77::{}"])
def test_ranks_connect_by_route(host, hosts):
    port = 29500
    zero, one = host.format(1), host.format(2)
    where = f"[{zero}]:{port}" if ":" in zero else f"{zero}:{port}"
    ends = connect(hosts, [where] * 3, make_secret().hex())
    for end in ends:
        assert end.get("hosts") == [0, 1, 0], end
    assert ends[1]["why"] == f"{one} on wire2: the route to {zero} leaves there"
    assert one in ends[0]["addresses"][1]


def test_ranks_connect_by_link_local_addresses(hosts):
    """Each host has its own name for the interface."""
    wheres = [f"[fe80::77:1%wire{number}]:29501" for number in (1, 2, 1)]
    ends = connect(hosts, wheres, make_secret().hex())
    for end in ends:
        assert end.get("hosts") == [0, 1, 0], end
        assert "%" not in "".join(end["addresses"])


def test_ranks_connect_by_a_given_network(hosts):
    ends = connect(hosts, ["10.77.0.1:29502"] * 3, make_secret().hex(), "10.77.0.0/16")
    for end in ends:
        assert "UNISONO_INTERFACE=10.77.0.0/16 holds it" in end["why"]


def test_ranks_without_secret_refuse_network_addresses(hosts):
    for end in connect(hosts, ["10.77.0.1:29503"] * 3, ""):
        assert end["error"] == "BadArgument"
        assert "has no secret" in end["message"]


def test_client_without_secret_on_another_host_is_rejected(hosts):
    where = "10.77.0.1:29504"
    intruders = [start(hosts[1], "intruder", where) for _ in range(2)]
    ends = connect(hosts, [where] * 3, make_secret().hex())
    for end in ends:
        assert end.get("hosts") == [0, 1, 0], end
    for end in ends_of(intruders):
        assert end["said"] == 0
        assert end["tried"] > 0
