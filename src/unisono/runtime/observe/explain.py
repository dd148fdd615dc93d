"""`comm.explain`: what would run, why, what it costs, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from unisono.devices.arrays import is_on_device, view_of
from unisono.dtypes import dtype_of
from unisono.errors import BadArgument
from unisono.runtime.call.buffers import IN_PLACE_FROM, buffer_of, is_contiguous
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.call.registered import MemoryHome, home_of
from unisono.runtime.observe import recorder
from unisono.runtime.observe.explain_codecs import CodecExplanation, explained
from unisono.runtime.observe.subject import DeviceCall, ObservedCore
from unisono.runtime.plan.plans import lowered, verified
from unisono.runtime.plan.predict import CostModel
from unisono.runtime.plan.select import AlgorithmChoice, choose
from unisono.runtime.plan.tuned import Tuned, TunedRow
from unisono.schedule.collective import collective as find_collective
from unisono.schedule.program import Program
from unisono.units import format_bandwidth, format_bytes, format_seconds


def explain(
    core: ObservedCore,
    collective: str,
    x: Any = None,
    *,
    algorithm: str | None = None,
    root: int = 0,
    op: Any = "sum",
    reproducible: bool = False,
    codec: Any = None,
    coded: str | None = None,
    error_bound: float | None = None,
) -> str:
    """A few readable lines; nothing is run."""
    what = find_collective(collective)
    n = core.world_size
    if x is None and collective != "barrier":
        raise BadArgument(
            f"explain({collective!r}, x): an array is required, for its size"
        )
    nbytes = 0 if x is None else _size(x)
    if collective in ("all_gather", "gather"):
        nbytes *= n
    how = CallOptions(
        algorithm, False, None, reproducible, "", codec, coded, error_bound
    )
    if x is not None and is_on_device(x):
        own_root = root if what.rooted else 0
        view = view_of(x, "explain")
        named, hosts = as_reduction(op).op, core.hosts_if_several
        call = DeviceCall(n, hosts, what, view, nbytes, own_root, named, how)
        return core.device.explain(call)
    if codec is not None:
        dtype = None if x is None else dtype_of(x)
        found = explained(
            core, collective, nbytes, dtype, root if what.rooted else 0, how
        )
        lines = [f"  measured   {_measured(core, collective, x, found)}"]
        return "\n".join([*found.lines, *lines])
    how.refuse_codec_options(collective)
    links = core.session.links_between(core.world_ranks)
    choice = choose(
        collective,
        nbytes,
        n,
        named=algorithm,
        reproducible=reproducible,
        hosts=core.hosts_if_several or None,
        tuned=core.session.tuned,
        itemsize=0 if x is None else dtype_of(x).itemsize,
        model=links,
    )
    spec = core.spec(choice.algorithm)
    schedule = verified(collective, spec, n, root if what.rooted else 0)
    cost = schedule.cost(nbytes)
    programs = lowered(collective, spec, n, schedule.root, 0, core.hosts_if_several)
    lines = [
        f"{collective} of {format_bytes(nbytes)} on {n} ranks by {choice.algorithm}",
        f"  why        {choice.why}",
        f"  chosen by  {chooser(choice, core.session.tuned)}",
        f"  verified   {what.meaning}",
        f"  costs      {schedule.num_steps} steps; the busiest rank moves "
        f"{format_bytes(int(cost.span))}",
        f"  order      {_order(programs.canonical)}",
        f"  memory     {programs.places} places in a window of "
        f"{format_bytes(core.session.window)}",
    ]
    if n > 1:
        lines.append(f"  buffers    {_reaching(core, x, nbytes)}")
    if core.hosts_if_several:
        lines.append(f"  hosts      {_crossing(core, programs.programs)}")
        lines.append(f"  links      {_links(links)}")
        if lanes := core.session.lanes():
            lines.append(f"  lanes      {lanes}")
    lines += _of_choice(choice)
    lines.append(f"  measured   {_measured(core, collective, x, choice)}")
    return "\n".join(lines)


def _of_choice(choice: AlgorithmChoice) -> list[str]:
    """What else is known of a choice: the second best, the prediction, the table."""
    lines = []
    if choice.runner_up:
        lines.append(f"  runner-up  {runner_up(choice)}")
    if choice.predicted:
        lines.append(f"  predicted  {format_seconds(choice.predicted)}")
    if choice.row is not None:
        lines.append(f"  tuned      {when_tuned(choice.row)}")
    return lines


def chooser(choice: AlgorithmChoice, tuned: Tuned | None) -> str:
    """What chose the algorithm, as text."""
    text = {
        "caller": "the caller",
        "variable": "the environment",
        "rule": "the rules for ranks that share memory",
        "model": "the model of hosts on a network",
        "table": f"the table {tuned.origin}".rstrip() if tuned else "the table",
    }[choice.by]
    if choice.by in ("rule", "model"):
        missing = "the table has no such call" if tuned else "there is no table"
        return f"{text}; {missing} (unisono tune)"
    return text


def runner_up(choice: AlgorithmChoice) -> str:
    """The second best algorithm, with its times if they are known."""
    parts = [choice.runner_up]
    if choice.runner_up_predicted:
        parts.append(f"predicted {format_seconds(choice.runner_up_predicted)}")
    if choice.row is not None and choice.row.runner_up_measured:
        parts.append(f"measured {format_seconds(choice.row.runner_up_measured)}")
    return ", ".join(parts)


def when_tuned(row: TunedRow) -> str:
    """The time that `unisono tune` measured."""
    return f"{format_seconds(row.measured)}, measured at {format_bytes(row.nbytes)}"


def _size(x: Any) -> int:
    if is_on_device(x):
        return buffer_of(x, "explain").nbytes
    count = x.numel() if hasattr(x, "numel") else x.size
    return int(count) * dtype_of(x).itemsize


def _crossing(core: ObservedCore, programs: Sequence[Program]) -> str:
    """The number of hosts, of streams per rank for this call, and the network."""
    most = max(len({m.to for m in p.messages}) for p in programs)
    where = f"; this rank is at {core.session.why}" if core.session.why else ""
    return f"{len(set(core.hosts))}; a rank sends to at most {most} on others{where}"


def _links(model: CostModel | None) -> str:
    """The constants of the model, and where they come from."""
    if model is None or not model.leaving:
        return "not known, without a probe: the constants of an ordinary network"
    rates = [1 / byte for byte in (*model.leaving, *model.entering)]
    low, high = format_bandwidth(min(rates)), format_bandwidth(max(rates))
    return (
        f"{low if low == high else f'{low} to {high}'}, a step with one message takes "
        f"{format_seconds(model.start + model.message)}, as probed at the start"
    )


def _reaching(core: ObservedCore, x: Any, nbytes: int) -> str:
    home = MemoryHome.PRIVATE
    if x is not None and is_contiguous(x):
        home = home_of(core.session, buffer_of(x, "explain"))
    if home in _IN_PLACE:
        if nbytes < IN_PLACE_FROM:
            return f"staged, as every call on less than {format_bytes(IN_PLACE_FROM)}"
        return f"used in place, if every rank's are: {_IN_PLACE[home]}"
    return (
        "large ones are staged until the ranks have tried to read each other's memory",
        "large ones are copied once, from process to process",
        "staged: the system does not let the ranks read each other's memory",
    )[core.native.cross_memory_access()]


_IN_PLACE = {
    MemoryHome.EMPTY: "this rank's is memory of comm.empty",
    MemoryHome.REGISTERED: "this rank's is registered",
}


def _order(canonical: bool) -> str:
    if canonical:
        return "one pass in rank order: the same bits for every size"
    return "in the schedule's order: the same bits on all ranks"


def _measured(
    core: ObservedCore,
    collective: str,
    x: Any,
    found: AlgorithmChoice | CodecExplanation,
) -> str:
    """The median time of calls like this one in the flight recorder."""
    codec = found.codec if isinstance(found, CodecExplanation) else ""
    count = 0 if x is None else _size(x) // dtype_of(x).itemsize
    if collective in ("all_gather", "gather"):
        count *= core.world_size
    times = [
        r["time_discovered_completed_ns"] - r["time_discovered_started_ns"]
        for r in recorder.records(core.session.logbook)
        if r["profiling_name"] == collective
        and (r["algorithm"], r["codec"]) == (found.algorithm, codec)
        and r["input_sizes"] == [[count]]
        and r["state"] == "completed"
        and r["device"] is None
    ]
    if not times:
        return "not yet: no such call among the last 2,000"
    return f"{median(times) / 1e3:.1f} µs, the median of {len(times)} calls"
