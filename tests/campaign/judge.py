"""Whether what was seen of a phase is what is promised."""

import re

from campaign.calls import IN_GROUPS
from campaign.plan import HEALS, LOSSES, SHORTAGES, outweighs

_LATE_S = 30.0
"""Long after what is promised: the machine may be busy, but this is no hang yet."""
_LOSES = ("PeerLost", "ConnectFailed")


def judge_work(phase, seen, struck_at, across, pids, *, too_long=False):
    """Judge what each rank that is no victim reported at the end: `seen`, by id.

    `pids` has the process of each rank. `too_long`: what was to heal lasted so long
    that ranks may count as dead (`outlasts`). Problems, and the times from the
    disturbance to each error.
    """
    problems, times = [], []
    for me, result in seen.items():
        if phase.strike in HEALS:
            if too_long and result["error"] in _LOSES:
                problems += _other_side(me, result, phase)
            elif result["error"]:
                problems.append(f"rank {me} was to go on, but: {_error(result)}")
            continue
        times.append(max(0.0, result["at"] - struck_at))
        problems += _misread(me, result, phase, seen, across)
        problems += _contradicts_itself(me, result, pids)
        if times[-1] > _LATE_S:
            problems.append(f"rank {me} had its error after {times[-1]:.1f} s")
    return problems, times


def outlasts(lasted_s, silence_s):
    """Whether ranks may be silent for so long when a partition lasted for so long.

    The driver asks for a tenth of a second or two, and gets more on a busy machine. The
    kernel sends again what was lost after pauses that double, so a rank may be silent
    for twice the time, and for the tenth of the limit between two heartbeats.
    """
    return 2 * lasted_s + silence_s / 10 >= silence_s


def _misread(me, result, phase, seen, across):
    strike = phase.strike
    if strike in SHORTAGES and across and result["error"] == "CollectiveTimeout":
        # Who is short of something takes no connections: one who needs another's is
        # late for that reason, and so are those who wait for it in turn.
        return []
    if strike in SHORTAGES and me in phase.victims:
        return [] if result["error"] in _EXHAUSTED else [f"rank {me}: {_error(result)}"]
    if strike == "interrupt" and me in phase.victims:
        return []  # it may have been in a call or between two
    expected = _expected(phase)
    if result["error"] not in expected:
        return [f"rank {me} ended with {_error(result)}, expected {expected[0]}"]
    if result["error"] == "TransportError":
        return []  # names a rank in its text alone
    earlier = {other for other, one in seen.items() if one["at"] <= result["at"]}
    right = set(phase.victims) | ((earlier - {me}) if phase.prompt else set())
    if strike == "stop":
        right |= _held_up_elsewhere(result, seen)
    if strike == "partition":
        return _other_side(me, result, phase)
    if not result["named"] or not right.issuperset(result["named"]):
        return [f"rank {me} names {result['named']}: {_error(result)}"]
    return []


def _contradicts_itself(me, result, pids):
    """Ranks of an error that differ from those in its message, by process."""
    told_of = {
        int(pid) for pid in re.findall(r"\(pid (\d+) on", result.get("message", ""))
    }
    named = result.get("named", ())
    if told_of and not told_of.issuperset(pids[one] for one in named):
        return [f"rank {me} names {named}, of pids {pids}, but says {_error(result)}"]
    return []


def _held_up_elsewhere(result, seen):
    """Ranks that are late because they still wait in another communicator.

    Whom they wait for there is known in that one alone. In a turn with groups some may
    be in a group, and others before it or after it.
    """
    return {
        other
        for other, one in seen.items()
        if one.get("kind") in IN_GROUPS and one["calls"] <= result["calls"]
    }


_EXHAUSTED = (
    "",  # it had enough for its calls
    *("TransportError", "OSError", "MemoryError", "PeerLost", "ConnectFailed"),
    *("BadArgument", "_ArrayMemoryError"),
)


def _expected(phase):
    if phase.strike == "stop":
        late = ("CollectiveTimeout",)
        return (*late, *_LOSES) if phase.prompt else late
    if phase.strike in SHORTAGES:
        return (*_LOSES, "TransportError")
    return _LOSES


def _other_side(me, result, phase):
    mine = me in phase.victims
    if any((named in phase.victims) == mine for named in result["named"]):
        return [f"rank {me} names its own side: {_error(result)}"]
    return []


def _error(result):
    return f"{result['error'] or 'nothing'}: {result.get('message', '')}"


def may_be_too_few(phase, living, victims, across):
    """Whether the survivors may be unable to continue without the others.

    `living` are in the order of their ranks.
    """
    left = [r for r in living if r not in victims]
    return across and phase.strike in LOSSES and not outweighs(left, living)


def judge_world(seen, living):
    """All live ranks have continued in one world."""
    wanted = sorted(living)
    return [
        f"rank {me} went on with {result['ids']}, expected {wanted}"
        for me, result in seen.items()
        if sorted(result["ids"]) != wanted
    ]
