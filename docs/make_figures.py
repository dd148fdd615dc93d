"""Write the figures of the pages, from data, into docs/figures/.

    python -m docs.make_figures

Each collective before and after, from its contract; each training strategy, from what
was recorded of real steps; a pipeline, from the order of its actions; what a trace
shows, from the simulator; and the ring that README opens with. The files are kept, so
that pages show them where nothing is built; a test says when they are not current.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.collective_figures import before_and_after
from docs.moving import moving
from docs.strategy_figures import STRATEGIES, pipeline, strategy
from docs.trace_figure import traced
from unisono.algorithms import schedule
from unisono.schedule.collective import COLLECTIVES

FOLDER = Path(__file__).parent / "figures"


def figures() -> dict[str, Callable[[], str]]:
    """What draws each file, by its name."""
    made: dict[str, Callable[[], str]] = {
        f"{name}.svg": partial(before_and_after, name) for name in COLLECTIVES
    }
    made |= {f"{file}.svg": partial(strategy, file) for file in STRATEGIES}
    made["pipeline.svg"] = pipeline
    made["trace.svg"] = traced
    made["ring.svg"] = lambda: moving(schedule("all_reduce", "ring", 4))
    return made


def main(folder: Path = FOLDER) -> None:
    """All figures, afresh."""
    folder.mkdir(exist_ok=True)
    for name, draw in figures().items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
