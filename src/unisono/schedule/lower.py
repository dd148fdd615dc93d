"""From a schedule to one program per rank.

Inside a host, where ranks can read each other's memory, a transfer becomes a *pull*:
the destination reads its own value and all values that it receives in that step, from
where they are stored, in one pass, in rank order. So a program is a list of actions
of one form,

    wait for some ranks to have done so many actions;
    reduce these sources; write the result to the window, to the output, or to both

and a *publish* is the action whose only source is the rank's own input and whose result
goes to its window, where others read it.

Every value that a slot ever has is a *version* of it, with its own storage (`Home`). A
version that others read has its own place in its rank's window, so it is never
overwritten while a rank reads it, even where two ranks exchange a slot in one step.
Where inputs or outputs are themselves in shared memory, a version can stay there, and
nothing is copied; then the rank that overwrites it waits for its readers first. There,
too, a value of which others only need a copy can be *delivered*: its rank writes it to
their outputs, and they need not read it.

Between hosts a transfer becomes a *message*: its rank sends the version from where it
is stored as soon as it is made, concurrently with other actions, and the source of the
action that reads it is the stream it arrives on. The messages from one rank to another
have one order, that of the actions that read them: by steps, and in a step those first
that were made first, so that what is there need not wait for what is not. A buffer may
be overwritten when its message has been sent. That cannot deadlock: a message is read
in an earlier step than the action that waits until it is sent (otherwise it is sent
from the window, which no rank overwrites), and it is made in an earlier step than it is
read, so the first action in the order of steps can always run: the messages before its
own have been read by actions before it. Any order inside a step will do, as long as
both ends have the same.

With a codec, others read codes instead of values: each has its own place in its rank's
window, and messages are sent from there, too. Nothing is exposed or delivered then.
`coding.py` decides what is encoded, and when.

Programs do not depend on byte counts. An executor cuts the chunks into pieces and runs
the program on each piece in turn.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

from unisono.schedule.coding import Scope, reads_code
from unisono.schedule.coding import settle as settle_codes
from unisono.schedule.program import (
    Action,
    Home,
    Lowered,
    Program,
    Source,
    StreamMessage,
    Wait,
)
from unisono.schedule.schedule import Schedule
from unisono.schedule.versions import Version, has_output, versions


def lower(
    schedule: Schedule,
    *,
    input_shared: bool = False,
    output_shared: bool = False,
    hosts: Sequence[int] | None = None,
    coded: Scope | None = None,
) -> Lowered:
    """The programs of `schedule`, for buffers that others can read, or cannot.

    `hosts` are the numbers of the ranks' hosts; None if there is but one. `coded` is
    between which ranks values are sent as codes; then no buffer is shared.
    """
    with _without_collection():
        return _lowered(schedule, input_shared, output_shared, hosts, coded)


@contextmanager
def _without_collection() -> Iterator[None]:
    """A context without garbage collection.

    Nothing becomes garbage here, and to look through so many new objects again and
    again would take a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _lowered(
    schedule: Schedule,
    input_shared: bool,
    output_shared: bool,
    hosts: Sequence[int] | None,
    coded: Scope | None,
) -> Lowered:
    n = schedule.n
    hosts = hosts or [0] * n
    outputs = has_output(schedule)
    made = versions(schedule, outputs, hosts)
    noise = None
    if coded is not None:
        noise = settle_codes(schedule, made, outputs, coded)
    else:
        _settle(made, outputs, input_shared, output_shared)
    if output_shared and coded is None:
        _deliver(made, n, input_shared, hosts)
    by_rank: list[list[Version]] = [[] for _ in range(n)]
    for v in made:
        by_rank[v.rank].append(v)
    places, codes = zip(*map(_placed, by_rank), strict=True)
    acts = [_numbered(mine, n, hosts) for mine in by_rank]
    messages = _messages(made, n, hosts)
    lead = tuple(sum(v.given and not v.delivers for v in mine) for mine in acts)
    sums = [v for v in made if len(v.sources) > 1]
    programs = [
        _program(r, n, by_rank[r], acts[r], messages[r], lead, hosts) for r in range(n)
    ]
    return Lowered(
        tuple(_with_awaited(programs)),
        places=max(places),
        depth=max((v.step for v in made), default=-1) + 1,
        canonical=all(
            len(v.sources) == n and all(s.given for s in v.sources) for v in sums
        ),
        codes=max(codes),
        noise=noise,
        replicated=any(v.own_as_code for v in made),
    )


def _with_awaited(programs: Sequence[Program]) -> Iterator[Program]:
    """The same programs, which know what other ranks and their messages wait for."""
    awaited = [{message.after for message in p.messages} for p in programs]
    for program in programs:
        for wait in chain(program.exits, *(a.waits for a in program.actions)):
            awaited[wait.rank].add(wait.count)
    for program, counts in zip(programs, awaited, strict=True):
        yield replace(program, awaited=frozenset(counts))


def _placed(mine: Iterable[Version]) -> tuple[int, int]:
    """Number the places of a rank's window, for values and for codes; how many."""
    places = codes = 0
    for v in mine:
        if v.window is not None:
            v.window, places = places, places + 1
        if v.code is not None:
            v.code, codes = codes, codes + 1
    return places, codes


def _settle(
    made: Iterable[Version],
    has_output: Callable[[int, int], bool],
    input_shared: bool,
    output_shared: bool,
) -> None:
    """Give every version its storage: a place in a window, the output, or both."""
    for v in made:
        outputs = has_output(v.rank, v.slot)
        # Where a slot is read and overwritten in one step, its old value must be kept
        # elsewhere: there is no order of the two that would do.
        exchanged = any(
            w.step == v.next_step for w in (*v.local_readers, *v.remote_readers)
        )
        shared = input_shared if v.given else output_shared and outputs
        exposed = bool(v.local_readers) and shared and not exchanged
        sent = bool(v.remote_readers) and (v.given or outputs) and not exchanged
        needs_place = v.at_home and not outputs and not v.given
        if (
            needs_place
            or (v.local_readers and not exposed)
            or (v.remote_readers and not sent)
        ):
            v.window = 0  # numbered when all is settled
        if not v.given:
            kept = (v.at_home or sent) and v.window is None
            v.output = outputs and (v.final or exposed or kept)


def _deliver(
    versions: Sequence[Version], n: int, input_shared: bool, hosts: Sequence[int]
) -> None:
    """Let the holders of an original write the copies, where that spreads the work.

    Sums are delivered even where it makes no difference: they are in the cache.
    """
    slots: dict[tuple[int, int], list[Version]] = defaultdict(list)
    for v in versions:
        slots[v.rank, v.slot].append(v)
    deliverable = [v for v in versions if _deliverable(v, slots[v.rank, v.slot], hosts)]
    if not input_shared:
        deliverable = [v for v in deliverable if not v.sources[0].given]
    for v in _shared_out(deliverable, n):
        (made,) = v.sources
        made.local_readers.remove(v)
        made.delivers.append(v)
        v.delivered, v.output = True, False
        if not made.local_readers and not made.at_home and not made.remote_readers:
            made.window = None  # no rank reads it


def _shared_out(copies: Sequence[Version], n: int) -> Sequence[Version]:
    """Which of the copies to deliver, so that the busiest rank has least to do."""
    fetched = Counter(v.rank for v in copies)
    deliveries = Counter(v.sources[0].rank for v in copies)
    load = [0] * n
    some = []
    for v in copies:
        holder = v.sources[0].rank
        delivers = load[holder] < load[v.rank]
        load[holder if delivers else v.rank] += 1
        some += [v] if delivers else []
    sums = all(len(v.sources[0].sources) > 1 for v in copies)
    ways: list[tuple[int, bool, Sequence[Version]]] = [
        (max(fetched.values(), default=0), sums, ()),
        (max(deliveries.values(), default=0), not sums, copies),
        (max(load), True, some),
    ]
    return min(ways, key=lambda way: way[:2])[2]


def _deliverable(v: Version, slot: Iterable[Version], hosts: Sequence[int]) -> bool:
    """Whether v only copies what another has, into a slot that nothing else reads."""
    if len(v.sources) != 1 or not v.output or v.window is not None or v.at_home:
        return False
    (made,) = v.sources
    return (
        (made.rank != v.rank and made.slot == v.slot)
        and hosts[made.rank] == hosts[v.rank]
        and not v.local_readers
        and not v.remote_readers
        and all(u is v or _read_by_nobody_but(made, u) for u in slot)
    )


def _read_by_nobody_but(reader: Version, v: Version) -> bool:
    return (
        not v.at_home
        and not v.remote_readers
        and all(w is reader for w in v.local_readers)
    )


def _numbered(mine: Iterable[Version], n: int, hosts: Sequence[int]) -> list[Version]:
    """What a rank makes, in its order; inputs are published before anything else.

    Within a step the ranks begin with different peers, so that they do not all read the
    same one; and with those of their own host, while messages are still on the way.
    """

    def turn(v: Version) -> tuple[int, bool, bool, int, int, int]:
        arrives = any(hosts[s.rank] != hosts[v.rank] for s in v.sources)
        delivers = bool(v.delivers) and not arrives
        peers = v.local_readers if v.given else v.sources
        nearest, latest = _nearest(v, peers, n), _latest_step(v, hosts)
        return v.step, arrives, delivers, nearest, latest, v.slot

    acts = [v for v in mine if v.in_window or v.output or v.delivers]
    acts.sort(key=turn)
    for number, v in enumerate(acts):
        v.action = number
    return acts


def _nearest(v: Version, peers: Iterable[Version], n: int) -> int:
    """How far it is to the next of the peers, counting up and around."""
    return min(((w.rank - v.rank) % n for w in peers if w.rank != v.rank), default=0)


def _latest_step(v: Version, hosts: Sequence[int]) -> int:
    """The last step in which something was made that v gets from other hosts."""
    host = hosts[v.rank]
    return max((s.step for s in v.sources if hosts[s.rank] != host), default=-1)


_Turn = tuple[int, int, int, int, int]


def _messages(
    made: Iterable[Version], n: int, hosts: Sequence[int]
) -> list[list[tuple[Version, Version]]]:
    """What each rank sends, and to which reader: in the order of the readers.

    It is that of `_numbered`, for one rank. So the messages to it come as it reads
    them; those to one reader are in the order of its sources. Those of one step go to
    different ranks at the same time, or all would send to rank 0 first: what is in a
    socket leaves before what comes later.
    """
    sent: list[list[tuple[_Turn, Version, Version]]] = [[] for _ in range(n)]
    for w in made:
        remote = [s for s in w.sources if hosts[s.rank] != hosts[w.rank]]
        if not remote:
            continue
        nearest, latest = _nearest(w, w.sources, n), _latest_step(w, hosts)
        for s in remote:
            turn = w.step, nearest, (w.rank - s.rank) % n, latest, w.slot
            sent[s.rank].append((turn, s, w))
    for mine in sent:
        mine.sort(key=lambda message: message[0])
        count: Counter[int] = Counter()
        for _, v, w in mine:
            v.messages[w.rank] = count[w.rank]
            count[w.rank] += 1
    return [[(v, w) for _, v, w in mine] for mine in sent]


def _program(
    rank: int,
    n: int,
    mine: Sequence[Version],
    acts: Sequence[Version],
    sent: Sequence[tuple[Version, Version]],
    lead: tuple[int, ...],
    hosts: Sequence[int],
) -> Program:
    exposed: dict[int, list[Version]] = defaultdict(list)
    for v in mine:
        if (v.local_readers or v.remote_readers) and not v.in_window:
            exposed[v.slot].append(v)
    known: dict[int, int] = {}
    arrived: Counter[int] = Counter()
    actions = [_action(v, n, exposed[v.slot], known, arrived, hosts) for v in acts]
    # What is given and already the result must only be copied to the output.
    kept = [v for v in mine if v.given and v.final and v.action < 0]
    actions += [
        Action(v.chunk, (_source(v, v),), None, v.slot, (), completes=False)
        for v in kept
    ]
    windowed = [v for v in mine if v.in_window]
    all_exposed = [v for some in exposed.values() for v in some]
    exposed_to = [w for v in all_exposed for w in v.local_readers]
    delivered_from = [v.sources[0] for v in mine if v.delivered]
    messages = tuple(_message(v, w) for v, w in sent)
    left = Counter(m.to for m in messages)
    return Program(
        rank,
        tuple(actions),
        awaited=frozenset(),  # known when all programs are
        lead=lead,
        readers=tuple(
            sorted(
                {
                    w.rank
                    for v in windowed
                    for w in (*v.local_readers, *v.remote_readers)
                }
                - {rank}
            )
        ),
        exits=_merged(rank, exposed_to + delivered_from, {})
        + tuple(Wait(*each) for each in sorted(left.items())),
        messages=messages,
    )


def _message(v: Version, reader: Version) -> StreamMessage:
    """The message that sends v to a reader, from where it is stored."""
    if v.code is not None:
        home, index = Home.CODE, v.code
    elif v.window is not None:
        home, index = Home.WINDOW, v.window
    else:
        home, index = Home.INPUT if v.given else Home.OUTPUT, v.slot
    # The input is there before anything is done, unless it leaves from the window.
    after = 0 if home is Home.INPUT else v.action + 1
    return StreamMessage(reader.rank, v.chunk, Source(home, v.rank, index), after)


def _action(
    v: Version,
    n: int,
    exposed: Sequence[Version],
    known: dict[int, int],
    arrived: Counter[int],
    hosts: Sequence[int],
) -> Action:
    if v.given:
        output = v.slot if v.final else None
        own, delivers = (_source(v, v),), tuple(w.rank for w in v.delivers)
        return Action(
            v.chunk, own, v.window, output, (), False, delivers, v.code, v.back
        )
    here = [s for s in v.sources if hosts[s.rank] == hosts[v.rank]]
    awaited = [s for s in here if s.action >= 0]
    leaving: list[Version] = []
    if v.output:  # those who read what lies there now must have done so
        earlier = [u for u in exposed if u.step < v.step]
        awaited += [w for u in earlier for w in u.local_readers]
        leaving = [u for u in earlier if u.remote_readers]
    sources = []
    for s in v.sources:
        if hosts[s.rank] == hosts[v.rank]:
            sources.append(_source(s, v))
        else:
            sources.append(Source(Home.STREAM, s.rank, arrived[s.rank]))
            arrived[s.rank] += 1
    return Action(
        v.chunk,
        tuple(sources),
        v.window,
        v.slot if v.output else None,
        _merged(v.rank, awaited, known) + _left(leaving, known),
        completes=len(v.sources) > 1 and v.contributors == n,
        delivers=tuple(w.rank for w in v.delivers),
        code=v.code,
        back=v.back,
    )


def _left(leaving: Iterable[Version], known: dict[int, int]) -> tuple[Wait, ...]:
    """The messages with these versions must have left."""
    latest: dict[int, int] = {}
    for v in leaving:
        for to, number in v.messages.items():
            if number >= known.get(to, 0):
                latest[to] = max(latest.get(to, 0), number + 1)
    known.update(latest)
    return tuple(Wait(to, count) for to, count in sorted(latest.items()))


def _source(v: Version, reader: Version) -> Source:
    """Where `reader` finds v; a rank reads its own input rather than its window."""
    at_home = (v.rank, v.slot) == (reader.rank, reader.slot)
    if v.code is not None and reader is not v and reads_code(v, reader):
        return Source(Home.CODE, v.rank, v.code)
    if v.window is not None and not (v.given and at_home):
        return Source(Home.WINDOW, v.rank, v.window)
    return Source(Home.INPUT if v.given else Home.OUTPUT, v.rank, v.slot)


def _merged(
    rank: int, awaited: Iterable[Version], known: dict[int, int]
) -> tuple[Wait, ...]:
    """One wait per other rank, for the latest of what is awaited and not yet known."""
    latest: dict[int, int] = {}
    for v in awaited:
        if v.rank != rank and v.action >= known.get(v.rank, 0):
            latest[v.rank] = max(latest.get(v.rank, 0), v.action + 1)
    known.update(latest)
    return tuple(Wait(r, count) for r, count in sorted(latest.items()))
