"""Survivors that agree, simulated: virtual clock and network, everything from a seed.

    simulate(Schedule.random(seed))       raises AssertionError if a promise is broken

The rules of `runtime.agreement` run as they are; what is simulated is the world around
them. Words take their time and overtake each other between pairs, ranks crash at any
moment, come late or never, are suspected without reason; meetings and barriers end well
for some and badly for others, as they can in truth: a barrier passes for a rank only
if all have come to it, and if one of them crashes it may pass for some. In schedules
from `Schedule.parted` there are hosts, of which only their own kernels tell who ended;
partitions that lose what is sent or refuse it, in both directions or one; and names
with a wrong address before the right one.

The promises: nobody waits for ever; there are never two worlds in use, at no time; and
where nobody was late or suspected or out of reach, all who live end up in one world,
whoever died when: on one host always, on several if they are more than half.
"""

from __future__ import annotations

import msgspec

from unisono.runtime.world.agreement import Proposal, Reply
from unisono.testing._crowd import Crowd, Partition, Schedule, Seat, World

__all__ = ["Partition", "Schedule", "simulate"]


def simulate(schedule: Schedule) -> dict[int, str]:
    """One run; how each process ended. AssertionError if a promise is broken."""
    run = _Run(schedule)
    run.play()
    run.judge()
    return run.ends


class _Run(Crowd):
    """Meetings and barriers, which end well for some and badly for others."""

    # --- meetings

    def host(self, seat: Seat, proposal: Proposal) -> None:
        here = msgspec.structs.replace(proposal, address=str(next(self.numbers)))
        for rank in here.members:
            seat.rules.outbox.append((rank, Reply(proposal=here)))
        seat.rules.outbox = [(r, w) for r, w in seat.rules.outbox if r != seat.rules.me]
        self.flush(seat)
        self.enter(seat, here)

    def enter(self, seat: Seat, proposal: Proposal) -> None:
        seat.is_away = True
        key = seat.world.number, proposal
        world = self.worlds.get(key)
        if world is None:
            members = tuple(seat.world.members[r] for r in proposal.members)
            world = self.worlds[key] = World(next(self.numbers), members)
            self.at(self.now + 3.0, self.close_meeting, world)
        if world.is_over:
            self.soon(self.fail, seat, proposal, False)
            return
        world.entered.add(seat.process)
        self.check_meeting(world)

    def check_meeting(self, world: World) -> None:
        if world.is_over:
            return
        if not self.crashed.isdisjoint(world.members) or self.is_parted(world):
            self.close_meeting(world)
        elif len(world.entered) == len(world.members):
            world.is_over = True
            for seat, proposal in self.seats_in(world):
                self.soon(self.meet, seat, proposal, world)

    def close_meeting(self, world: World) -> None:
        """Somebody is missing; but some may have met when one died."""
        if world.is_over:
            return
        world.is_over = world.is_broken = True
        all_came = world.entered.union(self.crashed).issuperset(world.members)
        for seat, proposal in self.seats_in(world):
            if all_came and self.rng.random() < 0.5:
                self.soon(self.meet, seat, proposal, world)
            else:
                self.soon(self.fail, seat, proposal, False)

    def seats_in(self, world: World) -> list[tuple[Seat, Proposal]]:
        key = next(k for k, w in self.worlds.items() if w is world)
        seats = [self.seats[p, key[0]] for p in world.entered]
        return [(seat, key[1]) for seat in seats]

    def meet(self, seat: Seat, proposal: Proposal, world: World) -> None:
        """This one has met the others; the first barrier."""
        if seat.process in self.crashed:
            return
        if self.rng.random() < 0.02:  # it has run out of descriptors, say
            world.is_broken = True
            self.fail(seat, proposal, False)
            for arrived in world.arrived:
                self.break_barrier(world, arrived)
            return
        self.arrive_at(seat, proposal, world, 0)

    def arrive_at(
        self, seat: Seat, proposal: Proposal, world: World, which: int
    ) -> None:
        arrived = world.arrived[which]
        arrived.add(seat.process)
        if len(arrived) == len(world.members):
            for each, theirs in self.seats_in(world):
                self.soon(self.after, each, theirs, world, which)
        elif self.is_in_trouble(world):
            self.break_barrier(world, arrived)

    def is_in_trouble(self, world: World) -> bool:
        """Whether a barrier there cannot pass for all."""
        lost = not self.crashed.isdisjoint(world.members)
        return lost or world.is_broken or self.is_parted(world)

    def break_barrier(self, world: World, arrived: set[int]) -> None:
        which = 0 if arrived is world.arrived[0] else 1
        if len(arrived) == len(world.members):
            return  # it is over for all; `after` throws the dice
        for seat, proposal in self.seats_in(world):
            if seat.process in arrived:
                arrived.discard(seat.process)
                self.soon(self.fail_at, seat, proposal, world, which)

    def after(self, seat: Seat, proposal: Proposal, world: World, which: int) -> None:
        """All had come to the barrier; but one may have died on the way out."""
        if seat.process in self.crashed:
            return
        if self.is_in_trouble(world) and self.rng.random() < 0.5:
            self.fail_at(seat, proposal, world, which)
        elif which == 0:
            self.arrive_at(seat, proposal, world, 1)
        else:
            self.done(seat, proposal, world)

    def fail_at(self, seat: Seat, proposal: Proposal, world: World, which: int) -> None:
        if seat.process in self.crashed:
            return
        world.is_broken = True
        self.break_barrier(world, world.arrived[1])
        if which == 0:
            self.fail(seat, proposal, True)
        else:
            self.settle(seat, proposal)

    def fail(self, seat: Seat, proposal: Proposal, met: bool) -> None:
        if seat.process in self.crashed:
            return
        seat.is_away = False
        seat.attempts += 1
        if seat.attempts > 2 * seat.rules.n + 3:  # as `shrinking` does
            self.end(seat.process, "GAVE_UP")
            return
        for rank in list(seat.asked):
            self.unask(seat, rank)
        seat.links.clear()
        seat.rules.failed(proposal, met=met)
        self.go_on(seat)

    # --- the outcome

    def settle(self, seat: Seat, proposal: Proposal) -> None:
        """This one stands by a world in which not all are known to be."""
        world = self.worlds[seat.world.number, proposal]
        self.answer_from_now(seat, proposal)
        strict = seat.rules.is_strict or bool(proposal.left_out)
        self.call(seat.process, world, strict)

    def answer_from_now(self, seat: Seat, proposal: Proposal) -> None:
        seat.settled = proposal
        for rank, link, _ in seat.inbox:
            seat.links[rank] = link
        for rank, link in seat.links.items():
            other = self.seats.get((seat.world.members[rank], seat.world.number))
            if other is not None:
                word = Reply(settled=proposal)
                self.soon(self.hear, other, seat.rules.me, link, word)
        seat.inbox.clear()

    def done(self, seat: Seat, proposal: Proposal, world: World) -> None:
        """All know: the old worlds are closed, unless somebody living was left out."""
        self.answer_from_now(seat, proposal)
        process = seat.process
        if not any(s.settled and s.settled.left_out for s in self.trail[process]):
            for old in self.trail[process]:
                old.is_closed = True
            self.trail[process] = []
        self.in_use[process] = world
        self.check_use()
        if not self.crashed.isdisjoint(world.members) or self.is_parted(world):
            self.soon(self.find_out, process, world)

    def used(self) -> dict[int, World]:
        """The worlds that are in use: all their members are there."""
        return {
            world.number: world
            for world in self.in_use.values()
            if all(self.in_use.get(p) is world for p in world.members)
        }

    def check_use(self) -> None:
        """There are never two of them."""
        used = [world.members for world in self.used().values()]
        assert len(used) <= 1, f"{self.schedule}: two worlds are in use: {used}"

    def judge(self) -> None:
        """Whether all promises were kept."""
        schedule = self.schedule
        for process, call in enumerate(schedule.calls):
            ended = process in self.ends or process in self.in_use
            assert ended or call is None, f"{schedule}: process {process} hangs"
        used = self.used()
        for process, world in self.in_use.items():
            self.ends[process] = f"world {world.number} of {len(world.members)}"
        self.check_use()
        living = set(range(self.n)) - self.crashed
        if schedule.is_fair and living and self.can_all_go_on(living):
            found = {tuple(w.members) for w in used.values()}
            assert found == {tuple(sorted(living))}, f"{schedule}: {self.ends}"

    def can_all_go_on(self, living: set[int]) -> bool:
        """Whether the rules promise it: every death is certain, or most ranks live."""
        hosts = {self.schedule.host(process) for process in range(self.n)}
        return len(hosts) == 1 or 2 * len(living) > self.n
