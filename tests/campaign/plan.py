"""What a trial is, and how it follows from a seed and a number.

A trial is the life of one world: phases of work, each with a disturbance or none, with
fewer ranks after most of them, until one is left or the plan ends. Ranks have an *id*,
the number they were started with, which they keep when the world renumbers them.
"""

import random
from dataclasses import dataclass

KILLS = ("kill", "kill_two", "kill_in_shrink", "kill_at_failpoint")
LOSSES = (*KILLS, "close", "stop", "partition")
"""Disturbances after which some ranks are gone."""
SHORTAGES = ("descriptors", "memory")
"""Disturbances after which the victim has hardly any of it."""
BREAKS = (*LOSSES, "interrupt", *SHORTAGES)
"""Disturbances after which calls fail, so that the ranks shrink."""
HEALS = ("quiet", "pause", "fork_exit", "fork_hold", "short_partition")
"""Disturbances that no rank may notice."""
SELF = ("close", "fork_exit", "fork_hold", *SHORTAGES)
"""Disturbances that the victim causes itself, on request."""

LONG_S = 60.0
"""What calls may take where nothing is to run out of time."""

FAILPOINTS = (
    *("call.begin", "lead.done", "arrive.posted", "arrive.seen", "action.begin"),
    *("action.done", "deliver", "generation.done", "call.end", "segment.make"),
    *("segment.announce", "send.header", "send.part", "recv.part"),
)
MESSAGE_FAILPOINTS = ("send.header", "send.part", "recv.part")
"""Those that only a message of `send` passes."""
STREAM_FAILPOINTS = ("message.offered", "stream.send", "stream.receive")

_WEIGHTS = {
    "kill": 40,
    "kill_two": 8,
    "kill_in_shrink": 8,
    "kill_at_failpoint": 14,
    "quiet": 4,
    "pause": 3,
    "fork_exit": 4,
    "fork_hold": 3,
    "interrupt": 6,
    "close": 5,
    "descriptors": 2,
    "memory": 2,
    "stop": 0.6,
}


@dataclass(frozen=True)
class Phase:
    """Work until `strike` has had its effect, or for some turns if it has none.

    `victims` are ids. It happens `after_s` seconds after all have begun, or in turn
    number `turn` if the victim does it itself, or at the `hit`-th passage of a
    failpoint. With `prompt` ranks shrink as soon as they have an error; without, when
    all have one, so that each error names a victim and nobody else. With `grow` so many
    newcomers come afterwards.
    """

    strike: str
    victims: tuple[int, ...] = ()
    after_s: float = 0.0
    turn: int = 0
    turns: int = 0
    failpoint: str = ""
    hit: int = 1
    prompt: bool = False
    grow: int = 0
    side: tuple[int, ...] = ()
    """In a partition, the hosts on the one side."""

    @property
    def timeout_s(self):
        """How long calls may take.

        Long where nobody may run into it: it can take 5 s until a rank of another host
        counts as gone that has left, and as long again for whoever waits for one that
        waits for it.
        """
        return 5.0 if self.strike in ("stop", *SHORTAGES) else LONG_S

    @property
    def has_messages(self):
        """Whether ranks send each other messages.

        A send or receive that fails breaks nothing for others: whoever waits for a
        message of a rank that has failed waits until that one leaves, and is late in
        the next collective as well as the victim.
        """
        return self.strike not in BREAKS or (self.prompt and self.strike != "stop")


@dataclass(frozen=True)
class Trial:
    """A world and its phases; `hosts` has the host of each rank, () for one host."""

    seed: int
    number: int
    kind: str
    n: int
    hosts: tuple[int, ...]
    tls: bool
    large: bool
    phases: tuple[Phase, ...]
    only: tuple[str, ...] = ()

    @property
    def again(self):
        """How to run it once more."""
        only = f" --only {' '.join(self.only)}" if self.only else ""
        return f"python tests/campaign --seed {self.seed} --trial {self.number}{only}"


def draw(seed, number, *, namespaces=False, only=()):
    """The trial of that number; `namespaces` tells whether there can be some.

    `only` are the disturbances that are wanted, all if there are none.
    """
    rng = random.Random(f"{seed}/{number}")
    kinds = ["processes"] * 10 + ["hosts"] * 6 + ["threads"]
    kind = rng.choice(kinds + ["namespaces"] * namespaces)
    n = rng.choice((2, 3, 3, 4, 4, 5, 6, 7, 8))
    if kind == "namespaces":
        n = min(n, 5)
    hosts = ()
    if kind in ("hosts", "namespaces") or (kind == "threads" and rng.random() < 0.5):
        # Every host has a rank, and a world of hosts has two at least.
        count = rng.randint(2, min(n, 4))
        hosts = [*range(count), *(rng.randrange(count) for _ in range(n - count))]
        if rng.random() < 0.7:
            hosts.sort()
        else:
            rng.shuffle(hosts)
        hosts = tuple(hosts)
    phases = _phases(rng, kind, n, hosts, only)
    return Trial(
        seed=seed,
        number=number,
        kind=kind,
        n=n,
        hosts=hosts,
        tls=bool(hosts) and rng.random() < 0.2,
        large=rng.random() < 0.1,
        phases=tuple(phases),
        only=tuple(only),
    )


def _phases(rng, kind, n, hosts, only):
    if kind == "threads":
        return [_thread_phase(rng, n) for _ in range(rng.randint(1, 3))]
    living, born = list(range(n)), n
    phases = []
    while len(living) > 1 and len(phases) < 12:
        phase = _phase(rng, kind, living, hosts, only)
        gone = phase.victims if phase.strike in LOSSES else ()
        living = [r for r in living if r not in gone]
        if phase.strike in BREAKS and kind != "namespaces" and rng.random() < 0.08:
            more = rng.randint(1, 2)
            phase = _with(phase, grow=more)
            living += range(born, born + more)
            born += more
        phases.append(phase)
        if phase.strike == "partition":
            break
    return phases


def _phase(rng, kind, living, hosts, only):
    strike = _strike(rng, kind, living, hosts, only)
    some = 2 if strike in ("kill_two", "kill_in_shrink") else 1
    phase = Phase(
        strike,
        victims=tuple(rng.sample(living, some)) if strike != "quiet" else (),
        after_s=rng.choice((0.0, 0.001, 0.02)) * rng.random(),
        turn=rng.randrange(6),
        turns=rng.randint(3, 12),
        prompt=strike in ("kill_in_shrink", "interrupt", *SHORTAGES)
        or rng.random() < 0.5,
    )
    if strike == "kill_at_failpoint":
        points = FAILPOINTS + STREAM_FAILPOINTS * bool(hosts)
        hit = rng.choice((1, 1, 2, 3, 5, 8))
        point = rng.choice(points)
        prompt = phase.prompt or point in MESSAGE_FAILPOINTS
        return _with(phase, failpoint=point, hit=hit, prompt=prompt)
    if strike == "close" and hosts and _may_be_first(phase.victims[0], living, hosts):
        # Through rank 0 ranks hear of each other's failures: after it has left they
        # learn of them only when others leave, too.
        return _with(phase, prompt=True)
    if strike in ("partition", "short_partition"):
        return _parted(rng, phase, living, hosts)
    return phase


def _may_be_first(one, living, hosts):
    """Whether this is rank 0: new ranks come after all others, in any order."""
    first = min(living)
    return one == first or first >= len(hosts)


def _strike(rng, kind, living, hosts, only):
    weights = dict(_WEIGHTS)
    if kind == "namespaces":
        weights |= {"partition": 20, "short_partition": 20}
    if len(living) < 3:
        for name in ("kill_two", "kill_in_shrink", "stop"):
            weights.pop(name)
    if len({hosts[r] for r in living if r < len(hosts)}) < 2:
        weights.pop("partition", None)
        weights.pop("short_partition", None)
    wanted = {name: w for name, w in weights.items() if not only or name in only}
    wanted = wanted or {"quiet": 1}
    return rng.choices(list(wanted), list(wanted.values()))[0]


def _parted(rng, phase, living, hosts):
    """Two sides; those of the lighter one are the victims."""
    places = sorted({hosts[r] for r in living})
    side = rng.sample(places, rng.randint(1, len(places) - 1))
    inside = [r for r in living if hosts[r] in side]
    outside = [r for r in living if hosts[r] not in side]
    lighter = inside if outweighs(outside, living) else outside
    return _with(phase, side=tuple(side), victims=tuple(lighter), turns=40)


def outweighs(some, living):
    """Whether these may continue without the others: a majority, or half with rank 0.

    `living` are in the order of their ranks.
    """
    return 2 * len(some) > len(living) or (
        2 * len(some) == len(living) and living[0] in some
    )


def _thread_phase(rng, n):
    strike = rng.choice(("quiet", "raise"))
    victims = (rng.randrange(n),) if strike == "raise" else ()
    return Phase(strike, victims, turn=rng.randrange(6), turns=rng.randint(3, 12))


def _with(phase, **changes):
    return Phase(**(phase.__dict__ | changes))
