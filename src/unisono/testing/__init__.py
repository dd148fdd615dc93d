"""For tests and notebooks: worlds of threads, and what results should be.

world        ranks as threads of this process
faults       real processes, one of which is killed or stopped at work
reference    what a schedule makes of given inputs, step by step, in NumPy
programs     what lowering made of it, run in any order and watched for races
"""

from unisono.testing.reference import reference
from unisono.testing.worlds import World, world

__all__ = ["World", "reference", "world"]
