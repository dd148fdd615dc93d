"""What a step does, in one sentence.

    Every rank sends one chunk to the next rank, which adds it to its own: each sum just
    made holds 2 of 5 contributions.

Senders and receivers are matched with patterns (a rotation, pairs that exchange, one to
many); only transfers that fit none of them are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unisono.schedule.collective import BARRIER
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Transfer
from unisono.view.facts import promise

Pair = tuple[int, int]

_LISTED = 4
"""Up to how many messages, or ranks, are named one by one."""


def opening(schedule: Schedule) -> str:
    """What is there before the first step, and what shall be."""
    what = schedule.collective
    before = {
        "everywhere": "every rank holds its own contribution to every chunk",
        "root": f"rank {schedule.root} holds everything",
        "owner": "every rank holds its own chunks and nothing else",
    }[what.before.value]
    if what is BARRIER:
        before = "every rank knows of itself alone"
    return f"Before the first step {before}. In the end, {promise(schedule)}."


def caption(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    sums: Sequence[int],
    finished: bool,
    done: tuple[int, int],
) -> str:
    """One sentence for a step.

    `sums` are how many contributions each changed cell has now, `finished` whether all
    that travels is complete already, `done` how many results are in place, of how many.
    """
    acted = action(schedule, transfers, finished)
    return f"{acted}: {_progress(schedule, transfers, sums, done)}."


def action(schedule: Schedule, transfers: Sequence[Transfer], finished: bool) -> str:
    """Who sends what to whom in a step, and what the receivers do with it."""
    moved = [t for t in transfers if t.src != t.dst]
    what = _what(schedule, moved, finished)
    pairs = sorted({(t.src, t.dst) for t in moved})
    return _who(pairs, schedule.n, what, _effect(moved))


def _what(schedule: Schedule, moved: Sequence[Transfer], finished: bool) -> str:
    if schedule.collective is BARRIER:
        return "a sign"
    counts = Counter((t.src, t.dst) for t in moved).values()
    low, high = min(counts, default=0), max(counts, default=0)
    ready = "finished " if finished and schedule.collective.reduces else ""
    if schedule.num_chunks == 1:
        return "the finished sum" if ready else "all it has"
    if high == 1:
        return f"one {ready}chunk"
    if high == schedule.num_chunks == low:
        return f"all {ready}chunks"
    return f"{low} to {high} {ready}chunks" if low != high else f"{low} {ready}chunks"


def _effect(moved: Sequence[Transfer]) -> str:
    """What becomes of it where it arrives."""
    adds = {t.reduces for t in moved}
    return "mixed" if len(adds) > 1 else "adds" if True in adds else "keeps"


_ENDINGS = {"adds": "adds it to its own", "keeps": "keeps a copy"}
_MIXED = ", where some is added and some is kept"


def _who(pairs: list[Pair], n: int, what: str, effect: str) -> str:
    """The sentence: senders, receivers, and what the receivers do."""
    if not pairs:
        return "Chunks change their place within each rank's own memory"
    several = what.endswith("chunks") or _gathered(pairs)
    does = _ENDINGS.get(effect, "").replace(" it ", " them " if several else " it ")
    each = f"; each {does}" if does else _MIXED
    ending = f", which {does}" if does and _singular(pairs) else each
    for sentence in (_one(pairs, n, what), _rotation(pairs, n, what)):
        if sentence:
            return sentence + ending
    exchange = _exchange(pairs, what.replace("it has", "they have"))
    if exchange:
        more = {"adds": " and add what they get", "keeps": ""}
        return exchange + more.get(effect, _MIXED)
    rings = _rings(pairs, n, what)
    if rings:
        return rings + ending
    if len(pairs) <= _LISTED:
        (a, b), *rest = pairs
        others = ", ".join(f"rank {src} to rank {dst}" for src, dst in rest)
        return f"Rank {a} sends {what} to rank {b}, {others}{each}"
    senders, receivers = len({a for a, _ in pairs}), len({b for _, b in pairs})
    theirs = what.replace("it has", "they have")
    return f"{senders} ranks send {theirs} to {receivers} ranks{each}"


def _singular(pairs: Sequence[Pair]) -> bool:
    """Whether the sentence names one receiver, as "the next rank"."""
    return max(Counter(src for src, _ in pairs).values(), default=0) == 1


def _gathered(pairs: list[Pair]) -> bool:
    """Whether several send to one."""
    return len(pairs) > 1 and len({dst for _, dst in pairs}) == 1


def _one(pairs: list[Pair], n: int, what: str) -> str:
    """One rank to many, many to one, all to all; nothing if it is none of these."""
    senders, receivers = {a for a, _ in pairs}, {b for _, b in pairs}
    if len(pairs) == n * (n - 1) > 2:
        return f"Every rank sends {what} to every other rank"
    if len(pairs) == 1:
        return f"Rank {pairs[0][0]} sends {what} to rank {pairs[0][1]}"
    if len(senders) == 1:
        many = "every other rank" if len(pairs) == n - 1 else _ranks(receivers)
        return f"Rank {pairs[0][0]} sends {what} to {many}"
    if len(receivers) == 1:
        if len(pairs) == n - 1:
            return f"Every other rank sends {what} to rank {pairs[0][1]}"
        return f"{_ranks(senders).capitalize()} send {what} to rank {pairs[0][1]}"
    return ""


def _ranks(ranks: set[int]) -> str:
    if len(ranks) > _LISTED:
        return f"{len(ranks)} ranks"
    *most, last = sorted(ranks)
    return f"ranks {', '.join(map(str, most))} and {last}"


def _rotation(pairs: list[Pair], n: int, what: str) -> str:
    """Every rank to the one so many further on; nothing if it is not so."""
    away = {(dst - src) % n for src, dst in pairs}
    if len(pairs) == n and len(away) == 1 and n > 2:
        far = away.pop()
        if far == 1:
            return f"Every rank sends {what} to the next rank"
        if far == n - 1:
            return f"Every rank sends {what} to the rank before it"
        if 2 * far != n:
            return f"Every rank sends {what} to the rank {far} further on"
    if len(pairs) == 2 * n and away == {1, n - 1}:
        return f"Every rank sends {what} to both its neighbours"
    return ""


def _exchange(pairs: list[Pair], what: str) -> str:
    """Pairs of ranks that send to each other; nothing if it is not so."""
    known = set(pairs)
    once = len({src for src, _ in pairs}) == len(pairs)
    if not once or any((dst, src) not in known for src, dst in pairs):
        return ""
    apart = {abs(src - dst) for src, dst in pairs}
    halves = [f"{a} and {b}" for a, b in pairs if a < b]
    if len(apart) == 1 and len(halves) > 1:
        far = apart.pop()
        who = "Neighbours" if far == 1 else f"Ranks that are {far} apart"
        return f"{who} exchange {what}"
    if len(halves) > _LISTED:
        return f"Ranks exchange {what} in pairs ({', '.join(halves[:2])}, ...)"
    return f"Ranks {', '.join(halves)} exchange {what}"


def _rings(pairs: list[Pair], n: int, what: str) -> str:
    """Several rings at once, as in a hierarchy; nothing if it is not so."""
    follows = dict(pairs)
    if len(follows) < len(pairs) or set(follows) != set(follows.values()):
        return ""
    rings: list[list[int]] = []
    seen: set[int] = set()
    for first in follows:
        ring = []
        while first not in seen:
            seen.add(first)
            ring.append(first)
            first = follows[first]
        rings += [ring] if ring else []
    if len(rings) < 2:
        return ""
    example = "→".join(map(str, [*rings[0], rings[0][0]]))
    who = "every rank" if len(pairs) == n else f"each of {len(pairs)} ranks"
    where = f"In {len(rings)} rings at once ({example}, ...)"
    return f"{where} {who} sends {what} to the next"


def _progress(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    sums: Sequence[int],
    done: tuple[int, int],
) -> str:
    have, due = done
    if have == due:
        return f"done, {promise(schedule)}"
    if any(t.reduces for t in transfers) and schedule.collective.reduces:
        low, high = min(sums), max(sums)
        if low == schedule.n:
            return "each sum just made is complete"
        span = str(low) if low == high else f"{low} to {high}"
        return f"each sum just made holds {span} of {schedule.n} contributions"
    noun = "arrivals are known" if schedule.collective is BARRIER else "results are in"
    return f"{have} of {due} {noun}" + ("" if noun[0] == "a" else " place")
