"""Which candidates are raced, and which wins, from predicted and measured times alone.

The best of many candidates is often the best by chance. So a candidate replaces the
default choice only if it wins a race of many, and then wins again against the default
alone, round by round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from unisono.runtime.plan.tuned import TunedRow

NEAR = 1.25
"""Candidates with a predicted time of at most so many times the best are raced."""
MOST_RACED = 8
SAME = 1.03
"""A difference that is not worth leaving the usual choice for."""
WORTH_A_TRY = 4.0
"""Candidates with a predicted time of at most so many times the best are tried."""


def nearest(
    expected: Mapping[str, float],
    times: Mapping[str, float],
    refused: Collection[str] = (),
) -> list[str]:
    """The candidates to race next: within 1.25 of the best, and not raced yet.

    `expected` are predictions, or times of one try, `times` what was measured. What was
    measured of some gives the error of the prediction; the others are assumed to have
    the same.
    """
    if times:
        off = median(times[a] / expected[a] for a in times if expected[a] > 0)
        best = min(times.values())
    else:
        off, best = (
            1.0,
            min((expected[a] for a in expected if a not in refused), default=0.0),
        )
    open_ = [a for a in expected if a not in times and a not in refused]
    close = [a for a in open_ if expected[a] * off <= NEAR * best]
    return sorted(close, key=expected.__getitem__)[:MOST_RACED]


def winner(
    nbytes: int,
    expected: Mapping[str, float],
    rounds: Mapping[str, Sequence[float]],
    usual: str,
) -> TunedRow:
    """The quickest of those raced, by the median of its rounds.

    The usual one stays unless it is beaten clearly: by its median, and by most rounds.
    """
    times = {name: median(found) for name, found in rounds.items()}
    ranked = sorted(times, key=times.__getitem__)
    first = ranked[0]
    late = sorted(rounds[first])[3 * len(rounds[first]) // 4]
    if usual in times and times[usual] <= max(SAME * times[first], late):
        first = usual
    second = next((name for name in ranked if name != first), "")
    return TunedRow(
        nbytes,
        nbytes,
        first,
        expected[first],
        times[first],
        second,
        expected.get(second, 0.0),
        times.get(second, 0.0),
    )


def decided(
    row: TunedRow,
    usual: str,
    expected: Mapping[str, float],
    again: Mapping[str, Sequence[float]],
) -> TunedRow:
    """The row after the race of its winner against the default choice alone."""
    names = [row.algorithm, usual]
    first, second = names if beats(again[names[0]], again[usual]) else names[::-1]
    return TunedRow(
        row.nbytes,
        row.nbytes,
        first,
        expected[first],
        median(again[first]),
        second,
        expected[second],
        median(again[second]),
    )


def beats(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether one is faster round by round: clearly, and in two rounds of three.

    A load on the machine in a round slows both, so rounds are compared, not means.
    """
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    won = sum(ratio > 1 for ratio in ratios)
    return median(ratios) > SAME and 3 * won >= 2 * len(ratios)


def promising(expected: Mapping[str, float]) -> list[str]:
    """The candidates to try: all but those with a much larger predicted time."""
    best = min(expected.values(), default=0.0)
    return [name for name in expected if expected[name] <= WORTH_A_TRY * best]
