"""Simulations of several algorithms in several processes (`unisono simulate --jobs`).

A topology has functions and does not travel: each process makes its own from the name.
Nor do its results carry it; it is put back when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import Comparison, Result
from unisono.simulate.compare import comparison, tried
from unisono.topology import Topology
from unisono.tune import topology_named


def compared(
    what: str,
    names: Sequence[str],
    where: Topology,
    sizes: Sequence[int],
    *,
    spelled: str,
    jobs: int,
    progress: Callable[[str], None],
    **options: Any,
) -> Comparison:
    """As `compare`, in so many processes; `progress` is told what is done.

    `spelled` is what `where` was made from.
    """
    found: dict[str, list[Result] | str] = dict.fromkeys(names, "")
    workers = min(jobs, len(names))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(_tried, what, name, spelled, sizes, options): name
            for name in names
        }
        try:
            for future in as_completed(futures):
                name, answer = futures[future], future.result()
                found[name] = (
                    answer
                    if isinstance(answer, str)
                    else [
                        replace(r, collective=COLLECTIVES[what], topology=where)
                        for r in answer
                    ]
                )
                progress(name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return comparison(what, where, sizes, found)


def _tried(
    what: str, name: str, spelled: str, sizes: Sequence[int], options: dict[str, Any]
) -> list[Result] | str:
    """In a process of its own: one algorithm, without what does not travel."""
    found = tried(what, name, topology_named(spelled), sizes, **options)
    if isinstance(found, str):
        return found
    bare: dict[str, Any] = {"collective": None, "topology": None, "timeline": None}
    return [replace(result, **bare) for result in found]
