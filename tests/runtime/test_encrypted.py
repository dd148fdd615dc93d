"""Whole worlds that encrypt: the same results, and nothing for who sits on the wire.

First among threads, by sockets within this process; then among processes that connect,
where rank 1 reaches rank 0 through somebody who listens or meddles.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

import elastic_programs
import unisono
from conformance import check, every_algorithm, every_reduction, every_type, perform
from unisono.errors import (
    BadArgument,
    ConnectFailed,
    PeerLost,
    TransportError,
)
from unisono.runtime.world.address import free_port
from unisono.testing import Proxy, world, world_across

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(4)]

HERE = {
    "PYTHONPATH": os.pathsep.join(
        [
            str(Path(__file__).parents[1] / "support"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
}
ENCRYPTED = HERE | {"UNISONO_TLS": "mutual"}
PATTERN = b"the weights of the model; "


# --- threads


@pytest.mark.quick(hosts=[(0, 0, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2, 3, 4)], ids=str)
def test_every_algorithm_encrypted(hosts):
    n = len(hosts)
    cases = every_algorithm(n, [1, 2777, 9001])
    with world(n, window=2048, hosts=hosts, tls="mutual") as w:
        check(cases, w.run(perform, cases))


def test_every_type_and_operation_encrypted():
    cases = [*every_reduction(2), *every_type(2)]
    with world(2, window=1024, hosts=(0, 1), tls="mutual") as w:
        check(cases, w.run(perform, cases))


@pytest.mark.quick(hosts=[(0, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_messages_of_many_records(hosts):
    """More than sockets hold, so that records are cut off wherever they may be."""
    n = len(hosts)
    by = [("all_reduce", "ring"), ("all_to_all", "direct"), ("broadcast", "chain")]
    cases = every_algorithm(n, [1_500_001], by)
    with world(n, hosts=hosts, tls="mutual") as w:
        check(cases, w.run(perform, cases))


SIZES = [0, 1, 16_319, 16_320, 16_321, 16_384, 40_000, 700_001]


def post(comm):
    """Messages of sizes around a record's, both ways at once."""
    other = 1 - comm.rank
    for size in SIZES:
        sent = np.full(size, comm.rank + 1, np.uint8)
        got = np.zeros(size, np.uint8)
        sending = comm.send(sent, other, async_op=True)
        comm.recv(got, other)
        sending.wait()
        if not (got == other + 1).all():
            return size
    return "all came"


def test_send_and_recv_encrypted():
    with world(2, hosts=(0, 1), tls="mutual") as w:
        assert w.run(post) == ["all came"] * 2


def test_unknown_kind_of_tls_is_refused():
    with pytest.raises(BadArgument, match="tls = 'ssl3': expected 'mutual'"):
        world(2, tls="ssl3")
    with pytest.raises(BadArgument, match="tls = 'none': expected 'mutual'"):
        unisono.init(tls="none")


# --- processes


class Tap:
    """Passes connections on to a port, and keeps all that went forth and back."""

    def __init__(self, port):
        self.port, self.captured, self.ends = port, bytearray(), []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for end in (self.server, *self.ends):
            end.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.port))
                except ConnectionRefusedError:  # not there yet: dialed again
                    near.close()
                    continue
                self.ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while raw := source.recv(1 << 16):
                self.captured += raw
                target.sendall(raw)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def across(env, through, port, **options):
    """Two ranks on two hosts; the second reaches the first through a proxy."""

    def env_of(rank):
        where = through.address if rank else f"127.0.0.1:{port}"
        return {"UNISONO_ADDRESS": where}

    return world_across([1, 1], env=env, env_of=env_of, **options)


def tell_patterns(comm, pattern):
    """Says a pattern in a collective and in a message; and whether all came."""
    result = np.frombuffer(pattern * 3000, np.uint8)
    parts = comm.all_gather(result)
    if comm.rank == 1:
        comm.send(result, 0)
        return True
    got = np.empty_like(result)
    comm.recv(got, 1)
    return bool((got == result).all() and (parts.reshape(2, -1) == result).all())


@pytest.mark.parametrize("encrypted", [False, True])
def test_wire_shows_no_plain_text(encrypted):
    """All of it without TLS, and nothing with it: not even the names of hosts."""
    port = free_port()
    with Tap(port) as tap:
        env = ENCRYPTED if encrypted else HERE
        assert all(across(env, tap, port).run(tell_patterns, PATTERN))
        assert len(tap.captured) > 2 * len(PATTERN) * 3000
        secrets = [PATTERN, PATTERN[:8], b"host1-"]  # as rank 1 names its host
        found = [secret in bytes(tap.captured) for secret in secrets]
        assert found == [not encrypted] * 3


def conform(comm, *by):
    cases = every_algorithm(comm.world_size, [1, 70_001], by or None)
    return cases, perform(comm, cases)


@pytest.mark.sweep
def test_processes_that_encrypt_compute_the_same():
    result = world_across([2, 1], env=ENCRYPTED).run(conform)
    check(result[0][0], [results for _, results in result])


@pytest.mark.sweep
def test_several_lanes_are_all_encrypted():
    env = ENCRYPTED | {"UNISONO_LANES": "3"}
    by = [("all_reduce", "ring"), ("all_to_all", "direct"), ("broadcast", "chain")]
    result = world_across([1, 1], env=env).run(conform, *by)
    check(result[0][0], [results for _, results in result])


def train(comm, elements, times):
    """Sums that are all checked: returns wrong results, not failures."""
    for step in range(times):
        x = np.full(elements, comm.rank + step, np.float32)
        if not (comm.all_reduce(x) == 1 + 2 * step).all():
            return "a wrong sum"
    return "done"


@pytest.mark.quick(way=["back"])
@pytest.mark.parametrize(
    ("at", "way"), [(700, "forth"), (700, "back"), (2_000_003, "forth")]
)
def test_tampering_raises_a_named_error(at, way):
    """In the rendezvous and in the data: never a wrong sum, nor a hang."""
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        proxy.corrupt(at, direction=way)
        plan = across(
            ENCRYPTED | {"UNISONO_TIMEOUT_S": "20", "UNISONO_SILENCE_S": "3"},
            *(proxy, port),
            timeout_s=60,
            init=False,
        )
        with plan.start(attempt, 400_000, 8) as running:
            ends = running.wait()
        assert proxy.log
    names = [end.result for end in ends]
    assert "a wrong sum" not in names
    assert {"Corrupted", "NotAuthentic"} & set(names), names


def attempt(elements, times):
    """The name of what a rank ends by."""
    try:
        with contextlib.closing(unisono.init(rendezvous_timeout_s=8)) as comm:
            return train(comm, elements, times)
    except TransportError as why:
        return type(why).__name__


def attempt_init(rendezvous_timeout_s):
    """Why a rank does not connect, with the error's name."""
    try:
        unisono.init(rendezvous_timeout_s=rendezvous_timeout_s).close()
    except (TransportError, BadArgument) as why:
        return f"{type(why).__name__}: {why}"
    return "connected"


@pytest.mark.sweep
@pytest.mark.quick(encrypts=[1])
@pytest.mark.parametrize("encrypts", [0, 1])
def test_rank_without_tls_is_refused_with_an_error(encrypts):
    def env_of(rank):
        return {"UNISONO_TLS": "mutual"} if rank == encrypts else {}

    result = world_across([1, 1], env=HERE, env_of=env_of, init=False).run(
        attempt_init, 40.0
    )
    names = ["encrypts, rank 1 does not", "does not encrypt, rank 1 does"]
    assert result[1].startswith("Refused: ")
    assert f"rank 0 {names[encrypts]}" in result[1]
    assert result[0].startswith("ConnectFailed: rank 1")
    for one in result:
        assert "give all ranks the same, tls='mutual' in init" in one


def test_tls_without_a_secret_is_refused():
    env = ENCRYPTED | {"UNISONO_SECRET": ""}
    result = world_across([1, 1], env=env, init=False).run(attempt_init, 5.0)
    for one in result:
        assert one.startswith("BadArgument: tls='mutual': this job has no secret")


@pytest.mark.sweep
def test_survivors_continue_encrypted():
    with world_across([1, 1, 1], env=ENCRYPTED, grace_s=40).start(survive) as running:
        ends = running.wait()
    assert [ends[rank].result for rank in (0, 2)] == [((1,), 2.0)] * 2, ends


def survive(comm):
    """Whom the others lost, and what they add up to without it."""
    comm.barrier()
    if comm.rank == 1:
        os._exit(9)
    try:
        while True:
            comm.barrier()
    except PeerLost as why:
        left = comm.shrink()
        return why.ranks, float(left.all_reduce(np.ones(1))[0])


@pytest.mark.sweep
def test_joining_ranks_must_encrypt():
    def env_of(rank):
        return {"UNISONO_JOIN": "1"} if rank == 2 else {}

    plan = world_across([1, 1, 1], env=ENCRYPTED, env_of=env_of, init=False)
    result = plan.run(elastic_programs.grows_or_joins, 2, 3)
    assert sorted(one[0] for one in result) == [0, 1, 2]


def joins_without(result):
    """The error of a joining rank without TLS; the others wait for it meanwhile."""
    if "UNISONO_JOIN" in os.environ:
        try:
            unisono.init(rendezvous_timeout_s=40)
        except TransportError as why:
            return f"{type(why).__name__}: {why}"
        finally:
            Path(result).touch()
    with elastic_programs.begun(2) as comm:
        while comm.broadcast_object(not os.path.exists(result)):
            with pytest.raises(ConnectFailed):
                comm.grow(3, timeout_s=1)
    return None


@pytest.mark.sweep
def test_joining_rank_without_tls_is_refused(tmp_path):
    def env_of(rank):
        return {"UNISONO_JOIN": "1", "UNISONO_TLS": ""} if rank == 2 else {}

    plan = world_across([1, 1, 1], env=ENCRYPTED, env_of=env_of, init=False)
    text = plan.run(joins_without, str(tmp_path / "told"))
    assert text[2].startswith("Refused: rank 0 encrypts, rank ")
