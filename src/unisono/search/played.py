"""A step played out: every pass of every stage, and what replicas send beside it.

Stages do one pass after the other in the order of interleaved 1F1B (Narayanan and
others, 2021): forward passes until the pipeline is full, then a forward and a backward
pass in turn, then the rest backward. A pass waits for the one of the neighbour before
it, and for activations on their way. Gradients are reduced bucket by bucket on a stream
of their own, parameters are gathered on it in the order in which chunks need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from unisono.search.cost import BESIDE, Cost, Parts, Passes
from unisono.search.memory import warm_up

Pass = tuple[bool, int, int]
"""Whether it is backward, the chunk's place in the model, the micro-batch."""


def order(stage: int, pp: int, chunks: int, microbatches: int) -> Iterator[Pass]:
    """The passes of a stage, one after the other."""
    total = microbatches * chunks
    ahead = warm_up(stage, pp, chunks, total)

    def one(number: int, *, backward: bool) -> Pass:
        if chunks == 1:
            return backward, stage, number
        turn, rest = divmod(number, pp * chunks)
        chunk, place = divmod(rest, pp)
        chunk = chunks - 1 - chunk if backward else chunk
        return backward, chunk * pp + stage, turn * pp + place

    for number in range(ahead):
        yield one(number, backward=False)
    for number in range(total - ahead):
        yield one(ahead + number, backward=False)
        yield one(number, backward=True)
    for number in range(total - ahead, total):
        yield one(number, backward=True)


class _Stage:
    """A stage while it is played: its passes, its clock, and its stream of data."""

    def __init__(self, passes: Passes, stage: int) -> None:
        choice = passes.choice
        self.passes, self.stage = passes, stage
        self.todo = list(
            order(stage, choice.axes.pp, choice.chunks, choice.microbatches)
        )
        self.next, self.clock, self.stream, self.end = 0, 0.0, 0.0, 0.0
        self.needs: dict[int, float] = {}
        for place in range(stage, len(passes.layers), choice.axes.pp):
            self.stream += passes.gather(place)
            self.needs[place] = self.stream
        self.sent = self.stream
        """Seconds of all that replicas send."""
        self.waited = 0.0
        """Seconds in which parameters were awaited."""

    def do(self, one: Pass, ready: float) -> float:
        """Do the next pass, whose input is ready then; returns when it ends."""
        backward, place, number = one
        start = max(self.clock, ready)
        needed = self.needs.pop(place, 0.0)
        self.waited += max(0.0, needed - start)
        start = max(start, needed)
        self.clock = start + self.passes.seconds(place, backward=backward)
        self.next += 1
        if backward:
            self._reduce(place, number, start, self.clock)
        return self.clock

    def parts(self) -> Parts:
        """What this stage did in the step, but for waiting for its neighbours."""
        count = self.passes.choice.microbatches
        found = {k: count * v for k, v in self.passes.of_stage(self.stage).items()}
        late = max(0.0, self.stream - self.clock)
        if self.passes.choice.zero == 3:
            late = self.passes.bucket(self.stage)
        found["data"] = late + self.waited
        hidden = BESIDE * max(0.0, self.sent - found["data"])
        self.end = self.clock + late + hidden
        found["beside"] = found.get("beside", 0.0) + hidden
        found["optimizer"] = self.passes.optimizer(self.stage)
        self.end += found["optimizer"]
        return found

    def _reduce(self, place: int, microbatch: int, start: float, end: float) -> None:
        """Send the gradients of a backward pass, as they become ready."""
        choice = self.passes.choice
        last = microbatch == choice.microbatches - 1
        if choice.zero == 3:
            return  # counted in the pass; the last bucket is added at the end
        if not last and choice.zero < 2:
            return
        count, each = self.passes.buckets(place), self.passes.bucket(place)
        self.sent += count * each
        for bucket in range(ceil(count)):
            part = min(1.0, count - bucket)
            ready = start + (end - start) * (bucket + part) / count
            self.stream = max(self.stream, ready) + part * each


def play(passes: Passes) -> Cost:
    """The step, pass by pass; it ends when the last stage does.

    What is said of it is what the stage with most to do did: the others wait for it.
    """
    stages = [_Stage(passes, s) for s in range(passes.choice.axes.pp)]
    _run(passes, stages)
    busiest = max((stage.parts() for stage in stages), key=lambda p: sum(p.values()))
    time = max(stage.end for stage in stages)
    if len(stages) > 1:
        busiest["pipeline"] = max(0.0, time - sum(busiest.values()))
    return Cost(time, busiest)


def _run(passes: Passes, stages: list[_Stage]) -> None:
    """Give all passes their times: a stage goes on until its input is missing."""
    done: dict[Pass, float] = {}
    last = len(passes.layers) - 1
    moved = True
    while moved:
        moved = False
        for stage in stages:
            while stage.next < len(stage.todo):
                one = stage.todo[stage.next]
                before = _before(one, last)
                if before is not None and before not in done:
                    break
                ready = 0.0 if before is None else done[before]
                if before is not None and before[1] != one[1]:
                    ready += passes.hop
                done[one] = stage.do(one, ready)
                moved = True


def _before(one: Pass, last: int) -> Pass | None:
    """The pass whose output a pass needs; None for the first of a micro-batch."""
    backward, place, number = one
    if backward:
        return (True, place + 1, number) if place < last else (False, last, number)
    return (False, place - 1, number) if place else None
