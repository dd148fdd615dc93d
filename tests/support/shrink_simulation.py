"""Agreement after failures, simulated: virtual clock and network, all from a seed.

    simulate(FailureSchedule.random(seed))    AssertionError if a guarantee is broken

The rules of `runtime.world.agreement` run unchanged; the network and the processes are
simulated. Messages are delayed and reordered between pairs, ranks crash at any moment,
call late or never, are suspected without reason; rendezvous and barriers succeed for
some and fail for others, as real ones can: a barrier passes for a rank only if all have
reached it, and if one of them crashes it may pass for some. In schedules from
`FailureSchedule.with_partitions` there are hosts, and only a host's own kernel reports
which processes exited; partitions that lose or refuse messages, in one or both
directions; and host names with a wrong address before the right one.

The guarantees: no rank waits for ever; there are never two worlds in use; and where no
rank was late, suspected or unreachable, all live ranks end up in one world, whichever
others died when: on one host always, on several if they are more than half.
"""

from __future__ import annotations

import msgspec

from shrink_network import (
    FailureSchedule,
    Participant,
    Partition,
    SimulatedNetwork,
    SimulatedWorld,
)
from unisono.runtime.world.agreement import AgreementReply, Proposal

__all__ = ["FailureSchedule", "Partition", "simulate"]


def simulate(schedule: FailureSchedule) -> dict[int, str]:
    """One run; how each process ended. AssertionError if a guarantee is broken."""
    run = Simulation(schedule)
    run.play()
    run.check()
    return run.ends


class Simulation(SimulatedNetwork):
    """Rendezvous and barriers, which succeed for some ranks and fail for others."""

    # --- rendezvous

    def host(self, participant: Participant, proposal: Proposal) -> None:
        here = msgspec.structs.replace(proposal, address=str(next(self.numbers)))
        for rank in here.members:
            participant.rules.outbox.append((rank, AgreementReply(proposal=here)))
        participant.rules.outbox = [
            (r, w) for r, w in participant.rules.outbox if r != participant.rules.me
        ]
        self.flush(participant)
        self.join(participant, here)

    def join(self, participant: Participant, proposal: Proposal) -> None:
        participant.is_joining = True
        key = participant.world.number, proposal
        world = self.worlds.get(key)
        if world is None:
            members = tuple(participant.world.members[r] for r in proposal.members)
            world = self.worlds[key] = SimulatedWorld(next(self.numbers), members)
            self.at(self.now + 3.0, self.close_rendezvous, world)
        if world.is_over:
            self.soon(self.fail, participant, proposal, False)
            return
        world.entered.add(participant.process)
        self.check_rendezvous(world)

    def check_rendezvous(self, world: SimulatedWorld) -> None:
        if world.is_over:
            return
        if not self.crashed.isdisjoint(world.members) or self.is_partitioned(world):
            self.close_rendezvous(world)
        elif len(world.entered) == len(world.members):
            world.is_over = True
            for participant, proposal in self.participants_in(world):
                self.soon(self.connected, participant, proposal, world)

    def close_rendezvous(self, world: SimulatedWorld) -> None:
        """Fail a rendezvous; it may have succeeded for some before a member died."""
        if world.is_over:
            return
        world.is_over = world.is_broken = True
        all_came = world.entered.union(self.crashed).issuperset(world.members)
        for participant, proposal in self.participants_in(world):
            if all_came and self.rng.random() < 0.5:
                self.soon(self.connected, participant, proposal, world)
            else:
                self.soon(self.fail, participant, proposal, False)

    def participants_in(
        self, world: SimulatedWorld
    ) -> list[tuple[Participant, Proposal]]:
        key = next(k for k, w in self.worlds.items() if w is world)
        participants = [self.participants[p, key[0]] for p in world.entered]
        return [(participant, key[1]) for participant in participants]

    def connected(
        self, participant: Participant, proposal: Proposal, world: SimulatedWorld
    ) -> None:
        """The participant is connected to all; it enters the first barrier."""
        if participant.process in self.crashed:
            return
        if self.rng.random() < 0.02:  # for example, no descriptors are left
            world.is_broken = True
            self.fail(participant, proposal, False)
            for arrived in world.arrived:
                self.break_barrier(world, arrived)
            return
        self.arrive_at(participant, proposal, world, 0)

    def arrive_at(
        self,
        participant: Participant,
        proposal: Proposal,
        world: SimulatedWorld,
        which: int,
    ) -> None:
        arrived = world.arrived[which]
        arrived.add(participant.process)
        if len(arrived) == len(world.members):
            for each, theirs in self.participants_in(world):
                self.soon(self.after, each, theirs, world, which)
        elif self.is_in_trouble(world):
            self.break_barrier(world, arrived)

    def is_in_trouble(self, world: SimulatedWorld) -> bool:
        """Whether a barrier of this world cannot pass for all."""
        lost = not self.crashed.isdisjoint(world.members)
        return lost or world.is_broken or self.is_partitioned(world)

    def break_barrier(self, world: SimulatedWorld, arrived: set[int]) -> None:
        which = 0 if arrived is world.arrived[0] else 1
        if len(arrived) == len(world.members):
            return  # all have arrived; `after` draws the outcome
        for participant, proposal in self.participants_in(world):
            if participant.process in arrived:
                arrived.discard(participant.process)
                self.soon(self.fail_at, participant, proposal, world, which)

    def after(
        self,
        participant: Participant,
        proposal: Proposal,
        world: SimulatedWorld,
        which: int,
    ) -> None:
        """All have reached the barrier; one may have died since."""
        if participant.process in self.crashed:
            return
        if self.is_in_trouble(world) and self.rng.random() < 0.5:
            self.fail_at(participant, proposal, world, which)
        elif which == 0:
            self.arrive_at(participant, proposal, world, 1)
        else:
            self.done(participant, proposal, world)

    def fail_at(
        self,
        participant: Participant,
        proposal: Proposal,
        world: SimulatedWorld,
        which: int,
    ) -> None:
        if participant.process in self.crashed:
            return
        world.is_broken = True
        self.break_barrier(world, world.arrived[1])
        if which == 0:
            self.fail(participant, proposal, True)
        else:
            self.settle(participant, proposal)

    def fail(self, participant: Participant, proposal: Proposal, entered: bool) -> None:
        if participant.process in self.crashed:
            return
        participant.is_joining = False
        participant.attempts += 1
        if (
            participant.attempts > 2 * participant.rules.n + 3
        ):  # as `shrink_protocol` does
            self.end(participant.process, "GAVE_UP")
            return
        for rank in list(participant.asked):
            self.cancel_request(participant, rank)
        participant.links.clear()
        participant.rules.failed(proposal, entered=entered)
        self.advance(participant)

    # --- outcome

    def settle(self, participant: Participant, proposal: Proposal) -> None:
        """The participant keeps a world of which others may not know."""
        world = self.worlds[participant.world.number, proposal]
        self.answer_from_now(participant, proposal)
        strict = participant.rules.is_strict or bool(proposal.left_out)
        self.call(participant.process, world, strict)

    def answer_from_now(self, participant: Participant, proposal: Proposal) -> None:
        participant.settled = proposal
        for rank, link, _ in participant.inbox:
            participant.links[rank] = link
        for rank, link in participant.links.items():
            other = self.participants.get(
                (participant.world.members[rank], participant.world.number)
            )
            if other is not None:
                message = AgreementReply(settled=proposal)
                self.soon(
                    self.receive_reply, other, participant.rules.me, link, message
                )
        participant.inbox.clear()

    def done(
        self, participant: Participant, proposal: Proposal, world: SimulatedWorld
    ) -> None:
        """All members know: close the old worlds, unless a live rank was left out."""
        self.answer_from_now(participant, proposal)
        process = participant.process
        if not any(s.settled and s.settled.left_out for s in self.trail[process]):
            for old in self.trail[process]:
                old.is_closed = True
            self.trail[process] = []
        self.in_use[process] = world
        self.check_use()
        if not self.crashed.isdisjoint(world.members) or self.is_partitioned(world):
            self.soon(self.notice_loss, process, world)

    def used(self) -> dict[int, SimulatedWorld]:
        """The worlds in use: those that all their members use."""
        return {
            world.number: world
            for world in self.in_use.values()
            if all(self.in_use.get(p) is world for p in world.members)
        }

    def check_use(self) -> None:
        """Assert that at most one world is in use."""
        used = [world.members for world in self.used().values()]
        assert len(used) <= 1, f"{self.schedule}: two worlds are in use: {used}"

    def check(self) -> None:
        """Assert all guarantees."""
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
        """Whether survival is guaranteed: deaths are certain, or most ranks live."""
        hosts = {self.schedule.host(process) for process in range(self.n)}
        return len(hosts) == 1 or 2 * len(living) > self.n
