"""How much goes from rank to rank, and from host to host, between two snapshots of a
job.

Every rank that answers on this host reports how much it has sent to each other; that
makes the links that begin on this host. A link is near if both ranks are on one host:
what goes over it is read from memory, but counted as a message would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Answers = Mapping[int, dict[str, Any] | None]
"""What the ranks answer, by rank; None for those that do not."""
_Group = dict[str, Any]
_Sent = dict[tuple[int, str, tuple[int, ...]], _Group]


@dataclass(frozen=True)
class LinkTraffic:
    """From one rank to another: bytes so far, and bytes per second."""

    src: int
    dst: int
    near: bool
    sent: int
    rate: float | None


@dataclass(frozen=True)
class HostPair:
    """All links from one host to another, or within one."""

    src: str
    dst: str
    links: int
    sent: int
    rate: float | None


@dataclass(frozen=True)
class TrafficTable:
    """All links at one time, the busiest first.

    `guessed` is how many bytes since the last snapshot were assigned in proportion to
    calls that were seen, since there were too many; `missing` are ranks that did not
    answer; `rank_hosts` is the host of every rank of the job.
    """

    links: tuple[LinkTraffic, ...] = ()
    hosts: tuple[HostPair, ...] = ()
    guessed: int = 0
    missing: tuple[int, ...] = ()
    rank_hosts: tuple[str, ...] = ()
    counters: _Sent = field(default_factory=dict, repr=False, compare=False)


def links_of(answers: Answers, before: TrafficTable | None = None) -> TrafficTable:
    """Combine the answers of the ranks; rates are by each rank's own clock."""
    good = {r: t for r, t in answers.items() if t is not None and "groups" in t}
    now: _Sent = {
        (rank, group["name"], tuple(group["ranks"])): {**group, "at": answer["time_ns"]}
        for rank, answer in good.items()
        for group in answer["groups"]
    }
    earlier = {} if before is None else before.counters
    asked = {key[0]: group["at"] for key, group in earlier.items()}
    sums: dict[tuple[int, int], tuple[int, float | None]] = {}
    guessed = 0
    for key, group in now.items():
        was = earlier.get(key)
        if was is None and key[0] in asked:  # a communicator that was not there yet
            was = {"sent_to": [0] * len(key[2]), "guessed": 0, "at": asked[key[0]]}
        guessed += 0 if was is None else max(0, group["guessed"] - was["guessed"])
        for at, dst in enumerate(key[2]):
            sent, rate = sums.get((key[0], dst), (0, None))
            more = _rate(group, was, at)
            both = rate if more is None else more + (rate or 0.0)
            sums[key[0], dst] = sent + group["sent_to"][at], both
    hosts: list[int] = next((t["hosts"] for t in good.values()), [])
    names = _names(hosts, next((t["names"] for t in good.values()), []))
    links = [
        LinkTraffic(src, dst, hosts[src] == hosts[dst], sent, rate)
        for (src, dst), (sent, rate) in sums.items()
        if sent
    ]
    links.sort(key=lambda link: (-(link.rate or 0), -link.sent, link.src, link.dst))
    missing = tuple(sorted(set(answers) - set(good)))
    named = tuple(names[host] for host in hosts)
    return TrafficTable(
        tuple(links), _by_hosts(links, named), guessed, missing, named, now
    )


def _rate(now: _Group, before: _Group | None, at: int) -> float | None:
    """Bytes per second to one rank since the last snapshot; None without one.

    Where less was sent than before, a communicator of that name was made anew.
    """
    if before is None or now["at"] <= before["at"]:
        return None
    sent, was = now["sent_to"][at], before["sent_to"][at]
    fresh = sent - was if sent >= was else sent
    return float(fresh * 1e9 / (now["at"] - before["at"]))


def _names(hosts: Sequence[int], named: Sequence[str]) -> dict[int, str]:
    """The names of the hosts: their own names, if these are distinct."""
    first = dict(zip(hosts, named, strict=True))
    if len(set(first.values())) == len(first):
        return first
    return {host: f"host {host}" for host in first}


def _by_hosts(
    links: Iterable[LinkTraffic], name: Sequence[str]
) -> tuple[HostPair, ...]:
    pairs: dict[tuple[str, str], list[LinkTraffic]] = {}
    for link in links:
        pairs.setdefault((name[link.src], name[link.dst]), []).append(link)
    host_pairs = [
        HostPair(
            *pair,
            len(among),
            sum(link.sent for link in among),
            None
            if any(link.rate is None for link in among)
            else sum(link.rate or 0 for link in among),
        )
        for pair, among in pairs.items()
    ]
    return tuple(
        sorted(host_pairs, key=lambda p: (-(p.rate or 0), -p.sent, p.src, p.dst))
    )
