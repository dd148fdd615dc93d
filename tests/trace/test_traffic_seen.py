"""Links between two looks: who sends how much to whom, and from host to host."""

from unisono.trace.links import TrafficTable, links_of


def answer(*groups, time_s=1.0, hosts=(0, 0, 1), names=("a", "a", "b")):
    result = [
        {"name": name, "ranks": ranks, "sent_to": sent, "guessed": guessed}
        for name, ranks, sent, guessed in groups
    ]
    return {
        "time_ns": int(time_s * 1e9),
        "hosts": list(hosts),
        "names": list(names),
        "groups": result,
    }


WORLD = "world", [0, 1, 2]


def test_links_are_sorted_by_rate_on_each_ranks_clock():
    first = {
        0: answer((*WORLD, [0, 100, 40], 0), time_s=1.0),
        1: answer((*WORLD, [900, 0, 0], 0), time_s=5.0),
    }
    then = {
        0: answer((*WORLD, [0, 300, 640], 0), time_s=3.0),
        1: answer((*WORLD, [1000, 0, 8], 0), time_s=6.0),
    }
    before = links_of(first)
    assert all(link.rate is None for link in before.links)
    assert [(link.src, link.dst) for link in before.links] == [(1, 0), (0, 1), (0, 2)]
    seen = links_of(then, before)
    result = [(link.src, link.dst, link.near, link.rate) for link in seen.links]
    assert result == [
        (0, 2, False, 300.0),
        (1, 0, True, 100.0),
        (0, 1, True, 100.0),
        (1, 2, False, 8.0),
    ]
    assert [(p.src, p.dst, p.links, p.sent, p.rate) for p in seen.hosts] == [
        ("a", "b", 2, 648, 308.0),
        ("a", "a", 2, 1300, 200.0),
    ]


def test_communicators_are_added_up_and_may_come_and_go():
    first = {0: answer((*WORLD, [0, 10, 0], 3), ("dp", [0, 2], [0, 500], 0))}
    then = {
        0: answer((*WORLD, [0, 20, 30], 9), ("tp", [0, 1], [0, 7], 0), time_s=2.0),
    }
    before = links_of(first)
    assert {(link.dst, link.sent) for link in before.links} == {(1, 10), (2, 500)}
    seen = links_of(then, before)
    assert {(link.dst, link.sent) for link in seen.links} == {(1, 27), (2, 30)}
    assert {(link.dst, link.rate) for link in seen.links} == {(1, 17.0), (2, 30.0)}
    assert seen.guessed == 6
    anew = links_of({0: answer((*WORLD, [0, 4, 0], 0), time_s=3.0)}, seen)
    assert [(link.dst, link.rate) for link in anew.links] == [(1, 4.0)]


def test_hosts_of_one_name_are_distinguished():
    result = {0: answer((*WORLD, [0, 1, 2], 0), names=("same", "same", "same"))}
    assert [(p.src, p.dst) for p in links_of(result).hosts] == [
        ("host 0", "host 1"),
        ("host 0", "host 0"),
    ]


def test_ranks_without_an_answer_are_listed():
    assert links_of({}) == TrafficTable()
    result = {0: None, 1: {"error": "KeyError: 7"}, 2: answer((*WORLD, [5, 0, 0], 0))}
    seen = links_of(result)
    assert seen.missing == (0, 1)
    assert [(link.src, link.dst) for link in seen.links] == [(2, 0)]
