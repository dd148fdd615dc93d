"""To whom bytes went: to each peer what the schedule says, in all what was counted."""

import threading

import numpy as np
import pytest

import unisono
from unisono.runtime.observe.traffic import TrafficCounter
from unisono.testing import world

N = 3


class Looks:
    """One rank's answers, as its watch would give them."""

    def __init__(self, comm):
        self.comm, self.asked = comm, TrafficCounter()

    def __call__(self, *more):
        comms = [self.comm, *more]
        result = self.asked.report(
            self.comm.core.session, [comm.core for comm in comms]
        )
        assert result["rank"] == self.comm.rank
        for group, comm in zip(result["groups"], comms, strict=True):
            assert sum(group["sent_to"]) == group["sent_bytes"] == comm.sent_bytes
            assert group["sent_to"][comm.rank] == 0
        return result["groups"]


def matrix(n, work, hosts=()):
    """What each of n ranks says that it has sent to each."""
    with world(n, hosts=hosts) as w:
        return w.run(work)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "swing"])
@pytest.mark.parametrize("count", [1, 1000])
def test_each_peer_gets_the_bytes_of_the_schedule(n, algorithm, count):
    right = np.zeros((n, n), np.int64)
    made = unisono.schedule("all_reduce", algorithm, n)
    sizes = made.contract.chunk_sizes(count)
    for step in made:
        src, dst, slot, _, _ = step.flat()
        np.add.at(right, (src, dst), 4 * sizes[slot % sizes.size] * (src != dst))

    def work(comm):
        look = Looks(comm)
        comm.all_reduce(np.ones(count, np.float32), algorithm=algorithm)
        first = look()[0]
        comm.all_reduce(np.ones(count, np.float32), algorithm=algorithm)
        again = look()[0]
        assert again["guessed"] == 0
        assert again["sent_to"] == [2 * b for b in first["sent_to"]]
        return first["sent_to"]

    assert matrix(n, work) == right.tolist()


def test_every_kind_of_call_is_counted():
    """Quick calls, calls in flight, bare addresses, messages, objects, labels."""

    def work(comm):
        look, x = Looks(comm), np.ones(100)
        for _ in range(5):
            comm.all_reduce(x)
        look()
        for begun in [comm.all_reduce(x, async_op=True, label="a") for _ in range(3)]:
            begun.wait()
        look()
        before = look()[0]["sent_to"]
        if comm.rank == 0:
            comm.send(x, 1)
            comm.send(x[:3], 2)
        else:
            comm.recv(np.empty(100 if comm.rank == 1 else 3), 0)
        after = look()[0]["sent_to"]
        comm.broadcast_object({"rank": 1}, root=1)
        comm.barrier()
        comm.all_reduce(x, op=np.maximum)
        at = x.ctypes.data
        float64 = unisono.dtypes.DTYPES["float64"]
        comm.core.start("all_reduce", float64, 100, at, at)
        assert look()[0]["guessed"] == 0
        return [b - a for a, b in zip(before, after, strict=True)]

    assert matrix(N, work) == [[0, 800, 24], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
@pytest.mark.parametrize("codec", ["fp8", "int8", "topk:0.1"])
def test_encoded_calls_count_encoded_bytes(hosts, codec):
    """Fewer bytes than the values have, on every link; on hosts and between them."""

    def work(comm):
        look, x = Looks(comm), np.ones(6000, np.float32)
        comm.all_reduce(x, codec=codec)
        whole = look()[0]
        assert whole["guessed"] == 0
        comm.all_reduce(x, algorithm="direct")
        twice = look()[0]
        return whole["sent_to"], twice["sent_to"]

    for coded, twice in matrix(N, work, hosts):
        assert 0 < sum(coded) < sum(twice)


def test_codec_between_hosts_only():
    def work(comm):
        look, x = Looks(comm), np.ones(3 * 1024, np.float32)
        comm.all_reduce(x, codec="fp8@hosts", algorithm="direct")
        return look()[0]["sent_to"]

    found = matrix(N, work, (0, 0, 1))
    plain = 2 * 4 * 1024  # a share to be added up, and one that is
    assert found[0][1] == found[1][0] == plain
    assert 0 < found[0][2] < plain / 2
    assert 0 < found[2][0] < plain / 2


def test_uneven_shares():
    """The same number of elements in all, other ones to each, call after call."""

    def work(comm):
        look, right = Looks(comm), np.zeros(N, np.int64)
        for turn in range(3):
            mine = np.roll([1, 2, 6], turn + comm.rank).tolist()
            comm.all_to_all(np.ones(9, np.int32), send_counts=mine)
            right += [0 if r == comm.rank else 4 * c for r, c in enumerate(mine)]
        result = look()[0]
        counts = 3 * N * 8  # by which they tell each other, in all_gathers
        right += [0 if r == comm.rank else counts for r in range(N)]
        assert result["guessed"] == 0
        return result["sent_to"], right.tolist()

    for found, right in matrix(N, work):
        assert found == right


def test_repeated_uneven_counts():
    """Calls of the same total size are distinguished by their fingerprints."""

    def work(comm):
        look, right = Looks(comm), np.zeros(N, np.int64)
        turns = [np.roll([1, 2, 6], turn + comm.rank).tolist() for turn in range(2)]
        for mine in (*turns, turns[0], turns[0], turns[1]):
            comm.all_to_all(np.ones(9, np.int32), send_counts=mine)
            right += [0 if r == comm.rank else 4 * c for r, c in enumerate(mine)]
            counts = N * 8  # by which they tell each other, in an all_gather
            right += [0 if r == comm.rank else counts for r in range(N)]
            assert look()[0]["guessed"] == 0
        return look()[0]["sent_to"], right.tolist()

    for found, right in matrix(N, work):
        assert found == right


def test_calls_without_records_are_guessed():
    """The sum is still what was counted; how it is shared out is a guess, and told."""

    def work(comm):
        look, x = Looks(comm), np.ones(9)
        for _ in range(2500):
            comm.all_reduce(x, algorithm="direct")
        result = look()[0]
        each = 2500 * 48
        assert result["guessed"] >= 500 * 48 * (N - 1)
        share = [0 if r == comm.rank else each for r in range(N)]
        return result["sent_to"], share

    for found, share in matrix(N, work):
        assert found == share


def test_closed_communicator_is_not_counted():
    def work(comm):
        look = Looks(comm)
        part = comm.split(comm.rank % 2)
        part.all_reduce(np.ones(50))
        both = look(part)
        part.close()
        comm.all_reduce(np.ones(10))
        assert len(look()) == 1
        return sum(both[1]["sent_to"])

    assert matrix(4, work) == [400] * 4


def test_counting_during_calls():
    """Whatever a look finds half done is right in the end."""

    def work(comm):
        look, done = Looks(comm), threading.Event()

        def watch():
            while not done.wait(0.005):
                look.asked.report(comm.core.session, [comm.core])

        beside = threading.Thread(target=watch)
        beside.start()
        try:
            x = np.ones(9)
            for _ in range(50):
                comm.all_reduce(x, algorithm="direct")
                comm.all_reduce(x, algorithm="direct", async_op=True).wait()
        finally:
            done.set()
            beside.join()
        result = look()[0]
        return result["sent_to"], result["guessed"]

    each = 100 * 48
    for rank, (found, guessed) in enumerate(matrix(N, work)):
        assert found == [0 if r == rank else each for r in range(N)]
        assert guessed == 0
