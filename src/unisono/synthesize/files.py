"""A synthesized schedule as an algorithm file, which `--algorithm FILE` takes.

The file is Python and has the trees as plain numbers. So it can be read, verified, run
and sent to other hosts as any algorithm of one's own, in segments if it is asked for
them: `mine.py:segments=16`.
"""

from __future__ import annotations

import os
from pathlib import Path

from unisono.errors import BadArgument, NotOffered
from unisono.schedule.files import save as save_schedule
from unisono.synthesize.api import Synthesis
from unisono.synthesize.quickest import Quickest

SUFFIXES = (".py", ".json", ".npz")
"""The kinds of files that `save` writes."""

_HEAD = '''"""{title}: a schedule for one topology.

Made by `unisono synthesize` for {topology}. {about}
"""

from collections.abc import Iterator

from unisono.algorithms import algorithm
from unisono.algorithms.registry import Requirement
from unisono.schedule import Schedule, Step, copy_step, reduce_step
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.step import together

RANKS = {n}
CHUNKS = {chunks}
STEPS = (
{steps}
)
"""For each step its phase and parts: if they reduce, chunks, senders, receivers."""


@algorithm(
    needs=Requirement("{n}", lambda n, **_: n == RANKS), least={{"segments": 1}}
)
def {collective}({taken}, segments: int = 1) -> Schedule:
    """{kind} for {topology}."""
{refusal}    what = COLLECTIVES["{collective}"]
    return Schedule(what, n, CHUNKS, _steps, root={root}).split(segments)


def _steps() -> Iterator[Step]:
    for phase, *parts in STEPS:
        made = [
            (reduce_step if reduces else copy_step)(chunk=chunk, src=src, dst=dst)
            for reduces, chunk, src, dst in parts
        ]
        yield together(made).named(phase)
'''

_REFUSAL = """    if root != {root}:
        raise BadArgument("this file has the schedule for root {root} alone")
"""


def save(made: Synthesis | Quickest, path: str | os.PathLike[str]) -> None:
    """Write the schedule as an algorithm file (.py), or as data (.json, .npz)."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise BadArgument(
            f"{target}: a synthesized schedule is saved as .py, for --algorithm, or "
            "as .json or .npz"
        )
    if target.suffix != ".py":
        save_schedule(made.schedule, target)
        return
    if not target.parent.is_dir():
        raise BadArgument(f"{target}: there is no such folder")
    target.write_text(as_source(made), encoding="utf-8")


def as_source(made: Synthesis | Quickest) -> str:
    """The text of the algorithm file."""
    schedule = made.schedule
    rows = []
    for step in schedule:
        src, dst, chunk, mask, into = step.flat()
        if (into != chunk).any():
            raise NotOffered(
                f"{made.kind} uses temporaries, which an algorithm file does not hold; "
                "save it as .json or .npz, or run the algorithm of the library by name"
            )
        parts = [
            f"        ({reduces}, {', '.join(str(c[at].tolist()) for c in columns)}),\n"
            for reduces, at in ((True, mask), (False, ~mask))
            for columns in [(chunk, src, dst)]
            if at.any()
        ]
        rows.append(f"    (\n        {step.phase!r},\n{''.join(parts)}    ),")
    rooted = schedule.collective.rooted
    text = _HEAD.format(
        title=schedule.collective.name,
        topology=_plain(made.topology.name),
        about=made.about,
        n=schedule.n,
        root=schedule.root,
        chunks=schedule.num_chunks,
        steps="\n".join(rows),
        kind=made.kind,
        collective=schedule.collective.name,
        taken=f"n: int, root: int = {schedule.root}" if rooted else "n: int",
        refusal=_REFUSAL.format(root=schedule.root) if rooted else "",
    )
    if rooted:
        text = text.replace(
            "from unisono.schedule import",
            "from unisono.errors import BadArgument\nfrom unisono.schedule import",
            1,
        )
    return text


def _plain(name: str) -> str:
    """A topology's name as it can stand in a docstring."""
    return "".join(c for c in name if c.isprintable() and c not in '"\\')
