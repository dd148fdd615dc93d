"""For tests and notebooks: worlds of threads or processes, and expected results.

world           ranks as threads of this process
world_across    ranks as processes, on emulated hosts or in network namespaces
Hosts           network namespaces with links of a given speed; needs root
Proxy           a faulty network between two processes; needs no privileges
check_transport what any transport must do, checked in worlds of several sizes
check_wire      the same for the byte connection below one
engines         a module: what an engine for CUDA arrays must do, on the GPUs here
reference       a schedule applied to given inputs, step by step, in NumPy
"""

from unisono.testing.across import WorldAcross, world_across
from unisono.testing.hosts import Hosts, hosts_available, needs_hosts
from unisono.testing.proxy import Proxy
from unisono.testing.reference import reference
from unisono.testing.transports import check_transport, check_wire
from unisono.testing.worlds import World, world

__all__ = [
    "Hosts",
    "Proxy",
    "World",
    "WorldAcross",
    "check_transport",
    "check_wire",
    "hosts_available",
    "needs_hosts",
    "reference",
    "world",
    "world_across",
]
