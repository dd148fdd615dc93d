"""Whether what was seen of a phase is what is promised."""

import re

from campaign.calls import IN_GROUPS
from campaign.plan import HEALS, LOSSES, SHORTAGES, outweighs

_LATE_S = 30.0
"""Long after what is promised: the machine may be busy, but this is no hang yet."""
_LOSES = ("PeerLost", "ConnectFailed")


def judge_work(phase, seen, struck_at, across, pids):
    """`seen` has, by id, what each rank that is no victim told at the end of its work.

    `pids` has the process of each rank. Problems, and the times from the disturbance to
    each error.
    """
    problems, times = [], []
    for me, told in seen.items():
        if phase.strike in HEALS:
            if told["error"]:
                problems.append(f"rank {me} was to go on, but: {_error(told)}")
            continue
        times.append(max(0.0, told["at"] - struck_at))
        problems += _misread(me, told, phase, seen, across)
        problems += _contradicts_itself(me, told, pids)
        if times[-1] > _LATE_S:
            problems.append(f"rank {me} had its error after {times[-1]:.1f} s")
    return problems, times


def _misread(me, told, phase, seen, across):
    strike = phase.strike
    if strike in SHORTAGES and across and told["error"] == "CollectiveTimeout":
        # Who is short of something takes no connections: one who needs another's is
        # late for that reason, and so are those who wait for it in turn.
        return []
    if strike in SHORTAGES and me in phase.victims:
        return [] if told["error"] in _EXHAUSTED else [f"rank {me}: {_error(told)}"]
    if strike == "interrupt" and me in phase.victims:
        return []  # it may have been in a call or between two
    expected = _expected(phase)
    if told["error"] not in expected:
        return [f"rank {me} ended with {_error(told)}, expected {expected[0]}"]
    if told["error"] == "TransportError":
        return []  # names a rank in its text alone
    earlier = {other for other, one in seen.items() if one["at"] <= told["at"]}
    right = set(phase.victims) | ((earlier - {me}) if phase.prompt else set())
    if strike == "stop":
        right |= _held_up_elsewhere(told, seen)
    if strike == "partition":
        return _other_side(me, told, phase)
    if not told["named"] or not right.issuperset(told["named"]):
        return [f"rank {me} names {told['named']}: {_error(told)}"]
    return []


def _contradicts_itself(me, told, pids):
    """Ranks of an error that are others than those its message tells of, by process."""
    told_of = {
        int(pid) for pid in re.findall(r"\(pid (\d+) on", told.get("message", ""))
    }
    named = told.get("named", ())
    if told_of and not told_of.issuperset(pids[one] for one in named):
        return [f"rank {me} names {named}, of pids {pids}, but says {_error(told)}"]
    return []


def _held_up_elsewhere(told, seen):
    """Ranks that are late because they still wait in another communicator.

    Whom they wait for there is known in that one alone. In a turn with groups some may
    be in a group, and others before it or after it.
    """
    return {
        other
        for other, one in seen.items()
        if one.get("kind") in IN_GROUPS and one["calls"] <= told["calls"]
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


def _other_side(me, told, phase):
    mine = me in phase.victims
    if any((named in phase.victims) == mine for named in told["named"]):
        return [f"rank {me} names its own side: {_error(told)}"]
    return []


def _error(told):
    return f"{told['error'] or 'nothing'}: {told.get('message', '')}"


def may_be_too_few(phase, living, victims, across):
    """Whether those who are left may be unable to go on without the others.

    `living` are in the order of their ranks.
    """
    left = [r for r in living if r not in victims]
    return across and phase.strike in LOSSES and not outweighs(left, living)


def judge_world(seen, living):
    """All who live have gone on together."""
    wanted = sorted(living)
    return [
        f"rank {me} went on with {told['ids']}, expected {wanted}"
        for me, told in seen.items()
        if sorted(told["ids"]) != wanted
    ]
