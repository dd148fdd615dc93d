"""Groups of ranks that are alike: of these it is enough to simulate one.

Groups whose routes have no link in common do not slow each other. If the routes of two
of them can be mapped to each other, link to link, with the same latencies, bandwidths
and other directions, whatever both do takes as long in the one as in the other. Groups
that share links count as one: eight groups that leave hosts by the same network card.
"""

from __future__ import annotations

import numpy as np

from unisono.schedule.collective import Ints
from unisono.simulate.conditions import SimulatedWorld

MOST_PAIRS = 1 << 17
"""Of more pairs of ranks than this the routes are not compared."""


def representatives(members: Ints, world: SimulatedWorld) -> Ints:
    """The rows of `members` that tell the time of all of them."""
    count, size = members.shape
    if count < 2 or size < 2 or count * size * (size - 1) > MOST_PAIRS:
        return members
    if len({*world.start.tolist()}) > 1:  # ranks that begin late differ
        return members
    src, dst = (side.ravel() for side in np.nonzero(~np.eye(size, dtype=bool)))
    pairs = members[:, src].ravel(), members[:, dst].ravel()
    routes = world.route(*pairs).reshape(count, -1) % world.bandwidth.size
    part = _parts(routes, world)
    first = np.flatnonzero(part == part[0])
    shape = None
    for one in np.unique(part):
        rows = np.flatnonzero(part == one)
        found = _shape(routes[rows], world)
        if shape is not None and found != shape:
            return members
        shape = found
    return members[first]


def _parts(routes: Ints, world: SimulatedWorld) -> Ints:
    """For each group the first that it shares links with, directly or by others."""
    none, count = world.bandwidth.size - 1, len(routes)
    other = np.append(np.arange(none), none)
    if world.twins.size:  # both directions of a link slow each other
        other[:-1] = np.where(world.twins >= 0, np.minimum(world.twins, other[:-1]), -1)
        other[:-1] = np.where(other[:-1] < 0, np.arange(none), other[:-1])
    cable = other[routes]
    part = np.arange(count)
    while True:
        lowest = np.full(none + 1, count)
        np.minimum.at(lowest, cable, part[:, None])
        lowest[none] = count  # ranks of one node share nothing
        fewer = np.minimum(part, lowest[cable].min(axis=1, initial=count))
        if np.array_equal(fewer, part):
            return part
        part = fewer


def _shape(routes: Ints, world: SimulatedWorld) -> tuple[bytes, ...]:
    """What is the same for groups that are alike: links by where they occur first."""
    flat = routes.ravel()
    links, at, back = np.unique(flat, return_index=True, return_inverse=True)
    place = at[back]
    known = np.full(world.bandwidth.size, -1)
    known[links] = at
    known[-1] = -1
    twin = np.append(world.twins, -1) if world.twins.size else np.full(known.size, -1)
    other = np.where(twin[flat] >= 0, known[twin[flat]], -1)
    none = (flat == world.bandwidth.size - 1).astype(np.int64)
    costs = world.latency[flat].tobytes(), world.bandwidth[flat].tobytes()
    return place.tobytes(), other.tobytes(), none.tobytes(), *costs
