"""The sentences under every picture: the cost, the proof, whether bits are equal."""

from __future__ import annotations

from unisono.schedule.collective import BARRIER, Holders
from unisono.schedule.cost import Cost
from unisono.schedule.schedule import Schedule
from unisono.view.frames import MAX_RANKS, letter


def facts(schedule: Schedule) -> list[tuple[str, str]]:
    """Pairs of a word and a sentence; raises ScheduleError if the schedule is wrong."""
    proof = schedule.verify()
    cost = schedule.cost()
    sentences = [("cost", rounds_line(cost))]
    if schedule.collective is not BARRIER:
        sentences.append(("bytes", bytes_line(cost)))
    if schedule.collective.reduces:
        sentences.append(("sums", sums_line(schedule, cost)))
    how = (
        f"{_many(proof.transfers, 'transfer')} checked in {_many(proof.steps, 'step')}"
    )
    sentences.append(
        ("proof", f"{promise(schedule)}: {how}, chance of error {proof.doubt}")
    )
    if schedule.paper:
        sentences.append(("paper", schedule.paper))
    return sentences


def rounds_line(cost: Cost) -> str:
    """Steps, and how many messages one after the other they mean."""
    line = f"{_many(cost.steps, 'step')}, {_many(cost.rounds, 'round')}"
    line += _against(cost.rounds, cost.bound.rounds, "{:d}")
    if cost.ports > 1:
        line += f"; with {cost.ports} ports every step is one round"
    return line


def bytes_line(cost: Cost) -> str:
    """The busiest rank of each step, summed; and how much each rank sends in all."""
    low, high = float(cost.sent.min()), float(cost.sent.max())
    each = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    line = f"{_buffers(cost.span)}, the busiest rank of each step summed"
    line += _against(cost.span, cost.bound.span, "{:.4g}")
    return f"{line}; each rank sends {each}"


def sums_line(schedule: Schedule, cost: Cost) -> str:
    """How much is added, how deep, and whether all ranks have the same bits."""
    bits = schedule.consistency()
    same = (
        "the same bits on all ranks"
        if bits.same_bits_on_all_ranks
        else ("ranks may differ in the last bits")
    )
    line = f"{_buffers(cost.work)} added, likewise"
    line += _against(cost.work, cost.bound.work, "{:.4g}")
    return f"{line}; {bits.depth} deep; {same}"


def promise(schedule: Schedule) -> str:
    """What was proven, in words: "every rank ends with a+b+c"."""
    what = schedule.collective
    if what is BARRIER:
        return "every rank knows that all have arrived"
    if what.reduces and schedule.n <= MAX_RANKS:
        thing = "+".join(letter(r) for r in range(schedule.n))
    elif what.reduces:
        thing = "the sum over all ranks"
    else:
        thing = {
            Holders.EVERYWHERE: "all chunks",
            Holders.ROOT: "all chunks",
            Holders.OWNER: "its chunks",
            Holders.TARGET: "the chunks meant for it",
        }[what.after]
    if what.after is Holders.ROOT:
        return f"rank {schedule.root} ends with {thing}"
    share = " in its chunks" if what.reduces and what.after is Holders.OWNER else ""
    return f"every rank ends with {thing}{share}"


def _against(have: float, least: float, form: str) -> str:
    """How far from the lower bound, in brackets."""
    if have <= least * (1 + 1e-12):
        return " (the fewest possible)" if form == "{:d}" else " (the least possible)"
    return f" (at least {form.format(least)})"


def _buffers(amount: float) -> str:
    return "1 buffer" if amount == 1 else f"{amount:.4g} buffers"


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
