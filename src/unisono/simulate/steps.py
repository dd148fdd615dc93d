"""Simulation by steps: a clock for every rank, and the load of links in every step.

In a step each rank sends its messages, with an overhead for each, along their routes.
All messages of one step that cross a link share it: a message takes as long as its most
loaded link needs for everything on it, and then the latencies of its route. A link with
both directions in use in a step has the fraction `duplex` of its bandwidth. A link
serves one step after the other. A rank has finished a step when its last message is
sent and all messages to it have arrived and are reduced. Then its next step begins;
other ranks may be ahead or behind.

That is exact where the messages of a step begin together. Where ranks are in different
steps it treats messages as simultaneous that are not; the event simulation does not.

Everything is an array over all messages of a step, and over all given sizes: times are
linear in bytes, so they are computed once. Routes are cached, so a ring of a thousand
ranks takes a third of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Ints
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step
from unisono.simulate.conditions import SimulatedWorld
from unisono.simulate.limits import BYTES_A_TRANSFER, enough
from unisono.simulate.messages import Messages, in_range, messages
from unisono.simulate.result import Hop, Timeline
from unisono.topology.topology import Floats

MOST_REMEMBERED = 1 << 22
"""Up to how many messages are kept for the critical path and for traces."""

LARGE_STEP = 1 << 22
"""From so many transfers on a step is looked at before it is simulated."""

_PATTERNS = 256


@dataclass(frozen=True, eq=False)
class StepPattern:
    """Which ranks send to which, with all that follows from that alone.

    Messages are sorted by sender. `first` are those with which a sender begins, and
    `senders` who that is; `order`, `first_received` and `receivers` are the same by
    receiver.
    """

    src: Ints
    dst: Ints
    links: Ints
    latency: Floats
    waits: Floats
    bandwidth: Floats
    narrowest: Floats
    alone: bool
    first: Ints
    senders: Ints
    order: Ints
    first_received: Ints
    receivers: Ints
    sent: Floats

    @classmethod
    def of(cls, pair: Ints, world: SimulatedWorld) -> StepPattern:
        """Routes, how long each sender is busy, and whether anything is shared."""
        src, dst = pair // world.n, pair % world.n
        links = world.route(src, dst) % world.bandwidth.size  # -1 is the last of all
        used = np.bincount(links.ravel(), minlength=world.bandwidth.size)[:-1]
        bandwidth = _left(world, used > 0)
        senders, first, times = np.unique(src, return_index=True, return_counts=True)
        order = np.argsort(dst, kind="stable")
        receivers, first_received = np.unique(dst[order], return_index=True)
        return cls(
            src,
            dst,
            links,
            world.latency[links].sum(axis=1),
            np.repeat(times.astype(np.float64), times) * world.overhead,
            bandwidth,
            bandwidth[links].min(axis=1, initial=np.inf),
            bool((used <= 1).all()),
            first,
            senders,
            order,
            first_received,
            receivers,
            sent=np.zeros(src.size),
        )

    @cached_property
    def by_link(self) -> tuple[Ints, Ints, Ints]:
        """Links in use, and the messages on them: which, and where those begin."""
        flat = self.links.ravel()
        order = np.argsort(flat, kind="stable")
        used, first = np.unique(flat[order], return_index=True)
        return used, order // self.links.shape[1], first

    def load(self, sent: Floats, links: int) -> Floats:
        """The bytes that each link has to carry if these are sent."""
        each = np.repeat(sent, self.links.shape[1])
        carried = np.bincount(self.links.ravel(), each, minlength=links)
        return carried.astype(np.float64, copy=False)


def _left(world: SimulatedWorld, used: NDArray[np.bool_]) -> Floats:
    """The bandwidth of links of which these are in use at once."""
    twins = world.twins
    if not twins.size:
        return world.bandwidth
    both = used & (twins >= 0) & used[twins]
    part = np.where(both, world.topology.duplex, 1.0)
    left: Floats = world.bandwidth * np.append(part, 1.0)
    return left


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What is remembered of a step: its messages, and which of them decided what."""

    pattern: StepPattern
    nbytes: Floats
    start: Floats
    end: Floats
    decider: Ints


@dataclass(eq=False)
class Clocks:
    """The state of a simulation between steps: a row of clocks for every size.

    Sizes are multiples (`times`) of those of the messages. Messages are remembered only
    if there is one size.
    """

    world: SimulatedWorld
    times: Floats
    clock: Floats
    carried: Floats
    count: int = 0
    steps: int = 0
    kept: list[StepRecord] | None = None
    free: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    last: tuple[StepPattern, Floats] | None = None
    patterns: dict[bytes, StepPattern] = field(default_factory=dict)

    def run(self, step: Messages) -> None:
        """Advance all clocks by one step."""
        world, times, codec = self.world, self.times[:, None], self.world.codec
        self.steps += 1
        pattern = self._pattern(step.pair)
        before = step.nbytes * codec.encode * times
        start = self.clock[:, pattern.src] + (pattern.waits + before)
        start = self._when_free(pattern, start)
        drained = start + self._durations(pattern, step.nbytes * codec.ratio) * times
        arrived = drained + (pattern.latency + step.nbytes * codec.decode * times)
        self.last = pattern, drained
        after = self.clock.copy()
        if pattern.src.size:
            self._wait(after, pattern, drained, arrived)
        self._keep(
            StepRecord(pattern, step.nbytes, start[0], arrived[0], after[0]), drained
        )
        if step.reduced is not None and world.reduce:
            after += step.reduced * world.reduce * times
        self.clock = after
        self.count += pattern.src.size

    def _when_free(self, pattern: StepPattern, start: Floats) -> Floats:
        """Links are still busy with the step before, unless senders waited for that."""
        if self.last is None or (self.last[0] is pattern and pattern.alone):
            return start
        used, message, first = self.last[0].by_link
        if used.size:
            through = np.maximum.reduceat(self.last[1][:, message], first, axis=1)
            self.free[:, used] = np.maximum(self.free[:, used], through)
            self.free[:, -1] = 0.0  # the link that is none
        busy: Floats = self.free[:, pattern.links].max(axis=2, initial=0.0)
        return np.maximum(start, busy)

    def _wait(
        self, after: Floats, pattern: StepPattern, drained: Floats, arrived: Floats
    ) -> None:
        """A rank ends a step when its messages are sent and all for it have arrived."""
        mine, others = pattern.senders, pattern.receivers
        if mine.size < pattern.src.size:
            drained = np.maximum.reduceat(drained, pattern.first, axis=1)
        arrived = arrived[:, pattern.order]
        if others.size < pattern.dst.size:
            arrived = np.maximum.reduceat(arrived, pattern.first_received, axis=1)
        after[:, mine] = np.maximum(after[:, mine], drained)
        after[:, others] = np.maximum(after[:, others], arrived)

    def _keep(self, step: StepRecord, drained: Floats) -> None:
        """Remember which message each clock waited for, up to a limit."""
        if self.kept is None:
            return
        pattern, after = step.pattern, step.decider  # so far, the clocks themselves
        decider = np.full(self.world.n, -1)
        sent = np.flatnonzero(after[pattern.src] == drained[0])
        decider[pattern.src[sent]] = sent
        came = np.flatnonzero(after[pattern.dst] == step.end)
        decider[pattern.dst[came]] = came
        self.kept.append(
            StepRecord(pattern, step.nbytes, step.start, step.end, decider)
        )
        if self.count > MOST_REMEMBERED:
            self.kept = None

    def _pattern(self, pair: Ints) -> StepPattern:
        key = pair.tobytes()
        pattern = self.patterns.get(key)
        if pattern is None:
            if len(self.patterns) >= _PATTERNS:
                self.settle()
            pattern = self.patterns[key] = StepPattern.of(pair, self.world)
        return pattern

    def settle(self) -> None:
        """Book what the patterns carried over which links, and forget them."""
        for pattern in self.patterns.values():
            self.carried += pattern.load(pattern.sent, self.carried.size)
        self.patterns.clear()

    def _durations(self, pattern: StepPattern, sent: Floats) -> Floats:
        """How long each message takes to pass its most loaded link."""
        pattern.sent[:] += sent
        if pattern.alone:
            return sent / pattern.narrowest
        busy = pattern.load(sent, self.carried.size) / pattern.bandwidth
        busiest: Floats = busy[pattern.links].max(axis=1, initial=0.0)
        return busiest

    def path(self) -> tuple[Hop, ...] | None:
        """The messages that decided when the last rank was through."""
        if self.kept is None:
            return None
        hops: list[Hop] = []
        rank = int(np.argmax(self.clock[0]))
        for step, kept in reversed(list(enumerate(self.kept, start=1))):
            k = int(kept.decider[rank])
            if k < 0:
                continue
            rank = int(kept.pattern.src[k])
            when = float(kept.start[k]), float(kept.end[k])
            size = float(kept.nbytes[k] * self.times[0])
            dst = int(kept.pattern.dst[k])
            hops.append(Hop(step, rank, dst, size, *when, self._slowest(kept, k)))
        return tuple(reversed(hops))

    def _slowest(self, kept: StepRecord, k: int) -> str:
        """The link of message k that had most to do for its bandwidth."""
        row = kept.pattern.links[k]
        load = kept.pattern.load(kept.nbytes, self.carried.size)
        worst = int(row[np.argmax(load[row] / self.world.bandwidth[row])])
        none = worst == self.carried.size - 1
        return "none" if none else self.world.topology.wiring.link_name(worst)

    def timeline(self) -> Timeline | None:
        """Every message with its times, if they were kept."""
        if self.kept is None:
            return None
        counts = [kept.nbytes.size for kept in self.kept]
        none = np.empty(0)
        return Timeline(
            np.repeat(np.arange(1, len(counts) + 1), counts),
            np.concatenate(
                [none.astype(np.int64), *(k.pattern.src for k in self.kept)]
            ),
            np.concatenate(
                [none.astype(np.int64), *(k.pattern.dst for k in self.kept)]
            ),
            np.concatenate([none, *(k.nbytes for k in self.kept)]),
            np.concatenate([none, *(k.start for k in self.kept)]),
            np.concatenate([none, *(k.end for k in self.kept)]),
        )


def by_steps(
    schedule: Schedule,
    world: SimulatedWorld,
    sizes: Floats,
    times: Floats | None = None,
    *,
    keep: bool = False,
    members: Ints | None = None,
    until: float = np.inf,
) -> Clocks:
    """Run the clocks through all steps, for slots of `sizes` bytes, or `times` that.

    `members` has a row of ranks for each group, all of which act the schedule out at
    once; without it there is one group, of all ranks. When all sizes have a clock
    beyond `until`, the rest is left out: clocks do not run backwards.
    """
    even = float(sizes[0]) if (sizes == sizes[0]).all() else None
    scale = np.ones(1) if times is None else times
    clocks = Clocks(
        world,
        scale,
        np.tile(world.start, (scale.size, 1)),
        np.zeros(world.bandwidth.size),
        free=np.zeros((scale.size, world.bandwidth.size)),
        kept=[] if keep and scale.size == 1 else None,
    )
    for step in in_range(schedule):
        if len(step) > LARGE_STEP:
            enough(schedule.title, len(step) * BYTES_A_TRANSFER, "closed")
        acted = step if members is None else _acted(step, members)
        clocks.run(messages(acted, world.n, sizes, even))
        if clocks.clock.max(axis=1).min() > until:
            break
    clocks.settle()
    return clocks


def _acted(step: Step, members: Ints) -> Step:
    """A step of one group as all groups make it at the same time."""
    src, dst, chunk, mask, into = step.flat()
    groups = len(members)
    return Step(
        members[:, src].ravel(),
        members[:, dst].ravel(),
        np.tile(chunk, groups),
        np.tile(into, groups),
        step.reduces if isinstance(step.reduces, bool) else np.tile(mask, groups),
    )
