"""Hosts as people write them."""

import socket

import pytest

from unisono.errors import BadArgument
from unisono.launch.hostfile import (
    HostSpec,
    in_slots,
    parse_hosts,
    read_hostfile,
    with_ranks,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", None)]),
        ("a,b:4,c", [("a", None), ("b", 4), ("c", None)]),
        (" a , b:1 ", [("a", None), ("b", 1)]),
        ("me@node-1.example.org:2", [("me@node-1.example.org", 2)]),
        ("10.0.0.1:2,10.0.0.2", [("10.0.0.1", 2), ("10.0.0.2", None)]),
        ("[fe80::1]:3,[::1]", [("[fe80::1]", 3), ("[::1]", None)]),
    ],
)
def test_host_list_is_parsed(text, hosts):
    assert parse_hosts(text) == [HostSpec(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a host"),
        ("a,,b", "'' is not a host"),
        ("a:b", "'a:b' is not a host"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("-la@host", "is not a host"),
        ("a b", "'a b' is not a host"),
        ("a;reboot", "is not a host"),
        ("$(reboot)", "is not a host"),
        ("a:0", "a with 0 ranks: expected 1 or more"),
        ("a,b,a:2", "a is named twice"),
        ("a,me@a", "me@a is named twice"),
    ],
)
def test_invalid_host_is_refused(text, message):
    with pytest.raises(BadArgument) as error:
        parse_hosts(text)
    assert message in str(error.value)


def test_hostfile_is_parsed(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# the cluster\n\nnode1 slots=4\nnode2  slots = 2 max_slots=8 # the old one\n"
        "node3\nnode4:3\nme@node5 max-slots=4\n"
    )
    assert read_hostfile(file) == [
        HostSpec("node1", 4),
        HostSpec("node2", 2),
        HostSpec("node3"),
        HostSpec("node4", 3),
        HostSpec("me@node5"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no host"),
        ("# none\n", "contains no host"),
        ("a\nb slots\n", "line 2: 'b slots'"),
        ("a slots=none\n", "line 1: a with none ranks"),
        ("a slots=0\n", "line 1: a with 0 ranks"),
        ("a\na\n", "a is named twice"),
        ("-x slots=2\n", "line 1"),
    ],
)
def test_invalid_hostfile_is_refused(tmp_path, text, message):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(BadArgument) as error:
        read_hostfile(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_unreadable_hostfile_is_refused(tmp_path):
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(BadArgument, match="cannot be read"):
            read_hostfile(file)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(BadArgument, match="cannot be read"):
        read_hostfile(tmp_path / "binary")


def test_hosts_without_a_number_get_the_default():
    assert with_ranks(parse_hosts("a,b:4"), 2) == [HostSpec("a", 2), HostSpec("b", 4)]
    assert with_ranks(parse_hosts("a,b:4"), None) == [HostSpec("a"), HostSpec("b", 4)]


def test_local_hosts_need_no_ssh():
    assert HostSpec("localhost").is_here
    assert HostSpec("127.0.0.1").is_here
    assert HostSpec(socket.gethostname()).is_here
    assert not HostSpec("me@localhost").is_here
    assert not HostSpec("elsewhere").is_here
    assert HostSpec("me@node").address == "node"


def test_ssh_login_has_no_brackets():
    assert HostSpec("me@[fe80::1]").login == "me@fe80::1"
    assert HostSpec("me@[fe80::1]").address == "[fe80::1]"


def test_total_number_of_ranks_fills_the_slots_in_order():
    hosts = parse_hosts("a:2,b,c:4")
    assert [(h.name, h.ranks) for h in in_slots(hosts, 5)] == [
        ("a", 2),
        ("b", 1),
        ("c", 2),
    ]
    assert [h.name for h in in_slots(hosts, 2)] == ["a"]
    with pytest.raises(BadArgument, match="-np 8: the hosts have 7 slots"):
        in_slots(hosts, 8)
