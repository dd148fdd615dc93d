"""`comm.explain` for arrays on a device, of ranks on several hosts: the stages."""

from __future__ import annotations

from unisono import _native
from unisono.devices.arrays import DeviceView
from unisono.runtime.call.options import CallOptions
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.layout import Layout, has_stages
from unisono.runtime.device.pipeline import SLOT, SLOTS
from unisono.runtime.plan.select import choose
from unisono.schedule.collective import Collective, Holders
from unisono.units import format_bytes

_FIRST = {Holders.EVERYWHERE: "reduce_scatter", Holders.ROOT: "scatter by the root"}
_LAST = {Holders.EVERYWHERE: "all_gather", Holders.ROOT: "gather by the root"}


def explain_between_hosts(
    hosts: tuple[int, ...],
    what: Collective,
    view: DeviceView,
    nbytes: int,
    how: CallOptions,
) -> str:
    """A few readable lines; nothing is run."""
    layout = Layout(hosts)
    n, dtype = len(hosts), view.dtype
    device = _native.cuda_device(view.ordinal)
    emulated = " (emulated)" if _native.cuda_is_emulated() else ""
    staged = has_stages(layout, what.name, how)
    share = -(-nbytes // layout.lanes) if staged else nbytes
    across = tuple(range(len(layout.sizes))) if staged else hosts
    piece = min(share, SLOT)
    choice = choose(
        what.name,
        piece,
        len(across),
        named=how.algorithm,
        reproducible=how.reproducible,
        hosts=across,
        itemsize=dtype.itemsize,
    )
    wire = f"{what.name} by {choice.algorithm} in pieces of up to {format_bytes(SLOT)}"
    lines = [
        f"{what.name} of {format_bytes(nbytes)} on {n} ranks of "
        f"{len(layout.sizes)} hosts",
        f"  device     cuda:{view.ordinal}, {device.name}{emulated}",
        f"  verified   {what.meaning}",
    ]
    if staged:
        by = [
            algorithm_on_device(
                name.split()[0],
                nbytes,
                max(layout.sizes),
                dtype,
                named=None,
                reproducible=False,
            ).algorithm
            for name in (_FIRST[what.before], _LAST[what.after])
        ]
        lines += [
            f"  inside     {_FIRST[what.before]} by {by[0]}, in the devices' memory",
            f"  across     {wire}, on {layout.lanes} lanes of {format_bytes(share)}",
            f"  inside     {_LAST[what.after]} by {by[1]}, in the devices' memory",
        ]
    else:
        lines += [f"  across     {wire}, among all ranks"]
    return "\n".join(
        [
            *lines,
            f"  why        {choice.why}",
            f"  memory     {SLOTS} pieces of {format_bytes(SLOT)} of the host, for any "
            "size",
        ]
    )
