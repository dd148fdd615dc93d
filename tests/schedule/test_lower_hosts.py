"""Programs across hosts: messages between them, and everything else as within one."""

from random import Random

import pytest
from lowering import MODES, call, expected, mean, schedules
from variants import VARIANTS, as_cases

from program_player import ProgramFault, play
from unisono import schedule
from unisono.algorithms import library
from unisono.schedule.lower import lower
from unisono.schedule.program import Home

PLAIN = list(library())
SPECIAL = [v for v in VARIANTS if v not in PLAIN]


def placed(n: int, random: Random) -> tuple[int, ...]:
    """Ranks on hosts in any order: one each, or any number."""
    if random.random() < 0.3:
        return tuple(range(n))
    count = random.randint(2, max(2, n - 1))
    return tuple(random.randrange(count) for _ in range(n))


def check(made, mode, hosts, seed):
    one = call(made, mode, seed, hosts=hosts)
    assert play([one], mean(made.n), seed=seed)[0] == expected(made, one.inputs)


@pytest.mark.cases(2)
@pytest.mark.quick(worlds=[[2, 3, 5]])
@pytest.mark.parametrize("worlds", [[2, 3, 5], [4, 8]], ids=str)
@pytest.mark.parametrize(("what", "name"), PLAIN)
def test_programs_do_what_their_schedule_says_on_any_hosts(what, name, worlds):
    random = Random(f"{what} {name}")
    for made in schedules(what, name, worlds):
        check(made, (True, True), tuple(range(made.n)), seed=made.n)
        for mode in MODES if made.n < 8 else [random.choice(MODES)]:
            check(made, mode, placed(made.n, random), seed=made.n)


@pytest.mark.quick(worlds=[[2, 5]])
@pytest.mark.parametrize("worlds", [[2, 5], [3, 8]], ids=str)
@pytest.mark.parametrize(("what", "name"), as_cases(SPECIAL))
def test_programs_with_parameters_do_what_their_schedule_says_on_any_hosts(
    what, name, worlds
):
    random = Random(f"{what} {name}")
    for made in schedules(what, name, worlds):
        for mode in (MODES[0], MODES[3]):
            check(made, mode, placed(made.n, random), seed=made.n)


@pytest.mark.quick(seeds=[range(15)])
@pytest.mark.parametrize("seeds", [range(15), range(15, 60)], ids=str)
def test_calls_follow_each_other_on_the_same_streams_and_windows(seeds):
    for seed in seeds:
        random = Random(seed)
        n = random.randint(2, 6)
        hosts = placed(n, random)
        made = [schedule(*random.choice(PLAIN), n) for _ in range(4)]
        made = [s.rooted_at(random.randrange(n)) for s in made]
        calls = [
            call(s, random.choice(MODES), seed + i, hosts=hosts)
            for i, s in enumerate(made)
        ]
        found = play(calls, mean(n), seed=seed)
        assert found == [
            expected(s, c.inputs) for s, c in zip(made, calls, strict=True)
        ]


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "direct", "hierarchical"])
def test_programs_read_no_memory_of_other_hosts_and_modes_agree_on_messages(name):
    """Each host decides which buffers are exposed; the streams stay the same."""
    hosts = (0, 0, 1, 1, 2, 0, 1)
    made = schedule("all_reduce", name, len(hosts))
    sent, read = set(), set()
    for input_shared, output_shared in MODES:
        programs = lower(
            made, input_shared=input_shared, output_shared=output_shared, hosts=hosts
        ).programs
        for program in programs:
            sources = [s for a in program.actions for s in a.sources]
            for s in sources:
                assert (s.home is Home.STREAM) == (hosts[s.rank] != hosts[program.rank])
            assert all(hosts[m.to] != hosts[program.rank] for m in program.messages)
        sent.add(tuple(tuple((m.to, m.chunk) for m in p.messages) for p in programs))
        read.add(
            tuple(
                tuple(s for a in p.actions for s in a.sources if s.home is Home.STREAM)
                for p in programs
            )
        )
    assert len(sent) == len(read) == 1


def test_one_rank_per_host_uses_no_windows():
    for name in ("ring", "direct", "halving_doubling"):
        made = schedule("all_reduce", name, 8)
        lowered = lower(
            made, input_shared=True, output_shared=True, hosts=tuple(range(8))
        )
        assert lowered.places == 0


def test_buffer_reused_before_its_messages_are_sent_is_detected():
    """The machine that plays programs is not blind to what leaves."""
    made = schedule("broadcast", "naive", 4)
    one = call(made, (True, True), 1, hosts=(0, 1, 2, 3))
    play([one], mean(4))
    for program in one.lowered.programs:
        object.__setattr__(program, "exits", ())

    def often():
        for seed in range(20):
            play([one], mean(4), seed=seed)

    with pytest.raises(ProgramFault, match="while"):
        often()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("reduce_scatter", "direct"),
        ("all_reduce", "naive"),
        ("all_gather", "direct"),
        ("all_to_all", "direct"),
    ],
)
def test_messages_of_a_step_go_to_different_ranks_at_the_same_time(what, name):
    """Or all would send to rank 0 first, and the others' links had nothing to do."""
    made = lower(schedule(what, name, 5), hosts=tuple(range(5)))
    sent = [[message.to for message in p.messages] for p in made.programs]
    for turn in zip(*sent, strict=True):
        assert sorted(turn) == [0, 1, 2, 3, 4]
