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

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.registry import algorithm
from unisono.schedule import Step, copy_step, reduce_step

ADVICE = Advice(
    en=Words(
        good="To compare with; sharded, it sends as few bytes as any.",
        bad=(
            "One server: everything passes through rank 0, which takes longer with "
            "every rank."
        ),
        memory="None: the server adds what arrives at once.",
    ),
    zh=Words(
        good="用作比较；分片（sharded）时字节数与最优者相同。",
        bad="单个服务器：所有数据都经过 rank 0，rank 越多越慢。",
        memory="不需要：服务器把到达的数据立即相加。",
    ),
)


@algorithm(chunks=lambda n, sharded: n if sharded else 1)
def all_reduce(n: int, sharded: bool = False) -> Iterator[Step]:
    """Push to the server of each shard, which adds in rank order and sends back."""
    server = np.arange(n if sharded else 1)[:, None]
    worker = np.arange(n)
    push = reduce_step(server, src=worker, dst=server)
    yield push.where(push.src != push.dst).named("push")
    pull = copy_step(server, src=server, dst=worker)
    yield pull.where(pull.src != pull.dst).named("pull")
