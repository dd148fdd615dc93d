"""`comm.explain` for arrays on a device, of ranks on several hosts: the stages."""

from __future__ import annotations

from unisono.dtypes import DType
from unisono.runtime.device import pipeline
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.explain import device_line
from unisono.runtime.device.layout import ROWS, Layout, has_stages
from unisono.runtime.device.pieces import least_pieces
from unisono.runtime.device.plane import may_use_packets
from unisono.runtime.observe.subject import DeviceCall
from unisono.runtime.plan.select import choose
from unisono.schedule.collective import Collective, Holders
from unisono.units import format_bytes

_FIRST = {Holders.EVERYWHERE: "reduce_scatter", Holders.ROOT: "scatter by the root"}
_LAST = {Holders.EVERYWHERE: "all_gather", Holders.ROOT: "gather by the root"}


def explain_between_hosts(call: DeviceCall, engine: str) -> str:
    """A few readable lines; nothing is run. `engine` says which one it is, and why."""
    n, hosts, what, view, nbytes, _, _, how = call
    layout = Layout(hosts)
    dtype = view.dtype
    staged = has_stages(layout, what.name, how)
    share = -(-nbytes // layout.rails) if staged else nbytes
    across = tuple(range(len(layout.sizes))) if staged else hosts
    piece = -(-share // least_pieces(share, pipeline.SLOT))
    choice = choose(
        what.name,
        piece,
        len(across),
        named=how.algorithm,
        reproducible=how.reproducible,
        hosts=across,
        itemsize=dtype.itemsize,
    )
    most = format_bytes(pipeline.SLOT)
    wire = f"{what.name} by {choice.algorithm} in pieces of up to {most}"
    lines = [
        f"{what.name} of {format_bytes(nbytes)} on {n} ranks of "
        f"{len(layout.sizes)} hosts",
        device_line(view),
        f"  engine     {engine}",
        f"  verified   {what.meaning}",
    ]
    if staged:
        wire += f", on {layout.rails} rails of {format_bytes(share)}"
        largest = max(layout.sizes)
        lines += _inside(_FIRST.get(what.before, ""), what, nbytes, largest, dtype)
        lines.append(f"  across     {wire}")
        lines += _inside(_LAST.get(what.after, ""), what, nbytes, largest, dtype)
    else:
        lines.append(f"  across     {wire}, among all ranks")
    return "\n".join(
        [
            *lines,
            f"  why        {choice.why}",
            f"  memory     {pipeline.SLOTS} pieces of {most} of the host, for any size",
        ]
    )


def _inside(
    stage: str, what: Collective, nbytes: int, ranks: int, dtype: DType
) -> list[str]:
    """The line of a stage inside hosts, if there is one."""
    if not stage:
        return []
    name, _, how = stage.partition(" ")
    choice = algorithm_on_device(
        name,
        nbytes,
        ranks,
        dtype,
        named=None,
        reproducible=False,
        packets=may_use_packets(nbytes),
    )
    each = " for each host" if what.name in ROWS else f" {how}" if how else ""
    return [f"  inside     {name}{each} by {choice.algorithm}, in the devices' memory"]
