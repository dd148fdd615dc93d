"""Parameter server: workers push to servers, servers add up and send the result back.

With one server this is how training was first made parallel, and its bottleneck is
plain to see: everything passes through rank 0. With a server on every rank, each owning
one shard, the same two steps spread the work evenly, and no scheme moves fewer bytes.

                        rounds    span        work
  one server            2(n-1)    2(n-1)      n-1
  sharded               2(n-1)    2(n-1)/n    (n-1)/n

Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.registry import algorithm
from unisono.schedule import Step, copy_step, reduce_step


@algorithm(chunks=lambda n, sharded: n if sharded else 1)
def all_reduce(n: int, sharded: bool = False) -> Iterator[Step]:
    """Push to the server of each shard, which adds in rank order and sends back."""
    server = np.arange(n if sharded else 1)[:, None]
    worker = np.arange(n)
    push = reduce_step(server, src=worker, dst=server)
    yield push.where(push.src != push.dst).named("push")
    pull = copy_step(server, src=server, dst=worker)
    yield pull.where(pull.src != pull.dst).named("pull")
