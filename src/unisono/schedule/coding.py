"""Which values are sent as codes, and the effect on the result.

A codec makes a value smaller and less exact. So what is encoded, and how often, is
decided here, before anything runs:

- A sum is computed from the rank's own exact value and from the decoded values of other
  ranks. It is encoded once, by the rank that computed it, and only if others read it.
- A copy of a code is that code: a forwarded value is never encoded again.
- A rank that computed a result of others keeps the decoded value, not its exact one. So
  all ranks hold the same bits.

Where several ranks compute the same sum, as in recursive doubling, the second and third
rule do not suffice: then every rank also uses its own value as decoded. Whether all
ranks end with the same bits is checked in any case, by comparing how every result is
computed.

The scope of the codes may be all ranks, or only what crosses between hosts. Then a
value is a code for all of its readers if any copy of it crosses, and for none if not.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import BadArgument
from unisono.schedule.collective import Holders
from unisono.schedule.program import Noise
from unisono.schedule.schedule import Schedule
from unisono.schedule.versions import Version


class Scope(enum.StrEnum):
    """Where values are sent as codes: between all ranks, or only between hosts."""

    ALL = "all"
    HOSTS = "hosts"


def settle(
    schedule: Schedule,
    made: Sequence[Version],
    has_output: Callable[[int, int], bool],
    scope: Scope,
) -> Noise:
    """Give every version its homes; codes are kept apart from values.

    BadArgument if ranks would end with different bits.
    """
    origin = _origins(made)
    crossing = {origin[v] for v in made if v.remote_readers}
    for v in made:
        v.coded = scope is Scope.ALL or origin[v] in crossing
    everywhere = schedule.collective.after is Holders.EVERYWHERE
    for own_as_code in (False, True):
        _homes(made, origin, has_output, own_as_code)
        values = _values(made)
        if not everywhere or _same_bits(values):
            return _noise(values)
    raise BadArgument(
        f"{schedule.title}: with a codec its ranks would end with different bits; use "
        "direct, or hierarchical with by=direct"
    )


def reads_code(v: Version, reader: Version) -> bool:
    """Whether `reader` reads the code of v."""
    if (v.rank, v.slot) == (reader.rank, reader.slot):
        return v.own_as_code
    return v.coded


def _origins(made: Iterable[Version]) -> dict[Version, Version]:
    """For every version, the input or the sum that it is a copy of."""
    origins: dict[Version, Version] = {}
    for v in made:
        origins[v] = origins[v.sources[0]] if len(v.sources) == 1 else v
    return origins


def _homes(
    made: Iterable[Version],
    origin: Mapping[Version, Version],
    has_output: Callable[[int, int], bool],
    own_as_code: bool,
) -> None:
    for v in made:
        outputs = has_output(v.rank, v.slot)
        read = bool(v.local_readers or v.remote_readers)
        v.own_as_code = own_as_code and v.coded and v.at_home
        v.code = 0 if v.coded and (read or v.own_as_code) else None
        v.back = v.code is not None and v.final and origin[v] is v
        needs_place = v.at_home and not v.own_as_code and not outputs and not v.given
        v.window = 0 if needs_place or (read and not v.coded) else None
        kept = v.at_home and v.window is None and not v.own_as_code
        v.output = not v.given and outputs and (v.final or kept)


@dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a value before it exists.

    How it came about, whose contributions it has, and how much of its variance is the
    error of each encoding, by the number of contributions to what was encoded.
    """

    tree: int
    noise: Counter[int]

    def encoded(self, contributors: int) -> _Value:
        """The value that its code gives."""
        noise = self.noise.copy()
        noise[contributors] += contributors
        return _Value(hash(("code", self.tree)), noise)


def _values(made: Iterable[Version]) -> dict[Version, _Value]:
    """What every version holds at its own rank, in the end."""
    raw: dict[Version, _Value] = {}
    code: dict[Version, _Value] = {}
    for v in made:
        taken = [code[s] if reads_code(s, v) else raw[s] for s in v.sources]
        if v.given:
            value = _Value(hash(("given", v.rank, v.slot)), Counter())
        else:
            value = _added(taken)
        raw[v] = value
        if v.code is None:
            continue
        (only, *more) = v.sources or [v]
        handed_on = only is not v and not more and reads_code(only, v)
        code[v] = value if handed_on else value.encoded(v.contributors)
        if v.back:
            raw[v] = code[v]
    return raw


def _added(values: Sequence[_Value]) -> _Value:
    """From the left; the two sides of a sum may change places."""
    tree, noise = values[0].tree, values[0].noise.copy()
    for value in values[1:]:
        tree = hash(("sum", *sorted((tree, value.tree))))
        noise += value.noise
    return _Value(tree, noise)


def _same_bits(values: Mapping[Version, _Value]) -> bool:
    ends: dict[int, set[int]] = defaultdict(set)
    for v, value in values.items():
        if v.final:
            ends[v.chunk].add(value.tree)
    return all(len(trees) == 1 for trees in ends.values())


def _noise(values: Mapping[Version, _Value]) -> Noise:
    worst = Noise()
    for v, value in values.items():
        if v.final and value.noise:
            shares = sorted(value.noise.items())
            noise_here = Noise(
                tuple((k, share / v.contributors) for k, share in shares)
            )
            worst = max(worst, noise_here, key=lambda noise: noise.factor)
    return worst
