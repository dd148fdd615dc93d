"""Who lives, across hosts: every death and goodbye is heard by all, with its cause."""

import os
import random
import resource
import signal
import threading
import time

import pytest
import reference_wire as wire
from stars import Process, Star, key, keys, pair, until, wires

from unisono import _native

pytestmark = pytest.mark.timeout(90)


def dead(rank, cause, reporter=0):
    return ("dead", rank, cause, reporter, 0, 0)


def left(rank):
    return ("left", rank, "none", rank, 0, 0)


# --- deaths


def test_all_ranks_get_the_death_notice_of_a_killed_leaf():
    with Star(4, without=[2]) as star, Process(star, 2) as process:
        process.send(signal.SIGKILL)
        star.all_hear(dead(2, "gone"))
        star.settle([3, 0, 1])
        assert all(star.news(rank) == [dead(2, "gone")] for rank in (0, 1, 3))


def test_all_leaves_get_the_death_notice_of_a_killed_hub():
    with Star(4, without=[0]) as star, Process(star, 0) as process:
        process.send(signal.SIGKILL)
        for rank in (1, 2, 3):
            star.hears(rank, dead(0, "gone", rank))
            assert star[rank].silence() == [-1] * 4


def test_leaves_that_die_together_are_all_reported():
    gone = (1, 3, 5)
    with Star(6, without=gone) as star:
        processes = [Process(star, rank) for rank in gone]
        for process in processes:
            process.send(signal.SIGKILL)
        for rank in (0, 2, 4):
            for other in gone:
                star.hears(rank, dead(other, "gone"))
        star.settle([2, 0, 4])
        assert all(len(star.news(rank)) == 3 for rank in (0, 2, 4))
        for process in processes:
            process.__exit__()


@pytest.mark.sweep
def test_stopped_process_is_marked_dead_and_gets_the_notice_when_continued():
    quick = {"beat_ms": 50, "limit_ms": 2500}
    star = Star(3, without=[1], begun=False, **quick)  # a process is slow to start
    with star, Process(star, 1) as process:
        star.begin()
        until(lambda: star[0].silence()[1] < 500, "rank 1 is heard")
        process.send(signal.SIGSTOP)
        until(lambda: not 0 <= star[0].silence()[1] <= 500, "rank 1 is stalled")
        star.all_hear(dead(1, "silent"))
        process.send(signal.SIGCONT)
        heard, status = process.end()
        assert (heard, status) == ([dead(1, "silent")], 0)


def test_stop_shorter_than_the_limit_has_no_effect():
    with Star(3, without=[1]) as star, Process(star, 1) as process:
        process.send(signal.SIGSTOP)
        until(lambda: star[0].silence()[1] > 400, "rank 1 is stalled")
        star[2].announce_failure(5, 6)
        star.hears(0, ("failure", 2, "none", 2, 5, 6))
        process.send(signal.SIGCONT)
        until(lambda: star[0].silence()[1] < 100, "rank 1 is heard again")
        heard, status = process.end()
        assert (heard, status) == ([("failure", 2, "none", 2, 5, 6)], 0)
        star.all_hear(left(1))


def test_hub_without_heartbeat_is_dead_by_silence():
    with Star(2, without=[0], beat_ms=50, limit_ms=300) as star:
        star.hears(1, dead(0, "silent", 1))


def test_rank_declared_dead_gets_its_own_death_notice():
    with Star(4) as star:
        assert star[3].announce_dead(1, "corrupted")
        star.all_hear(dead(1, "corrupted", 3), [0, 1, 2])
        until(lambda: star[0].silence()[1] == -1, "the hub lets it go")
        until(lambda: star[1].silence()[0] == -1, "it lets the hub go")
        star.settle([3, 0, 2])
        assert star.news(1) == [dead(1, "corrupted", 3)]
        assert star.news(3) == []


def test_death_is_reported_once():
    with Star(4) as star:
        for rank in (0, 2, 3):
            star[rank].announce_dead(1, "gone")
        until(lambda: star.take(1), "the dead one hears it")
        for rank in (0, 2, 3):
            star.settle([rank, *({0, 2, 3} - {rank})])
        assert all(len(star.news(rank)) <= 1 for rank in range(4))


# --- goodbyes


def test_rank_that_closes_has_left_and_is_not_dead():
    with Star(4) as star:
        star[2].close()
        star.all_hear(left(2), [0, 1, 3])
        star.settle([1, 0, 3])
        assert all(star.news(rank) == [left(2)] for rank in (0, 1, 3))
        star[0].announce_dead(2, "gone")
        star.settle([0, 1, 3])
        assert star.news(1) == [left(2)]


def test_hub_that_closes_has_left_and_is_not_dead():
    with Star(3) as star:
        star[0].close()
        star.all_hear(left(0), [1, 2])
        until(lambda: star[1].silence() == [-1, -1, -1], "the leaf lets it go")
        assert star.take(1) == [left(0)]


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
def test_no_rank_is_dead_when_all_close_at_once(tcp):
    for _ in range(10):
        star = Star(6, tcp=tcp, beat_ms=1)
        closers = [threading.Thread(target=line.close) for line in star.lines.values()]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert not [e for r in range(6) for e in star.take(r) if e[0] == "dead"]


def test_announcements_before_close_arrive():
    with Star(3) as star:
        for word in range(100):
            star[1].announce_failure(1, word)
        star[1].close()
        star.hears(2, left(1))
        assert star.take(2)[:-1] == [
            ("failure", 1, "none", 1, 1, w) for w in range(100)
        ]


def test_process_that_ends_without_close_is_dead():
    with Star(3, without=[1]) as star, Process(star, 1, then="vanish") as process:
        assert process.end() == ([], 0)
        star.all_hear(dead(1, "gone"))


def test_interpreter_can_end_with_a_lifeline_open():
    with Star(3, without=[1]) as star, Process(star, 1, then="forget") as process:
        assert process.end() == ([], 0)
        until(lambda: star.take(2), "its end is heard")
        assert star.take(2)[0] in (left(1), dead(1, "gone"))


def test_close_twice_works_and_later_announcements_are_refused():
    with Star(2) as star:
        star[1].close()
        star[1].close()
        assert not star[1].announce_failure(1, 1)
        assert not star[1].announce_dead(0, "gone")


def test_close_does_not_wait_for_ranks_that_never_answer():
    with Star(3, without=[1, 2]) as star:
        star[0].close()


# --- failures


def test_concurrent_failures_reach_all_ranks_in_one_order():
    n, count = 5, 400
    with Star(n) as star:
        tellers = [
            threading.Thread(
                target=lambda r: [star[r].announce_failure(r, w) for w in range(count)],
                args=(rank,),
            )
            for rank in range(n)
        ]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
        for rank in range(n):
            until(lambda r=rank: len(star.take(r)) == (n - 1) * count, "all are heard")
        for rank in range(n):
            for other in set(range(n)) - {rank}:
                words = [e[5] for e in star.take(rank) if e[1] == other]
                assert words == list(range(count))
        third = [e for e in star.take(3) if e[1] != 4]
        fourth = [e for e in star.take(4) if e[1] != 3]
        assert third == fourth


def test_lifeline_has_64_leaves():
    with Star(65, limit_ms=60_000) as star:
        star[64].announce_failure(3, 2**64 - 1)
        event = ("failure", 64, "none", 64, 3, 2**64 - 1)
        star.all_hear(event, range(64))
        star[10].close()
        star.all_hear(left(10), [r for r in range(65) if r != 10])
        assert all(len(star.take(r)) == 2 for r in range(64) if r != 10)


# --- bytes that nobody should send


def sealed(payload, number=0, of=1, **fields):
    return wire.frame(
        key(of, 0), payload, kind=wire.CONTROL, **({"number": number} | fields)
    )


BEAT = wire.event(wire.BEAT)
HOSTILE = {
    "garbage": (random.Random(1).randbytes(300), "corrupted"),
    "a web browser": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4, "corrupted"),
    "a key of another": (sealed(BEAT, of=2), "not authentic"),
    "a changed header": (sealed(BEAT, mac=1), "not authentic"),
    "a changed payload": (sealed(BEAT)[:-1] + b"?", "corrupted"),
    "a repeated frame": (sealed(BEAT) * 2, "corrupted"),
    "a lost frame": (sealed(BEAT) + sealed(BEAT, 2), "corrupted"),
    "another epoch": (sealed(BEAT, epoch=1), "corrupted"),
    "a huge length": (sealed(BEAT, length=2**32 - 1), "corrupted"),
    "a short payload": (sealed(BEAT[:-1]), "corrupted"),
    "another kind of frame": (
        wire.frame(key(1, 0), BEAT, kind=wire.DATA),
        "corrupted",
    ),
    "no such event": (sealed(wire.event(4)), "corrupted"),
    "no such rank": (sealed(wire.event(wire.DEAD, 4, 1, 1)), "corrupted"),
    "no such cause": (sealed(wire.event(wire.DEAD, 2, 6, 1)), "corrupted"),
    "a goodbye of another": (sealed(wire.event(wire.LEFT, 2, 0, 1)), "corrupted"),
    "a word of another": (sealed(wire.event(wire.FAILURE, 2, 0, 2)), "corrupted"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_bytes_end_only_their_sender(name):
    data, cause = HOSTILE[name]
    with Star(4, without=[1]) as star:
        star.outside[1, 0].sendall(data)
        star.all_hear(dead(1, cause))
        star.settle([2, 0, 3])
        assert all(star.news(rank) == [dead(1, cause)] for rank in (0, 2, 3))


def test_bytes_that_arrive_one_by_one_are_read():
    with Star(3, without=[1]) as star:
        failure = wire.event(wire.FAILURE, 1, 0, 1, 8, 9)
        for byte in sealed(BEAT) + sealed(failure, 1):
            star.outside[1, 0].sendall(bytes([byte]))
        star.all_hear(("failure", 1, "none", 1, 8, 9))


# --- who does not read


class Deaf:
    """A leaf that beats, and never reads."""

    def __init__(self, end, rank):
        self._end, self._rank = end, rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        number = 0
        while not self._over.wait(0.05):
            try:
                self._end.sendall(sealed(BEAT, number, of=self._rank))
            except OSError:
                return
            number += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


@pytest.mark.sweep
@pytest.mark.quick(limit_ms=[60_000])
@pytest.mark.parametrize(
    ("limit_ms", "count"),
    [(15_000, 30_000), (60_000, 150_000)],
    ids=["for the limit", "by far too much"],
)
def test_leaf_that_does_not_read_is_marked_slow_and_affects_no_other(limit_ms, count):
    with Star(3, without=[1], tcp=False, limit_ms=limit_ms) as star:
        with Deaf(star.outside[1, 0], 1):
            for word in range(count):
                star[0].announce_failure(1, word)
                if word % 10_000 == 0:
                    star.settle([0, 2])  # who reads keeps up
            star.hears(2, dead(1, "slow"))
            star.settle([0, 2])
        words = [e[5] for e in star.news(2) if e[0] == "failure"]
        assert words == list(range(count))


# --- forks, ends, and what cannot be


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_has_no_lifeline():
    with Star(3) as star:
        child = os.fork()
        if child == 0:
            line, status = star[1], 1
            if (
                line.forked()
                and not line.announce_failure(1, 1)
                and line.events() == []
            ):
                status = 10 + (line.silence() != [-1, -1, -1])
            for line in star.lines.values():
                line.close()
            star.lines.clear()
            del line
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        assert not star[1].forked()
        star.settle([1, 0, 2])
        assert all(star.news(rank) == [] for rank in range(3))


def test_living_child_does_not_hide_the_death_of_its_parent():
    with Star(3, without=[1]) as star, Process(star, 1, then="fork") as process:
        process.send(signal.SIGKILL)
        try:
            star.all_hear(dead(1, "gone"))
        finally:
            os.kill(int(process.first), signal.SIGKILL)


def test_too_few_descriptors_are_an_error():
    near, far = pair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (0, 1):
        given = wires([os.dup(near.fileno()), -1])
        free = os.dup(near.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, before[1]))
        try:
            with pytest.raises(OSError, match="lifeline"):
                _native.Lifeline(1, given, keys(1, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    near.setblocking(True)
    far.sendall(b"still ours")
    assert near.recv(10) == b"still ours"
    near.close()
    far.close()


def test_lifeline_on_a_closed_descriptor_is_refused():
    near, far = pair()
    far.close()
    number = near.fileno()
    near.close()
    with pytest.raises(OSError, match="lifeline"):
        _native.Lifeline(1, wires([number, -1]), keys(1, 2))


WRONG = {
    "a rank that is not there": ((2, [-1, -1]), {}, "below the number"),
    "a leaf with a leaf": ((1, [-1, -1, 0]), {}, "rank 0 alone"),
    "a hub with itself": ((0, [0, -1]), {}, "itself"),
    "a limit within a beat": (
        (0, [-1, -1]),
        {"beat_ms": 5, "limit_ms": 5},
        "longer than a beat",
    ),
    "no beat": ((0, [-1, -1]), {"beat_ms": 0}, "between"),
    "a limit of years": ((0, [-1, -1]), {"limit_ms": 10**12}, "between"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_lifeline_arguments_are_refused(name):
    (rank, fds), options, match = WRONG[name]
    fds = [fd if fd < 0 else os.dup(fd) for fd in fds]
    with pytest.raises(ValueError, match=match):
        _native.Lifeline(rank, wires(fds), keys(rank, len(fds)), **options)


def test_keys_of_wrong_number_or_size_are_refused():
    with pytest.raises(ValueError, match="two keys"):
        _native.Lifeline(0, [None, None], keys(0, 3))
    with pytest.raises(ValueError, match="16 bytes"):
        _native.Lifeline(1, wires([os.dup(0), -1]), [(b"short", b"short")] * 2)


def test_announcement_of_an_unknown_rank_or_cause_is_refused():
    with Star(2) as star:
        with pytest.raises(ValueError, match="does not exist"):
            star[0].announce_dead(2, "gone")
        with pytest.raises(ValueError, match="no such cause"):
            star[0].announce_dead(1, "bored")


def test_lifeline_of_one_rank_works():
    with Star(1) as star:
        assert star[0].announce_failure(1, 1)
        assert star[0].silence() == [-1]
        time.sleep(0.01)
        assert star.take(0) == []
