"""Calls on the host that announce calls which another library carries out.

They move nothing; the ranks compare their fingerprints, which are those of the calls
that they stand for. So the host finds out, for calls that it does not carry out itself,
whether they differ, who is late, and who has died, and records them.
"""

from __future__ import annotations

from weakref import ref

import numpy as np

from unisono import _native
from unisono.algorithms import Spec
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.arguments import barrier as barrier_call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.plan.plans import CallKind, make_plan

MOST_PLANS = 1024
"""Kinds of calls that are kept."""


class Announcements:
    """The announcements of one communicator's calls."""

    def __init__(self, host: HostHalf, algorithm: str = "nccl") -> None:
        """`algorithm` is who carries out the calls, for errors and records."""
        self._host = ref(host)
        self._algorithm = Spec(algorithm)
        self._plans: dict[object, _native.Plan] = {}

    def make(
        self, call: Call, reduction: Reduction, label: str, limit_s: float
    ) -> _native.Work:
        """Announce a call: done when all ranks have announced it."""
        host = self._host()
        assert host is not None
        kind = CallKind.of(call, reduction, self._algorithm, label)
        plan = self._plans.get(kind)
        if plan is None:
            if len(self._plans) > MOST_PLANS:
                self._plans.clear()
            plan = self._plans[kind] = self._plan(host, kind)
        work = host.native.submit(plan, 0, 0, nanoseconds(limit_s))
        host.in_flight.add(work, None)
        return work

    def _plan(self, host: HostHalf, kind: CallKind) -> _native.Plan:
        nothing = barrier_call(np.empty(0, dtype=np.uint8))
        arrival = host.kind(nothing, Reduction("sum"), CallOptions())
        plan, destinations = make_plan(
            arrival,
            host.world_size,
            host.rank,
            window=host.session.window,
            hosts=host.hosts_if_several,
            reaches=host.session.reaches,
            noted=kind,
        )
        host.connect(destinations, kind.collective)
        return plan
