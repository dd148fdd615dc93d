"""Engines: sane for any size, and by the paths that the libraries take."""

from itertools import pairwise

import numpy as np
import pytest

from unisono.errors import BadArgument, BadTopology, NotOffered
from unisono.simulate.engines import Calibration, Fabric, engine
from unisono.simulate.engines.engine import engines
from unisono.simulate.groups import EqualGroups
from unisono.topology import parse

SIZES = [1 << k for k in range(3, 35)]
NAMES = ("nccl", "gloo", "mpi", "xla")
H100 = Fabric.of(parse("dgx-h100:1"))
TWO = Fabric.of(parse("dgx-h100:2"))


def test_fabric_is_what_the_topology_has():
    assert (H100.hosts, H100.per_host, H100.sums) == (1, 8, True)
    assert H100.inside == pytest.approx(450e9 * 0.82)
    assert TWO.across == pytest.approx(8 * 48e9)
    shared = Fabric.of(parse("dgx-h100:2,nics=1"))
    assert shared.across == pytest.approx(48e9)  # eight ranks share it
    assert not Fabric.of(parse("dgx-a100:1")).sums
    with pytest.raises(BadTopology, match="bandwidth across"):
        Fabric(2, 8, 1e9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fabric", [H100, TWO, Fabric.of(parse("cloud:3x2"))])
def test_more_bytes_never_take_less_time(name, fabric):
    times = [engine(name).time("all_reduce", fabric, size).seconds for size in SIZES]
    assert all(a <= b for a, b in pairwise(times))
    assert times[0] > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_engine_is_quicker_than_the_links(name):
    size = 1 << 34
    for fabric, rate in ((H100, H100.inside), (TWO, min(TWO.inside, TWO.across))):
        assert engine(name).time("all_reduce", fabric, size).seconds > size / rate
        gathered = engine(name).time("all_gather", fabric, size).seconds
        assert gathered > 0.8 * size / rate


def test_nccl_takes_the_paths_that_it_reports():
    # As nccl-tests issue 309 and ml-engineering report for 8 H100 and H200: ring and LL
    # up to about 1 MiB, sums in the switch above.
    nccl = engine("nccl")
    small, large = (nccl.time("all_reduce", H100, s) for s in (1 << 16, 1 << 28))
    assert (small.algorithm, small.protocol) == ("ring", "LL")
    assert (large.algorithm, large.protocol) == ("switch", "Simple")
    assert nccl.time("all_reduce", TWO, 1 << 34).algorithm == "switch_tree"
    assert nccl.time("all_gather", H100, 1 << 30).algorithm == "ring"
    assert nccl.time("all_reduce", Fabric.of(parse("dgx-a100:1")), 1 << 30)


def test_network_that_adds_up_is_crossed_once_in_each_direction():
    nccl, size, cards_alone = engine("nccl"), 1 << 34, Calibration(inside=1e6)
    for text in ("dgx-h100:12", "dgx-a100:12"):
        summing = Fabric.of(parse(f"{text},network_sums=1"))
        assert summing.network_sums
        once = nccl.time("all_reduce", summing, size, cards_alone)
        assert once.algorithm in ("switches", "collnet")
        bare = size / summing.across / 0.85
        assert once.seconds == pytest.approx(bare, rel=0.02)
        plain = nccl.time("all_reduce", Fabric.of(parse(text)), size, cards_alone)
        least = 2 * 11 / 12 * size / summing.across
        assert plain.seconds > least  # each host sends all but its share twice
    hopper = Fabric.of(parse("dgx-h100:12,network_sums=1"))
    assert nccl.time("all_reduce", hopper, size).algorithm == "switches"


def test_only_all_reduces_of_several_hosts_are_added_up_in_the_network():
    nccl, size = engine("nccl"), 1 << 30
    for text, what in (("dgx-h100:1", "all_reduce"), ("dgx-h100:2", "all_gather")):
        plain, summing = (
            nccl.time(what, Fabric.of(parse(text + option)), size)
            for option in ("", ",network_sums=1")
        )
        assert plain == summing
    for name in ("gloo", "mpi", "xla"):
        fabric = Fabric.of(parse("dgx-h100:2,network_sums=1"))
        found = engine(name).time("all_reduce", fabric, size)
        assert found == engine(name).time("all_reduce", TWO, size)


def test_groups_with_a_rank_on_each_host_are_added_up_in_the_network():
    across = np.arange(16 * 8).reshape(16, 8).T
    times = [
        EqualGroups(parse(text), across, engine="nccl").time("all_reduce", 1 << 30)
        for text in ("dgx-h100:16", "dgx-h100:16,network_sums=1")
    ]
    assert times[1][1] == "nccl's collnet, Simple"
    assert times[1][0] < 0.65 * times[0][0]


def test_cards_that_are_shared_cost_their_share():
    nccl, size = engine("nccl"), 1 << 32
    one, all_ = (
        nccl.time("all_reduce", Fabric.of(parse(text)), size).seconds
        for text in ("dgx-h100:4,nics=1", "dgx-h100:4")
    )
    assert one > 6 * all_


def test_staging_copies_there_and_back():
    gloo, size = engine("gloo"), 1 << 30
    on_gpus = Fabric.of(parse("dgx-h100:2,staged=1"))
    plain = gloo.time("all_reduce", TWO, size)
    staged = gloo.time("all_reduce", on_gpus, size)
    assert staged.seconds - plain.seconds == pytest.approx(2 * size / 12e9)
    assert staged.protocol == f"{plain.protocol}, staged"
    nccl = engine("nccl")
    assert nccl.time("all_reduce", TWO, size) == nccl.time("all_reduce", on_gpus, size)


def test_groups_of_ranks_on_gpus_are_staged_as_well():
    hosts = np.arange(16).reshape(2, 8)
    groups = EqualGroups(parse("dgx-h100:2,staged=1"), hosts, engine="gloo")
    one = engine("gloo").time(
        "all_reduce", Fabric.of(parse("dgx-h100:1,staged=1")), 1 << 20
    )
    assert groups.time("all_reduce", 1 << 20) == (
        pytest.approx(one.seconds),
        f"gloo's {one.algorithm}, tcp, staged",
    )


def test_calibration_scales_what_it_names():
    nccl = engine("nccl")
    plain = nccl.time("all_reduce", H100, 8, Calibration()).seconds
    slow = nccl.time("all_reduce", H100, 8, Calibration(latency=3)).seconds
    assert slow == pytest.approx(3 * plain, rel=1e-3)
    large = nccl.time("all_gather", H100, 1 << 34, Calibration()).seconds
    half = nccl.time("all_gather", H100, 1 << 34, Calibration(inside=0.5)).seconds
    assert half == pytest.approx(2 * large, rel=1e-2)


def test_every_constant_names_its_source():
    for one in engines().values():
        for text in (one.source, one.chunk_source, one.fitted_source):
            assert text
        if one.staging:
            assert one.staging_source


def test_unknown_engines_and_collectives_are_refused():
    with pytest.raises(BadArgument, match="nearest: nccl"):
        engine("ncl")
    with pytest.raises(BadArgument, match="cannot be read"):
        engine("none.json")
    with pytest.raises(NotOffered, match="scatter is not modelled"):
        engine("nccl").time("scatter", H100, 8)
    assert engine("nccl").time("all_reduce", Fabric(1, 1, 1e9), 8).seconds == 0
