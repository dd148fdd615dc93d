"""Waits of the rendezvous say what they wait for."""

import secrets
import socket
import time

import pytest

from unisono.errors import ConnectFailed, PeerLost
from unisono.transports import waiting
from unisono.transports.addresses import Address
from unisono.transports.handshake import Identity
from unisono.transports.rendezvous_hosts import _open, rendezvous
from unisono.transports.rendezvous_local import Answer, Hello, LocalRendezvous
from unisono.transports.secret import open_secret
from unisono.transports.unix import seqpacket
from unisono.transports.waiting import noticed, ranks_named

LIMIT_S = 100


@pytest.fixture
def said(monkeypatch):
    """What is said; the notices come soon."""
    lines = []
    monkeypatch.setattr(waiting, "NOTICE_S", 0.01)
    monkeypatch.setattr(waiting, "_tell", lines.append)
    return lines


def local(rank, said):
    hello = Hello("1", rank, 3, "host", "identity")
    until = time.monotonic() + LIMIT_S

    def lost():  # not for the address, which takes long on a busy machine
        return "enough" if said and "address" not in said[-1] else ""

    job = f"waiting-{secrets.token_hex(8)}"  # other tests of this file run beside
    return LocalRendezvous(hello, job, until, LIMIT_S, lost)


def test_rank_0_names_the_local_ranks_that_have_not_come(said):
    with pytest.raises(ConnectFailed, match="enough"):
        local(0, said).serve(Answer())
    assert said[-1] == "rank 0 waits for ranks 1, 2 to connect (at most 100 s)"


def test_local_rank_waits_for_rank_0(said):
    with pytest.raises(ConnectFailed, match="enough"):
        local(2, said).join()
    assert said == ["rank 2 waits for rank 0 to start (at most 100 s)"]


def across(rank, address, said):
    rendezvous(
        rank,
        3,
        "waiting",
        address,
        secret=None,
        version="1",
        timeout_s=LIMIT_S,
        lost=lambda: "enough" if said else "",
    )


def test_local_address_that_another_job_has_is_named(monkeypatch):
    lines = []
    late = local(0, [])
    with seqpacket() as other:
        other.bind(late.address)

        def tell(text):
            lines.append(text)
            other.close()

        monkeypatch.setattr(waiting, "NOTICE_S", 0.01)
        monkeypatch.setattr(waiting, "_tell", tell)
        with seqpacket() as listener:
            late._listen(listener)
    (text,) = lines
    assert text.startswith("rank 0 waits for its address: another job")


def test_rank_0_names_the_ranks_of_other_hosts_that_have_not_come(said):
    with pytest.raises(ConnectFailed, match="enough"):
        across(0, "127.0.0.1:0", said)
    (text,) = said
    assert text.startswith("rank 0 waits for ranks 1, 2 to connect to 127.0.0.1:")


def test_rank_of_another_host_waits_for_rank_0(said):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PeerLost, match="enough"):
            across(1, address, said)
    assert said == [f"rank 1 waits for rank 0 to answer at {address} (at most 100 s)"]


def test_port_that_another_process_uses_is_named(monkeypatch):
    lines = []
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        address = Address("127.0.0.1", used.getsockname()[1])

        def tell(text):
            lines.append(text)
            used.close()

        monkeypatch.setattr(waiting, "NOTICE_S", 0.01)
        monkeypatch.setattr(waiting, "_tell", tell)
        me = Identity(open_secret("waiting", anywhere=False), "waiting", 0)
        _open(address, me, time.monotonic() + LIMIT_S, ()).close()
    (text,) = lines
    assert text.startswith(f"rank 0 waits for {address}, which another process uses")


def test_wait_that_is_short_says_nothing(capsys):
    with noticed(lambda: "waits"):
        pass
    assert capsys.readouterr().err == ""


def test_notice_is_on_standard_error(capsys, monkeypatch):
    waiting._tell("rank 0 waits")
    assert capsys.readouterr().err == "unisono: rank 0 waits\n"
    monkeypatch.setattr("sys.stderr", None)
    waiting._tell("nobody reads this")


def test_wait_goes_on_if_no_thread_can_be_started(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    with pytest.raises(ConnectFailed), noticed(lambda: "waits"):
        raise ConnectFailed("as it was")


def test_many_ranks_are_counted():
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([3, 5]) == "ranks 3, 5"
    assert ranks_named([*range(40)]).endswith("14, 15 and 24 more")
