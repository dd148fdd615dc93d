"""Calls cut into pieces: they fit, and together they are the call."""

import numpy as np
import pytest

from unisono.dtypes import DTYPES
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallOptions
from unisono.runtime.device.layout import Layout, has_stages
from unisono.runtime.device.pieces import Pieces, least_pieces
from unisono.schedule.collective import COLLECTIVES, Contract

NAMES = [name for name in COLLECTIVES if name != "barrier"]
ROOM = 4096


def counts_of(name, n, random):
    shares = COLLECTIVES[name].chunk_multiple(n)
    if shares == 1:
        return int(random.integers(0, 30_000))
    return tuple(random.integers(0, 9_000 // n, shares).tolist())


def covered(parts, nbytes):
    """How often each byte of an array is in a part."""
    found = np.zeros(nbytes, int)
    for at, length in parts:
        found[at : at + length] += 1
    return found


@pytest.mark.parametrize("name", NAMES)
def test_pieces_fit_on_all_ranks_and_cover_each_byte_once(name):
    random = np.random.default_rng(7)
    for n in (1, 2, 3, 5):
        for dtype in ("int8", "complex128"):
            check(name, n, DTYPES[dtype], counts_of(name, n, random), n // 2)


def check(name, n, dtype, counts, root):
    collective = COLLECTIVES[name]
    shares = collective.chunk_multiple(n)
    root = root if collective.rooted else 0
    contract = Contract(collective, n, root, shares)
    sizes, all_counts = contract.chunk_sizes(counts), []
    for rank in range(n):
        x, y = (Buffer(None, at, (0,), dtype) for at in (1 << 20, 1 << 30))
        call = Call(name, counts, x, y, None, root=root)
        pieces = Pieces(call, Position(rank, n), ROOM)
        made = list(pieces)
        all_counts.append([piece.counts for piece in made])
        for which, place in (
            ("inputs", collective.before),
            ("outputs", collective.after),
        ):
            holder = contract.holder(place, np.arange(shares))
            held = sizes if holder is None else sizes[holder == rank]
            parts = [part for piece in made for part in getattr(piece, which)]
            assert (covered(parts, int(held.sum()) * dtype.itemsize) == 1).all()
        for piece in made:
            used = piece.input_bytes, piece.output_bytes
            assert (max(used) if pieces.in_place else sum(used)) <= ROOM
    assert all(found == all_counts[0] for found in all_counts)


@pytest.mark.parametrize(
    ("nbytes", "number"),
    [(0, 1), (2047, 1), (4096, 2), (8192, 4), (16384, 8), (32768, 8), (32769, 9)],
)
def test_calls_have_enough_pieces_to_overlap(nbytes, number):
    """Eight, if they are not smaller than half the room; and as many as must be."""
    assert least_pieces(nbytes, ROOM) == number
    x = Buffer(None, 1 << 20, (nbytes,), DTYPES["int8"])
    pieces = Pieces(Call("all_reduce", nbytes, x, x, None), Position(1, 2), ROOM)
    assert len(list(pieces)) == number


def test_rails_are_the_places_that_every_host_has():
    layout = Layout((0, 0, 0, 1, 1))
    assert layout.rails == 2
    assert layout.places == [0, 1, 2, 0, 1]
    assert layout.shares(10, Position(0, 5)) == [5, 5, 0]
    assert layout.shares(10, Position(4, 5)) == [5, 5]
    assert not layout.is_regular
    crossed = Layout((0, 1, 1, 0))
    assert [crossed.rail_root(0, place) for place in (0, 1)] == [0, 1]
    assert not crossed.is_regular
    assert Layout((1, 1, 0, 0)).is_regular


def test_which_calls_have_stages(monkeypatch):
    plain, pair = CallOptions(), Layout((0, 0, 1, 1))
    assert has_stages(pair, "all_reduce", plain)
    assert has_stages(pair, "all_gather", plain)
    assert not has_stages(pair, "all_to_all", plain)
    assert not has_stages(pair, "all_reduce", CallOptions(reproducible=True))
    assert not has_stages(pair, "all_reduce", CallOptions(algorithm="ring"))
    assert not has_stages(Layout((0, 0, 1)), "all_gather", plain)
    assert not has_stages(Layout((0, 1, 2)), "all_reduce", plain)
    monkeypatch.setenv("UNISONO_ALGORITHM", "ring")
    assert not has_stages(pair, "all_reduce", plain)
