"""What a probe of links does burst by burst and call by call, without a network.

Clocks are made up: what takes time here says so.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from unisono.errors import CollectiveTimeout, PeerLost
from unisono.runtime.world import bursts, links
from unisono.testing import world


class Clock:
    """Time that passes as it is told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        read = SimpleNamespace(perf_counter=self.read, monotonic=self.read)
        monkeypatch.setattr(links, "time", read)

    def read(self):
        return self.now


class Given:
    """A work that ends at a given time, or with an error."""

    def __init__(self, clock, ends, error=None):
        self.clock, self.ends, self.error = clock, ends, error
        self.may_drop = False

    def allow_drop(self):
        self.may_drop = True

    def done(self):
        return self.clock.now >= self.ends

    def wait(self, timeout_s=None):
        if self.error:
            raise self.error
        until = self.ends if timeout_s is None else self.clock.now + timeout_s
        self.clock.now = max(self.clock.now, min(until, self.ends))
        if not self.done():
            raise CollectiveTimeout("later", ranks=[], collective="recv", seq=0)


class Messages:
    """A communicator whose messages arrive so many seconds after they are awaited."""

    def __init__(self, clock, bytes_after, question_after, error=None):
        self.clock, self.error, self.works = clock, error, []
        self.after = {links._TAG: bytes_after, links._TAG - 1: question_after}

    def recv(self, out, src, *, tag, async_op, timeout_s):
        return self._work(self.after[tag], self.error)

    def send(self, x, dst, *, tag, async_op, timeout_s):
        return self._work(0.0)

    def _work(self, after, error=None):
        self.works.append(Given(self.clock, self.clock.now + after, error))
        return self.works[-1]


def burst_of(comm):
    room = np.ones((2, bursts.SHORT), np.uint8)
    return links._burst(comm, 1, 2, *room, 60.0)


@pytest.mark.parametrize(
    ("bytes_after", "question_after"), [(2e-3, 1e-3), (2e-3, 50e-3), (50e-3, 2e-3)]
)
def test_rank_that_asks_late_does_not_make_the_bytes_of_another_later(
    monkeypatch, bytes_after, question_after
):
    comm = Messages(Clock(monkeypatch), bytes_after, question_after)
    assert burst_of(comm) == pytest.approx(bytes_after, rel=0.1)
    assert all(work.done() for work in comm.works)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost("gone", ranks=[1])])
def test_interrupted_burst_leaves_nothing_that_warns(monkeypatch, error):
    comm = Messages(Clock(monkeypatch), 1.0, 1.0, error)
    with pytest.raises(type(error)):
        burst_of(comm)
    assert len(comm.works) == 3
    assert all(work.may_drop for work in comm.works)


class Alone:
    """A communicator of one rank of `n`, whose calls take `each` seconds."""

    rank = 0

    def __init__(self, clock, n, each=0.0):
        self.clock, self.world_size, self.each = clock, n, each
        self.hosts = tuple(range(n))
        self.limits = []

    def all_reduce(self, values, *, op, algorithm, timeout_s):
        self.limits.append(timeout_s)
        self.clock.now += self.each
        return values.copy()


def test_all_calls_of_a_probe_end_within_its_time(monkeypatch):
    clock = Clock(monkeypatch)
    comm = Alone(clock, 2, each=4.0)
    ranks = links.Ranks(comm, 10.0)
    ranks.meet()
    ranks.quickest()
    assert comm.limits == pytest.approx([10.0, 6.0, 2.0])
    assert ranks.limit_s == links._LEAST_LIMIT_S


def test_error_says_that_links_were_probed_and_how_to_skip_it(monkeypatch):
    comm = Alone(Clock(monkeypatch), 2)
    comm.all_reduce = Mock(side_effect=PeerLost("gone", ranks=[1]))
    with pytest.raises(PeerLost) as caught:
        links.probed(comm, 10.0)
    assert "UNISONO_PROBE=0 skips that" in caught.value.__notes__[0]


def test_call_counts_with_its_slowest_rank_and_the_quickest_call_is_taken(monkeypatch):
    """A rank that comes last finds all there, and takes no time itself."""
    clock = Clock(monkeypatch)
    comm = Alone(clock, 2)
    ranks = links.Ranks(comm, 10.0)
    mine, others = [0.0, 5e-3, 3e-3], [4e-3, 0.0, 2e-3]
    for comm.each in mine:
        ranks.most(np.zeros(1))
    monkeypatch.setattr(ranks, "most", lambda values: np.maximum(values, others))
    assert ranks.quickest() == pytest.approx(3e-3)


def test_nobody_is_asked_once_nothing_is_left(monkeypatch):
    clock = Clock(monkeypatch)
    comm = Alone(clock, 2)
    ranks = links.Ranks(comm, 10.0)
    assert not ranks.can(2 * links.BUDGET_S)  # for so much there is no time
    assert ranks.can(links.BUDGET_S / 2)
    clock.now += 2 * links.BUDGET_S
    calls = len(comm.limits)
    assert [ranks.can(0.0), ranks.can(0.0), ranks.left < 0] == [False, False, True]
    assert len(comm.limits) == calls + 1


@pytest.mark.parametrize(
    ("lasts", "made"),
    [
        (6e-3, 4),  # begun at 0, 6 and 12 ms, and the other shift's first at 18
        (12e-3, 2),  # at 24 ms there are 16 left, of which 10 are kept
        (35e-3, 1),
    ],
)
def test_bursts_leave_the_time_that_is_kept(monkeypatch, lasts, made):
    clock, begun = Clock(monkeypatch), []
    comm = Alone(clock, 3)

    def burst(comm, dst, src, sent, taken, timeout_s):
        assert sent.all()
        assert taken.all()  # its memory is there before bytes arrive
        begun.append(src)
        clock.now += lasts
        return lasts

    monkeypatch.setattr(links, "_burst", burst)
    ranks = links.Ranks(comm, 10.0)
    sizes = {(a, b): 1 << 16 for a in range(3) for b in range(3) if a != b}
    links._exchanged(ranks, [0, 1, 2], [1, 2], sizes, 3, expected=lasts, kept=10e-3)
    assert len(begun) == made


@pytest.mark.parametrize(
    ("budget", "made"),
    [
        (0.0, 2),  # of the other shift's neither
        (25e-3, 1 + bursts.REPEATS),  # the other shift's begin at 18, and take 9
        (28e-3, 1 + bursts.REPEATS + 2),  # what opens, and a short one
        (1.0, 2 * (1 + bursts.REPEATS)),
    ],
)
def test_burst_that_opens_connections_says_nothing(monkeypatch, budget, made):
    """It takes 9 ms, a short one 1 ms; without time there is a short one yet."""
    clock, begun = Clock(monkeypatch), []
    monkeypatch.setattr(links, "BUDGET_S", budget)
    comm = Alone(clock, 3, each=1e-3)

    def burst(comm, dst, src, sent, taken, timeout_s):
        lasts = 1e-3 if src in begun else 9e-3
        begun.append(src)
        clock.now += lasts
        return lasts

    monkeypatch.setattr(links, "_burst", burst)
    ranks = links.Ranks(comm, 10.0)
    ranks.meet()
    shifts, short = [1, 2], bursts.REPEATS
    found, _ = links._exchanged(
        ranks, [0, 1, 2], shifts, None, short, expected=0.0, kept=0.0
    )
    assert len(begun) == made
    assert list(found) == [(2, 0), (1, 0)][: 1 + (budget > 25e-3)]
    assert list(found.values()) == pytest.approx([1e-3] * len(found))


@pytest.mark.parametrize(
    ("opening", "asked", "longest"),
    [
        (1e-3, {1, 2, 3}, 200),
        (5e-3, {1, 2, 3}, 180),
        (11e-3, {1}, 80),  # half of the time does not suffice for one other
    ],
)
def test_other_pairs_have_time_if_it_suffices(monkeypatch, opening, asked, longest):
    """Links of 200 Mbit/s, and an opening; the longest burst is in KiB, at least."""
    clock, begun = Clock(monkeypatch), []

    def burst(comm, dst, src, sent, taken, timeout_s):
        lasts = 4e-4 + taken.size / 25e6 if src in {b[0] for b in begun} else opening
        begun.append((src, taken.size))
        clock.now += lasts
        return lasts

    monkeypatch.setattr(links, "_burst", burst)
    monkeypatch.setattr(bursts.Bursts, "differ", lambda found: True)
    ranks = links.Ranks(Alone(clock, 4, each=1e-4), 10.0)
    found, _ = links._bursts(ranks)
    assert {(0 - src) % 4 for src, _ in begun} == asked
    assert max(size for src, size in begun if src == 3) >= longest << 10
    assert found[3, 0] == pytest.approx(1 / 25e6, rel=0.01)
    assert ranks.left > -3e-3


def test_small_calls_leave_time_for_bursts(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(links, "BUDGET_S", links.BURSTS_S + 20e-3)

    def seconds(*call):
        clock.now += 6e-3
        return 1e-4

    monkeypatch.setattr(links, "_seconds", seconds)
    ranks = links.Ranks(Alone(clock, 4), 10.0)
    assert links._small_calls(ranks) == [1e-4] * 3
    assert ranks.left >= links.BURSTS_S
    clock.now += 3e-3
    assert links._small_calls(ranks) == []


@pytest.mark.parametrize(("n", "calls"), [(8, 4), (32, 4), (256, 1), (1000, 1)])
def test_small_calls_whose_plans_take_too_long_are_not_made(monkeypatch, n, calls):
    monkeypatch.setattr(links, "_seconds", lambda *call: 1e-4)
    ranks = links.Ranks(Alone(Clock(monkeypatch), n), 10.0)
    assert links._small_calls(ranks) == [1e-4] * calls


def test_each_of_nine_hosts_asks_those_one_two_four_and_eight_further(monkeypatch):
    """As if links of the first host were slower, for all ranks are threads here."""
    n, asked = 9, [set() for _ in range(9)]
    whole = links._burst

    def burst(comm, dst, src, sent, taken, timeout_s):
        whole(comm, dst, src, sent, taken, timeout_s)
        asked[comm.rank].add((src, dst))
        return 1e-4 + taken.size * (1e-6 if src == 0 else 1e-7)

    monkeypatch.setattr(links, "_burst", burst)
    monkeypatch.setattr(links, "BUDGET_S", 1e9)
    monkeypatch.setattr(bursts, "LONGEST", bursts.FIRST)
    with world(n, hosts=range(n), timeout_s=120.0) as threads:
        models = threads.run(links.probed, 120.0)
    for rank, peers in enumerate(asked):
        assert peers == {((rank - k) % n, (rank + k) % n) for k in (1, 2, 4, 8)}
    assert len(set(models)) == 1
    assert models[0].leaving == pytest.approx([1e-6] + [1e-7] * 8)
