"""Placement: which rank is on which host.

A placement is a host number for every rank, in rank order. As a name must stay short,
it is written as terms joined by dots, each some consecutive hosts and a repetition:

    0x5.1x4.2x4     five ranks on host 0, then four on 1, then four on 2
    0-3x2           0 1 2 3 0 1 2 3, round robin over four hosts
    0.1x2.0         0 1 1 0
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import numpy as np

from unisono.errors import BadArgument, UnsupportedWorld
from unisono.schedule.collective import Ints

_TERM = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?:x([0-9]{1,9}))?")


def numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """The same placement with the hosts numbered in the order of their first ranks.

    So one placement has one spelling, whatever the hosts are called.
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def parse_hosts(text: str, n: int) -> Ints:
    """The host of each of n ranks, from a text such as "0x5.1x4"."""
    runs = []
    for term in map(_TERM.fullmatch, text.split(".")):
        if term is None:
            raise _malformed(text)
        first = int(term[1])
        last, times = int(term[2] or first), int(term[3] or 1)
        if last < first or times < 1:
            raise _malformed(text)
        runs.append((first, last, times))
    placed = sum((last - first + 1) * times for first, last, times in runs)
    if placed != n:
        raise UnsupportedWorld(
            f"hosts {text!r} places {placed} ranks, but there are {n}", n=n
        )
    return np.concatenate([np.tile(np.arange(a, b + 1), times) for a, b, times in runs])


def _malformed(text: str) -> BadArgument:
    return BadArgument(
        f"hosts {text!r}: expected the host of each rank in rank order, as in 0.1.0.1, "
        "0x5.1x4 (five ranks, then four) or 0-3x2 (twice round four hosts)"
    )


def written(hosts: Sequence[int]) -> str:
    """The placement as `parse_hosts` reads it, each term taking in all it can."""
    terms, at = [], 0
    while at < len(hosts):
        runs = (_repeated(hosts, at, length) for length in _ascending(hosts, at))
        # Two hosts once are written one by one: the second may belong to the next run.
        length, times = max(
            (run for run in runs if run != (2, 1)),
            key=lambda run: (run[0] * run[1], run[1]),
        )
        first, last = hosts[at], hosts[at + length - 1]
        row = str(first) if length == 1 else f"{first}-{last}"
        terms.append(row if times == 1 else f"{row}x{times}")
        at += length * times
    return ".".join(terms)


def _ascending(hosts: Sequence[int], at: int) -> range:
    """The lengths of rows h, h+1, h+2, ... that begin there."""
    longest = 1
    while at + longest < len(hosts) and hosts[at + longest] == hosts[at] + longest:
        longest += 1
    return range(1, longest + 1)


def _repeated(hosts: Sequence[int], at: int, length: int) -> tuple[int, int]:
    """A row of that length, and how many times it is repeated."""
    row, times = hosts[at : at + length], 1
    while hosts[at + times * length : at + (times + 1) * length] == row:
        times += 1
    return length, times
