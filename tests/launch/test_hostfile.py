"""Hosts as people write them."""

import socket

import pytest

from unisono.errors import BadArgument
from unisono.launch.hostfile import Host, parse_hosts, read_hostfile, with_ranks


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
def test_lists_of_hosts(text, hosts):
    assert parse_hosts(text) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_is_no_host(text, said):
    with pytest.raises(BadArgument) as error:
        parse_hosts(text)
    assert said in str(error.value)


def test_a_file_of_hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# the cluster\n\nnode1 slots=4\nnode2  slots = 2 max_slots=8 # the old one\n"
        "node3\nnode4:3\nme@node5 max-slots=4\n"
    )
    assert read_hostfile(file) == [
        Host("node1", 4),
        Host("node2", 2),
        Host("node3"),
        Host("node4", 3),
        Host("me@node5"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_wrong_file_of_hosts(tmp_path, text, said):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(BadArgument) as error:
        read_hostfile(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(BadArgument, match="cannot be read"):
            read_hostfile(file)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(BadArgument, match="cannot be read"):
        read_hostfile(tmp_path / "binary")


def test_ranks_where_none_are_named():
    assert with_ranks(parse_hosts("a,b:4"), 2) == [Host("a", 2), Host("b", 4)]
    assert with_ranks(parse_hosts("a,b:4"), None) == [Host("a"), Host("b", 4)]


def test_which_hosts_need_no_ssh():
    assert Host("localhost").is_here
    assert Host("127.0.0.1").is_here
    assert Host(socket.gethostname()).is_here
    assert not Host("me@localhost").is_here
    assert not Host("elsewhere").is_here
    assert Host("me@node").address == "node"


def test_ssh_takes_addresses_without_brackets():
    assert Host("me@[fe80::1]").login == "me@fe80::1"
    assert Host("me@[fe80::1]").address == "[fe80::1]"
