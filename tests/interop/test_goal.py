"""GOAL text: replayed by a small reader that knows the format and nothing of us."""

import re

import pytest

import unisono
from unisono.errors import BadArgument
from unisono.interop import goal


def parsed(text):
    """The operations and requirements of every rank."""
    head, *ranks = re.split(r"(?m)^rank (\d+) \{$", text)
    count = int(re.fullmatch(r"num_ranks (\d+)\s*", head)[1])
    ops, needs = {}, {}
    for rank, body in zip(ranks[::2], ranks[1::2], strict=True):
        for line in body.replace("}", "").split("\n"):
            if found := re.fullmatch(r"(l\d+): (.*)", line):
                ops[int(rank), found[1]] = found[2]
            elif found := re.fullmatch(r"(l\d+) requires (l\d+)", line):
                needs.setdefault((int(rank), found[1]), []).append(found[2])
            else:
                assert not line
    assert count == len(ranks) // 2
    return ops, needs


def replay(text):
    """Run to the end, eagerly; the operations in the order they happened."""
    ops, needs = parsed(text)
    done, arrived, order = set(), set(), []
    while len(done) < len(ops):
        before = len(done)
        for (rank, label), what in ops.items():
            waits = [(rank, need) for need in needs.get((rank, label), [])]
            if (rank, label) in done or not done.issuperset(waits):
                continue
            words = what.split()
            if words[0] == "send":
                arrived.add((rank, int(words[3]), words[1], words[5]))
            message = (int(words[3]), rank, words[1], words[5]) if len(words) > 4 else 0
            if words[0] == "recv" and message not in arrived:
                continue
            done.add((rank, label))
            order.append((rank, what))
        assert len(done) > before, "stuck"
    return order


@pytest.mark.parametrize(
    ("collective", "algorithm", "n"),
    [
        ("all_reduce", "ring", 4),
        ("all_reduce", "rabenseifner", 5),
        ("all_reduce", "direct", 4),
        ("all_to_all", "bruck", 6),
        ("broadcast", "chain", 4),
        ("barrier", "dissemination", 5),
    ],
)
def test_every_message_is_sent_and_received_and_nothing_gets_stuck(
    collective, algorithm, n
):
    schedule = unisono.schedule(collective, algorithm, n=n)
    order = replay(goal.dumps(schedule, 1200))
    sends = [what for _, what in order if what.startswith("send")]
    cost = schedule.cost(1200)
    assert len(sends) == cost.messages
    assert sum(int(s.split()[1][:-1]) for s in sends) == cost.sent.sum()


def test_reductions_take_time_and_dependents_wait():
    text = goal.dumps(unisono.schedule("all_reduce", "ring", n=3), 3000, reduce=1e-9)
    ops, needs = parsed(text)
    assert sum(what == "calc 1000" for what in ops.values()) == 6
    for (rank, label), what in ops.items():
        if what.startswith("calc"):
            (need,) = needs[rank, label]
            assert ops[rank, need].startswith("recv")


def test_simplest_file_follows_the_format():
    text = goal.dumps(unisono.schedule("broadcast", "chain:segments=1", n=3), 8)
    assert text.split("\n") == [
        *("num_ranks 3", "", "rank 0 {", "l1: send 8b to 1 tag 0", "}", ""),
        *("rank 1 {", "l1: recv 8b from 0 tag 0", "l2: send 8b to 2 tag 1"),
        *("l2 requires l1", "}", "", "rank 2 {", "l1: recv 8b from 1 tag 1", "}", ""),
    ]


def test_bad_sizes_are_refused(tmp_path):
    schedule = unisono.schedule("all_reduce", "ring", n=3)
    with pytest.raises(BadArgument, match="negative"):
        goal.dumps(schedule, -1)
    goal.save(schedule, tmp_path / "ring.goal", 12)
    assert (tmp_path / "ring.goal").read_text().startswith("num_ranks 3")
