"""Training strategies: what moves when, and what lies in memory meanwhile.

The data is what the studio shows, recorded from real steps; it is drawn in order, each
event as wide as the next. A pipeline is drawn from the order of its actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.drawings import WIDTH, colour, svg, text
from unisono.parallel.model.pipeline_order import ORDERS, PipelineAction
from unisono.units import format_bytes
from unisono.view.assets import text as asset

STRATEGIES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp": "FSDP",
    "tensor": "Tensor parallel",
    "sequence": "Sequence parallel",
    "context": "Context parallel",
    "experts": "Experts",
    "server": "Parameter server",
}
"""The file of each strategy that was recorded, and its name there."""

_LEFT, _ROW, _MEMORY = 84.0, 26.0, 110.0
_KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations")
_COMPUTES = {"Forward": 0, "Backward": 1, "Step": 2}
_CALLS = {
    "all_reduce": 3,
    "all_gather": 4,
    "reduce_scatter": 5,
    "all_to_all": 5,
    "reduce": 3,
    "broadcast": 4,
    "gather": 3,
    "scatter": 4,
    "send": 5,
    "recv": 5,
}
_MOST_LANES = 3

Event = dict[str, Any]


def strategy(file: str) -> str:
    """One step of a strategy: computing, collectives, memory."""
    found = json.loads(asset("strategies.json"))["strategies"]
    data = next(s for s in found if s["name"] == STRATEGIES[file])
    events: list[Event] = data["happenings"]
    stops = sorted({event[end] for event in events for end in ("start", "end")})
    wide = (WIDTH - _LEFT - 16) / max(len(stops) - 1, 1)
    place = {stop: _LEFT + wide * k for k, stop in enumerate(stops)}
    lanes = _lanes(events)
    top = 78 + _ROW * (1 + max(lanes)) + 22
    parts = list(_legend(events))
    parts.append(text(_LEFT - 8, 94, "computes", "l", "end"))
    parts.append(text(_LEFT - 8, 94 + _ROW, "moves", "l", "end"))
    for event, lane in zip(events, lanes, strict=True):
        x, end = place[event["start"]], place[event["end"]]
        parts.append(_bar(x, 78 + _ROW * lane, end - x, _hue(event), _name(event)))
    parts += _memory(data["memory"], top, place)
    sent = format_bytes(data["sent"])
    title = f"{data['name']}: one step on a rank, which sends {sent}"
    return svg(title, top + _MEMORY + 44, parts)


def _hue(event: Event) -> int:
    if event["kind"] == "compute":
        return _COMPUTES.get(event["name"], 2)
    return _CALLS[event["name"]]


def _name(event: Event) -> str:
    return str(event["what"] if event["kind"] == "compute" else event["name"])


def _legend(events: list[Event]) -> Iterator[str]:
    names = dict.fromkeys(event["name"] for event in events)
    hues = {event["name"]: _hue(event) for event in events}
    x = _LEFT
    for name in names:
        yield (
            f'<rect x="{x:.1f}" y="44" width="12" height="12" rx="3" '
            f'fill="{colour(hues[name])}"/>'
        )
        yield text(x + 17, 54, name, "l")
        x += 34 + 6.6 * len(name)


def _bar(x: float, y: float, width: float, hue: int, words: str) -> str:
    made = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 1):.1f}" height="20" '
        f'rx="2" fill="{colour(hue)}"/>'
    )
    if 6.6 * len(words) + 6 < width:
        made += text(x + 3, y + 14, words, "w")
    return made


def _lanes(events: list[Event]) -> list[int]:
    """Computing in lane 0; what moves in the first lane below that is free."""
    busy = [float("-inf")] * _MOST_LANES
    lanes = []
    for event in events:
        if event["kind"] == "compute":
            lanes.append(0)
            continue
        free = [k for k, end in enumerate(busy) if end <= event["start"]]
        lane = free[0] if free else _MOST_LANES - 1
        busy[lane] = event["end"]
        lanes.append(1 + lane)
    return lanes


def _memory(
    moments: list[Event], top: float, place: dict[float, float]
) -> Iterator[str]:
    """What a rank holds over time, kind upon kind."""
    kinds = [k for k in _KINDS if any(k in moment["parts"] for moment in moments)]
    most = float(max(sum(moment["parts"].values()) for moment in moments))
    stops = sorted(place)

    def x(at: float) -> float:
        return place[next((stop for stop in stops if stop >= at), stops[-1])]

    def y(nbytes: float) -> float:
        return top + _MEMORY - nbytes / most * (_MEMORY - 10)

    yield text(_LEFT - 8, top + 14, format_bytes(int(most)), "l", "end")
    yield text(_LEFT - 8, top + _MEMORY, "memory", "l", "end")
    below = [0.0] * len(moments)
    ends = [x(moment["at"]) for moment in moments[1:]] + [x(stops[-1])]
    for at, kind in enumerate(kinds):
        number = _KINDS.index(kind)
        there, back = "", ""
        for k, moment in enumerate(moments):
            low, below[k] = below[k], below[k] + moment["parts"].get(kind, 0)
            there += f"L{x(moment['at']):.1f} {y(below[k]):.1f}H{ends[k]:.1f}"
            back = f"L{ends[k]:.1f} {y(low):.1f}H{x(moment['at']):.1f}{back}"
        yield f'<path fill="{colour(number)}" d="M{there[1:]}{back}z"/>'
        mark = _LEFT + 126 * at
        yield (
            f'<rect x="{mark:.1f}" y="{top + _MEMORY + 14:.1f}" width="12" height="12" '
            f'rx="3" fill="{colour(number)}"/>'
        )
        yield text(mark + 17, top + _MEMORY + 24, kind, "l")


# --- pipelines


def pipeline() -> str:
    """Four stages and six micro-batches, in both orders."""
    stages, batches = 4, 6
    parts: list[str] = []
    y = 50.0
    for name, order in ORDERS.items():
        ran = _ran([order(stage, stages, batches) for stage in range(stages)])
        last = max(end for line in ran for _, _, end in line)
        wide = (WIDTH - _LEFT - 160) / last
        parts.append(text(16, y + 4, f"{name}:"))
        for stage, line in enumerate(ran):
            row = y + 14 + 22 * stage
            parts.append(text(_LEFT - 8, row + 13, f"stage {stage}", "l", "end"))
            for action, start, end in line:
                at, hue = _LEFT + start * wide, 0 if action.forward else 1
                parts.append(
                    f'<rect x="{at:.1f}" y="{row:.1f}" '
                    f'width="{(end - start) * wide - 1:.1f}" height="18" rx="2" '
                    f'fill="{colour(hue)}"/>'
                )
                parts.append(text(at + 3, row + 13, str(action), "w"))
            held = _most_held([action for action, *_ in line])
            keeps = f"keeps {held} micro-batches" if held > 1 else "keeps 1 micro-batch"
            parts.append(text(_LEFT + last * wide + 8, row + 13, keeps, "l"))
        y += 14 + 22 * stages + 24
    title = (
        "Pipelines: forward (F) and backward (B) of micro-batches, as if B took twice"
    )
    return svg(title, y, parts)


_Ran = list[tuple[PipelineAction, int, int]]


def _ran(orders: list[list[PipelineAction]]) -> list[_Ran]:
    """When each action begins and ends; it waits for its neighbour's."""
    done: dict[tuple[int, PipelineAction], int] = {}
    ran: list[_Ran] = [[] for _ in orders]
    free, at = [0] * len(orders), [0] * len(orders)
    while any(at[s] < len(order) for s, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            action = order[at[stage]]
            source = stage - 1 if action.forward else stage + 1
            needed = (source, action) if 0 <= source < len(orders) else None
            if needed is not None and needed not in done:
                continue
            start = max(free[stage], done[needed] if needed else 0)
            end = start + (1 if action.forward else 2)
            done[stage, action] = free[stage] = end
            ran[stage].append((action, start, end))
            at[stage] += 1
    return ran


def _most_held(actions: list[PipelineAction]) -> int:
    """How many micro-batches are kept for backward, at most."""
    held = most = 0
    for action in actions:
        held += 1 if action.forward else -1
        most = max(most, held)
    return most
