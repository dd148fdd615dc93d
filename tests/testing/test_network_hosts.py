"""Hosts as network namespaces: who reaches whom, how fast, and that nothing remains."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from open_files import open_files
from unisono.errors import BadArgument, UnisonoError, UsageError
from unisono.testing import Hosts, Proxy, needs_hosts, world_across
from unisono.testing.hosts import _netem_missing, _tell

pytestmark = [pytest.mark.timeout(60), needs_hosts(), pytest.mark.one_in(3)]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.fixture
def healed(hosts):
    yield hosts
    hosts.heal()


def networks():
    """The network of every process and thread of this machine."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


def server_on(host, address=None):
    address = address or host.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return host.call(lambda: socket.create_server((address, 0), family=family))


def dial(host, server, timeout_s=30):
    where = server.getsockname()[:2]
    return host.call(lambda: socket.create_connection(where, timeout=timeout_s))


def reaches(hosts, src, dst, timeout_s=30):
    with server_on(hosts[dst]) as server:
        try:
            dial(hosts[src], server, timeout_s).close()
        except TimeoutError:
            return False
        return True


def test_all_hosts_reach_each_other_by_both_protocols(hosts):
    for src in hosts:
        for dst in hosts:
            for address in (dst.address, dst.address6):
                with server_on(dst, address) as server, dial(src, server) as dialed:
                    taken, peer = server.accept()
                    taken.close()
                    assert peer[0] in (src.address, src.address6)
                    assert dialed.getpeername()[0] == address


def test_hosts_have_names_identities_and_a_loopback(hosts):
    assert [h.call(socket.gethostname) for h in hosts] == ["host0", "host1", "host2"]
    assert socket.gethostname() not in {h.name for h in hosts}
    assert len({h.identity for h in hosts}) == 3
    for host in hosts:
        with server_on(host, "127.0.0.1") as server:
            dial(host, server).close()


def reason_not_to_reach(address):
    """Asked of the routes alone: no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError as why:
            return why.errno
        return 0


def test_network_of_the_machine_is_unchanged(hosts):
    links = socket.if_nameindex()
    with Hosts(2, rate="1gbit") as others:
        assert socket.if_nameindex() == links
        for host in (*others, *hosts):
            assert [name for _, name in host.call(socket.if_nameindex)] == [
                "lo",
                "eth0",
            ]
            found = host.call(reason_not_to_reach, "192.0.2.1")
            assert found == errno.ENETUNREACH


def test_process_runs_on_its_host(hosts):
    code = (
        "import os, socket; print(socket.gethostname(), os.environ['UNISONO_HOST_ID']"
    )
    code += ", os.environ['EXTRA'], *os.listdir('/sys/class/net'))"
    process = hosts[1].run(
        [sys.executable, "-c", code],
        env={"EXTRA": "yes"},
        stdout=subprocess.PIPE,
        text=True,
    )
    result, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    name, identity, extra, *links = result.split()
    assert (name, identity, extra) == ("host1", hosts[1].identity, "yes")
    assert sorted(links) == ["eth0", "lo"]


def test_healed_hosts_await_no_answer_from_before(healed):
    def unanswered():
        show = ["ip", "neigh", "show", "nud", "incomplete", "nud", "failed"]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout

    healed.partition({0}, {1, 2})
    assert not reaches(healed, 0, 1, 0.3)
    assert healed[1].address in healed[0].call(unanswered)
    healed.heal()
    assert healed[0].call(unanswered) == ""


def test_partition_separates_hosts_and_heals(healed):
    healed.partition({0}, {1, 2})
    assert not reaches(healed, 0, 1, 0.3)
    assert not reaches(healed, 2, 0, 0.3)
    assert reaches(healed, 1, 2)
    healed.partition([1])  # the others, named or not, are together
    assert reaches(healed, 0, 2)
    assert not reaches(healed, 1, 2, 0.3)
    healed.heal()
    assert all(reaches(healed, i, j) for i in range(3) for j in range(3))


def test_connections_survive_a_short_partition(healed):
    with server_on(healed[1]) as server, dial(healed[0], server) as dialed:
        taken, _ = server.accept()
        with taken:
            healed.partition({0}, {1})
            dialed.sendall(b"late")
            taken.settimeout(0.2)
            with pytest.raises(TimeoutError):
                taken.recv(4)
            healed.heal()
            taken.settimeout(20)
            assert taken.recv(4) == b"late"


def test_vanished_host_sends_nothing(healed):
    with server_on(healed[1]) as server, dial(healed[0], server) as dialed:
        taken, _ = server.accept()
        with taken:
            healed.vanish(1)
            dialed.sendall(b"is anybody there")
            dialed.settimeout(0.3)
            with pytest.raises(TimeoutError):  # neither an end nor an error
                dialed.recv(1)
    assert reaches(healed, 0, 2)
    healed.partition({0, 1}, {2})
    assert not reaches(healed, 0, 1, 0.3)  # it is in no group
    healed.heal()
    assert reaches(healed, 0, 1)


def seconds_for(hosts, nbytes):
    """To carry so many bytes from host 0 to host 1."""
    with server_on(hosts[1]) as server, dial(hosts[0], server, 30) as dialed:
        taken, _ = server.accept()
        with taken:
            sender = threading.Thread(target=dialed.sendall, args=(bytes(nbytes),))
            began = time.monotonic()
            sender.start()
            while nbytes:
                nbytes -= len(taken.recv(1 << 16))
            sender.join()
            return time.monotonic() - began


@pytest.mark.parametrize("limited", [0, 1])
def test_no_direction_of_a_limited_link_is_faster_than_its_rate(hosts, limited):
    # 500 kB at 1 MB/s; what may pass at once (4 KiB in each of two buckets) is little.
    hosts.limit(limited, "8mbit")
    try:
        assert seconds_for(hosts, 500_000) > 0.48
        assert seconds_for(hosts, 50_000) > 0.04
    finally:
        hosts.limit(limited, None)


def test_rates_are_set_for_all_links_at_once():
    with Hosts(2, rate="8mbit") as hosts:
        assert seconds_for(hosts, 250_000) > 0.23


def told_by(hosts, i, command):
    return hosts[i].call(lambda: subprocess.getoutput(command))


def test_limit_is_lifted_again(hosts):
    hosts.limit(0, "1gbit")
    assert "tbf" in told_by(hosts, 0, "tc qdisc show dev eth0")
    hosts.limit(0, None)
    assert "tbf" not in told_by(hosts, 0, "tc qdisc show dev eth0")


def test_latency_needs_netem_and_says_so():
    if not _netem_missing():
        pytest.skip("this kernel has netem")
    with pytest.raises(UsageError, match=r"latency: needs netem, .*Proxy instead"):
        Hosts(2, latency="5ms").__enter__()


def test_latency_is_added_both_ways():
    if why := _netem_missing():
        pytest.skip(why)
    with Hosts(2, latency="20ms", rate="1gbit") as hosts, server_on(hosts[1]) as server:
        began = time.monotonic()
        dial(hosts[0], server).close()
        assert time.monotonic() - began > 0.039


def test_proxy_runs_on_its_host(hosts):
    with server_on(hosts[2]) as server:
        where = server.getsockname()
        proxy = hosts[1].call(lambda: Proxy(where, listen=hosts[1].address))
        with proxy:
            host, port = proxy.address.split(":")
            there = (host, int(port))
            with hosts[0].call(socket.create_connection, there, 5):
                taken, peer = server.accept()
                taken.close()
    assert (host, peer[0]) == (hosts[1].address, hosts[1].address)


def test_worlds_run_on_hosts(hosts):
    code = (
        "import os, socket; print(socket.gethostname(), os.environ['UNISONO_HOST_ID']"
    )
    code += ", os.environ['UNISONO_ADDRESS'])"
    ends = world_across([1, 2], on=hosts).run_command([sys.executable, "-c", code])
    output = [end.stdout.split() for end in ends]
    assert [name for name, _, _ in output] == ["host0", "host1", "host1"]
    assert [identity for _, identity, _ in output] == [
        hosts[i].identity for i in (0, 1, 1)
    ]
    assert {address.split(":")[0] for _, _, address in output} == {hosts[0].address}
    with pytest.raises(BadArgument, match="4 hosts are asked for, but on= has 3"):
        world_across([1] * 4, on=hosts)


def network_of(host):
    return host.call(os.readlink, "/proc/thread-self/ns/net")


def interrupted(seen):
    """Leaves two processes on its hosts, and does not come to its end."""
    with Hosts(2) as hosts:
        seen.update(network_of(host) for host in hosts)
        code = "import subprocess; subprocess.Popen(['sleep', '600'])"
        hosts[0].run([sys.executable, "-c", code]).wait(20)
        hosts[1].run(["sleep", "600"])
        assert seen <= networks()
        raise KeyboardInterrupt


@pytest.mark.sweep
def test_nothing_is_left_when_the_context_is_left():
    seen, before = set(), open_files()
    with pytest.raises(KeyboardInterrupt):
        interrupted(seen)
    assert len(seen) == 2
    assert not seen & networks()
    assert not open_files() - before


def test_hosts_are_gone_when_the_context_is_left():
    with Hosts(2) as hosts:
        stays = hosts[1].run(["sleep", "600"])
    assert stays.returncode == -signal.SIGKILL
    assert len(hosts) == 0
    with pytest.raises(BadArgument, match="as long as the context is open"):
        hosts.vanish(0)


def test_nothing_is_left_when_the_process_is_killed():
    code = (
        "import subprocess, time\n"
        "from unisono.testing import Hosts\n"
        "with Hosts(2) as hosts:\n"
        "    print(hosts[1].run(['sleep', '600']).pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:
        pid = int(parent.stdout.readline())
        network = os.readlink(f"/proc/{pid}/ns/net")
        parent.kill()
    until = time.monotonic() + 60
    while time.monotonic() < until and network in networks():
        time.sleep(0.01)
    assert network not in networks()


@pytest.mark.parametrize("number", [0, -1, 201, 2.5, True])
def test_invalid_number_of_hosts_is_refused(number):
    with pytest.raises(BadArgument, match="hosts"):
        Hosts(number)


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "0mbit", "-1mbit"])
def test_invalid_rates_are_refused(rate):
    with pytest.raises(BadArgument, match=r"as in 20mbit or 1gbit"):
        Hosts(2, rate=rate)


def test_invalid_latencies_are_refused():
    with pytest.raises(BadArgument, match="as in 5ms"):
        Hosts(2, latency="5")


def test_unknown_hosts_are_refused(hosts):
    for wrong in (
        lambda: hosts.vanish(3),
        lambda: hosts.limit(-1, "1gbit"),
        lambda: hosts.partition({0}, {7}),
    ):
        with pytest.raises(BadArgument, match="expected 0 to 2"):
            wrong()
    with pytest.raises(BadArgument, match="one group only"):
        hosts.partition({0, 1}, {1, 2})
    with pytest.raises(FileNotFoundError):
        hosts[0].run(["/no-such-thing"])


def test_kernel_error_is_reported(hosts):
    with pytest.raises(UnisonoError, match=r"ip: .*nowhere"):
        hosts[0].call(_tell, ["ip", "-batch", "-"], ["link set nowhere up"])


def test_second_links_are_networks_of_their_own():
    with Hosts(2, rails=[None]) as made:
        with server_on(made[1], made[1].address_on(1)) as server:
            dial(made[0], server).close()
            made.unplug(1, 1)
            with pytest.raises((TimeoutError, OSError)):
                dial(made[0], server, 0.3)
            assert reaches(made, 0, 1)  # the first is not touched
            made.heal()
            dial(made[0], server).close()
        with pytest.raises(BadArgument, match="card 2: expected 0 to 1"):
            made.unplug(0, 2)


def test_too_many_rails_are_refused():
    with pytest.raises(BadArgument, match="at most 7"):
        Hosts(2, rails=[None] * 8)
