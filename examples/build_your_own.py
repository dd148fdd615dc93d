"""Schedules from schedules: the combinators."""

import numpy as np

import unisono
from unisono.schedule import fold, mirror, product, relabel, split, then

gather = unisono.schedule("all_gather", "circulant", n=6)
print("mirror: ", mirror(gather).verify())
print("then:   ", then(mirror(gather), gather).verify())

chain = unisono.schedule("broadcast", "chain:segments=1", n=6)
for segments in (1, 4, 16):
    cost = split(chain, segments).cost()
    print(f"split:   {segments:2} segments, {cost.steps} steps, span {cost.span:.3f}")

order = np.random.default_rng(0).permutation(6)
print("relabel:", relabel(gather, order).verify())

swing = unisono.schedule("all_reduce", "swing", n=8)
print("fold:   ", fold(swing, 13).verify())

inside = [unisono.schedule("all_gather", "direct", n=size) for size in (3, 2, 2)]
across = unisono.schedule("all_gather", "ring", n=3)
print("product:", product(inside, across).verify())
