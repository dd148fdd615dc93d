"""For tests and notebooks: worlds of threads, and what results should be.

world           ranks as threads of this process
world_across    ranks as processes, on pretended hosts or in namespaces
Hosts           network namespaces with links of a given speed; needs root
Proxy           a bad network between two processes; needs no privileges
faults          real processes, one of which is killed or stopped at work
reference       what a schedule makes of given inputs, step by step, in NumPy
survivors       agreement on who is left, simulated: every delay and death from a seed
churn           a job whose ranks are killed and replaced from outside
programs        what lowering made of it, run in any order and watched for races
slow            a slow link in front of a fast communicator
"""

from unisono.testing.across import WorldAcross, world_across
from unisono.testing.hosts import Hosts, hosts_available, needs_hosts
from unisono.testing.proxy import Proxy
from unisono.testing.reference import reference
from unisono.testing.worlds import World, world

__all__ = [
    "Hosts",
    "Proxy",
    "World",
    "WorldAcross",
    "hosts_available",
    "needs_hosts",
    "reference",
    "world",
    "world_across",
]
