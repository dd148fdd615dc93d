"""Presets, files, routing and what is refused."""

import numpy as np
import pytest

from unisono.errors import BadTopology
from unisono.topology import PRESETS, detect, parse
from unisono.topology.detect import links_in
from unisono.topology.files import load, loads
from unisono.topology.routing import around

NAMES = [
    *("ring:1", "ring:2", "ring:8", "full:1", "full:5", "switch:7", "torus:4x3x2"),
    *("torus:1x5", "fat-tree:2", "fat-tree:6", "dragonfly:5x4x2", "dragonfly:2x1x3"),
    *("dgx-h100:1", "dgx-h100:3", "dgx-h100:2,nics=2", "dgx-a100:2", "cloud:3x4"),
    *("dgx-h100:1,rails=1", "dgx-h100:2,rails=1", "dgx-a100:3,nics=4,rails=1"),
    *("wan:3", "wan:3x2", "this"),
]
OWN = """
name = "two boxes"
ranks = 4
hosts = [[0, 1], [2, 3]]
switches = ["left", "right"]
overhead = "1us"
reduce = "20GB/s"

[kinds.bus]
latency = "500ns"
bandwidth = "25GB/s"

[kinds.wire]
latency = "5us"
bandwidth = "100Gb/s"

[[links]]
between = [["0..1"], ["left"]]
kind = "bus"

[[links]]
between = [[2, 3], ["right"]]
kind = "bus"

[[links]]
from = ["left"]
to = ["right"]
kind = "wire"

[[links]]
from = ["right"]
to = ["left"]
kind = "wire"
"""


def pairs(n):
    src, dst = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
    return src.ravel(), dst.ravel()


def assert_routes_lead_there(topology):
    wiring = topology.wiring
    src, dst = pairs(topology.n)
    for a, b, row in zip(src, dst, topology.route(src, dst), strict=True):
        at = a
        for link in row[row >= 0]:
            assert wiring.links.src[link] == at
            at = wiring.links.dst[link]
        assert at == b


@pytest.mark.parametrize("name", NAMES)
def test_every_route_leads_from_its_source_to_its_destination(name):
    assert_routes_lead_there(parse(name))


def test_every_preset_is_tested_and_its_example_works():
    assert {name.partition(":")[0] for name in NAMES} >= set(PRESETS)
    for preset in PRESETS.values():
        assert parse(preset.example).n >= 1
        assert preset.about


@pytest.mark.parametrize(
    ("name", "n", "hops"),
    [
        ("ring:8", 8, 4),
        ("full:5", 5, 1),
        ("switch:7", 7, 2),
        ("torus:4x4x4", 64, 6),
        ("fat-tree:4", 16, 6),
        ("dragonfly:5x4x2", 40, 5),
        ("dgx-h100:128", 1024, 4),
        ("wan:3x2", 6, 3),
    ],
)
def test_sizes_and_diameters_are_those_of_the_shape(name, n, hops):
    topology = parse(name)
    assert topology.n == n
    assert int((topology.route(*pairs(n)) >= 0).sum(axis=1).max()) == hops


def test_fat_tree_has_equal_bandwidth_up_and_down_at_every_level():
    links = parse("fat-tree:4").wiring.links
    assert len(links) == 6 * 16
    assert len(set(zip(links.src.tolist(), links.dst.tolist(), strict=True))) == 96


def test_million_ranks_use_no_memory_until_read():
    assert parse("switch:1000000").n == 1_000_000
    assert "wiring" not in vars(parse("switch:1000000"))


def test_options_apply_to_the_links():
    links = parse("switch:3,bandwidth=1e9,latency=3us").wiring.links
    assert set(links.bandwidth) == {1e9}
    assert set(links.latency) == {3e-6}
    one, eight = parse("dgx-h100:2,nics=1"), parse("dgx-h100:2")
    assert dict(one.wiring.parts)["nic"] == 2
    assert dict(eight.wiring.parts)["nic"] == 16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rign:8", "nearest: ring"),
        ("ring", "wrong shape; as in ring:8"),
        ("ring:4x4", "wrong shape"),
        ("torus:4x", "wrong shape"),
        ("torus:0x4", "at least 1"),
        ("dragonfly:5x4", "wrong shape"),
        ("fat-tree:3", "even number of ports"),
        ("dgx-h100:2,nics=3", "1, 2, 4 or 8"),
        ("dgx-h100:2,nics=many", "nics=many"),
        ("dgx-h100:2,staged=2", "staged=2: expected 0 or 1"),
        ("dgx-h100:2,network_sums=yes", "network_sums=yes"),
        ("dgx-h100:2,rails=2", "rails=2: expected 0 or 1"),
        ("ring:8,bandwith=1e9", "nearest: bandwidth"),
        ("ring:8,latency=-1us", "latency"),
        ("switch:99999999", "at most"),
        ("nowhere.toml", "cannot be read"),
    ],
)
def test_unknown_topology_names_are_refused_with_the_reason(text, why):
    with pytest.raises(BadTopology, match=why):
        parse(text)


def ways(topology, src, dst):
    (row,) = topology.route(np.array([src]), np.array([dst]))
    return [topology.wiring.link_name(k) for k in row[row >= 0]]


def test_rails_are_changed_on_nvlink_before_a_host_is_left():
    rails, plain = parse("dgx-h100:2,rails=1"), parse("dgx-h100:2")
    assert ways(rails, 0, 11) == [
        *("0>nvswitch0", "nvswitch0>3"),
        *("3>nic3", "nic3>rail3", "rail3>nic11", "nic11>11"),
    ]
    assert ways(rails, 3, 11) == ["3>nic3", "nic3>rail3", "rail3>nic11", "nic11>11"]
    assert ways(rails, 0, 3) == ways(plain, 0, 3)
    assert ways(plain, 0, 11) == ["0>nic0", "nic0>fabric", "fabric>nic11", "nic11>11"]
    assert dict(rails.wiring.parts)["rail"] == 8
    assert "fabric" not in dict(rails.wiring.parts)


def test_no_link_joins_two_rails():
    for text, nics in (("dgx-h100:3,rails=1", 8), ("dgx-a100:3,nics=4,rails=1", 4)):
        topology = parse(text)
        wiring, n = topology.wiring, topology.n
        names = [wiring.link_name(k) for k in range(len(wiring.links))]
        cables = [name.split(">") for name in names if "rail" in name]
        assert len(cables) == 2 * 3 * nics
        for one, other in cables:
            rail, card = sorted((one, other), key=lambda end: "rail" not in end)
            assert int(card.removeprefix("nic")) % nics == int(rail[4:])
        table = topology.route(*pairs(n))
        crossed = (wiring.links.kind[table] == wiring.links.kinds.index("network")) & (
            table >= 0
        )
        assert set(crossed.sum(axis=1).tolist()) == {0, 2}


def test_rail_without_its_card_is_gone_around():
    topology = parse("dgx-h100:2,rails=1")
    failed = np.array(topology.wiring.links_named("nic3-rail3"))
    route = around(topology.name, topology.wiring, failed)
    row = route(np.array([0]), np.array([11]))[0]
    assert not set(failed.tolist()) & set(row.tolist())


@pytest.mark.parametrize("what", ["staged", "network_sums"])
def test_properties_can_be_given_to_any_preset(what):
    for text in ("switch:4", "torus:2x3", "wan:3"):
        made = parse(f"{text},{what}=1")
        assert made.describe()[what]
        assert made.name == f"{parse(text).name},{what}=1"
        assert not parse(f"{text},{what}=0").describe()[what]
    assert loads(f"{what} = true" + OWN).describe()[what]
    assert not loads(OWN).describe()[what]
    both = parse("wan:3,network_sums=1,staged=1")
    assert both.name == "wan:3,staged=1,network_sums=1"


@pytest.mark.parametrize("rate", ["0", "nan", "inf"])
def test_link_without_sensible_bandwidth_is_refused_by_name(rate):
    with pytest.raises(BadTopology, match="link 0>switch has bandwidth"):
        _ = parse(f"switch:3,bandwidth={rate}").wiring


def test_topology_file_of_the_user_is_loaded(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    own = parse(str(path))
    assert (own.name, own.n, own.per_host) == ("two boxes", 4, 2)
    assert own.overhead == 1e-6
    assert own.reduce == pytest.approx(1 / 20e9)
    assert own.wiring.host.tolist() == [0, 0, 1, 1]
    assert_routes_lead_there(own)
    far = own.route(np.array([0]), np.array([3]))[0]
    assert [own.wiring.link_name(k) for k in far] == ["0>left", "left>right", "right>3"]
    assert own.wiring.links.bandwidth[far].min() == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("ranks = 4", "ranks = 5"), "rank 4 is on none"),
        (("hosts = [[0, 1], [2, 3]]", ""), None),
        (("[2, 3]]", "[2, 1]]"), "rank 1 is listed twice"),
        (('to = ["left"]', 'to = ["lift"]'), "nearest: left"),
        (
            ('from = ["right"]\nto = ["left"]', 'from = ["2"]\nto = ["3"]'),
            "no path from",
        ),
        (("25GB/s", "0GB/s"), "has bandwidth 0"),
        (("25GB/s", "fast"), "bandwidth 'fast'"),
        (("500ns", "soon"), "duration 'soon'"),
        (("ranks = 4", "ranks = 0"), "expected 1 to"),
        (("ranks = 4", 'ranks = "x"'), "not a topology"),
        (("ranks = 4", "ranks ="), "not a topology"),
        (("ranks = 4", "ranks = 4\ncolour = 1"), "colour"),
        (('kind = "wire"', 'kind = "string"'), "kind of link 'string'"),
        (('["left", "right"]\nover', '["left", "1"]\nover'), "is listed twice"),
        (('from = ["left"]\n', ""), "either"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(change, why):
    text = OWN.replace(*change)
    assert text != OWN
    if why is None:
        assert loads(text).per_host == 0
        return
    with pytest.raises(BadTopology, match=why):
        loads(text, "own.toml")


def test_folder_as_topology_is_refused(tmp_path):
    with pytest.raises(BadTopology, match="cannot be read"):
        load(tmp_path)


def test_routes_avoid_failed_links_and_no_others():
    torus = parse("torus:4x4")
    down = torus.wiring.links_named("0-1")
    route = around("torus", torus.wiring, np.array(down))
    src, dst = pairs(16)
    usual, found = torus.route(src, dst), route(src, dst)
    assert not np.isin(found, down).any()
    untouched = ~np.isin(usual, down).any(axis=1)
    assert untouched.any()
    assert not untouched.all()
    for before, after in zip(usual[untouched], found[untouched], strict=True):
        assert before[before >= 0].tolist() == after[after >= 0].tolist()


def test_ranks_unreachable_by_failed_links_are_named():
    star = parse("switch:4")
    route = around(
        "switch:4", star.wiring, np.array(star.wiring.links_named("2>switch"))
    )
    with pytest.raises(BadTopology, match="no path from rank 2 to rank 0"):
        route(np.array([2]), np.array([0]))


def test_links_are_found_by_name():
    wiring = parse("switch:4").wiring
    assert wiring.links_named("2>switch") == [2]
    assert sorted(wiring.links_named("2-switch")) == [2, 6]
    with pytest.raises(BadTopology, match="named as in 0>switch"):
        wiring.links_named("2>3")


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return detect(root)


def test_machine_is_read_from_kernel_files(tmp_path):
    cpu, net = "sys/devices/system/cpu", "sys/class/net"
    found = machine(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nmodel name : Abacus 9\n",
            "sys/devices/system/node/node0/cpulist": "0-2,6\n",
            "sys/devices/system/node/node1/cpulist": "3-5\n",
            f"{cpu}/cpu0/cache/index0/level": "1",
            f"{cpu}/cpu0/cache/index0/type": "Data",
            f"{cpu}/cpu0/cache/index0/size": "48K",
            f"{cpu}/cpu0/cache/index1/level": "1",
            f"{cpu}/cpu0/cache/index1/type": "Instruction",
            f"{cpu}/cpu0/cache/index1/size": "32K",
            f"{net}/eth0/speed": "100000",
            f"{net}/eth0/device/numa_node": "1",
            f"{net}/lo/speed": "",
            "proc/driver/nvidia/gpus/0/information": "Model: \t H100\nIRQ: 3\n",
        },
    )
    assert found.model == "Abacus 9"
    assert found.numa == [[0, 1, 2, 6], [3, 4, 5]]
    assert found.caches == {"L1": "48K"}
    assert [(c.name, c.megabits, c.numa) for c in found.cards] == [("eth0", 100000, 1)]
    assert [(g.name, g.nvlinks) for g in found.gpus] == [("H100", 0)]
    assert_routes_lead_there(found.topology())
    assert found.topology().n == 7


def test_machine_without_kernel_files_has_one_core(tmp_path):
    assert detect(tmp_path).cores == 1


def test_nvlinks_are_counted_from_what_the_driver_prints():
    status = """GPU 0: NVIDIA H100 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 (UUID: GPU-2)
\t Link 0: <inactive>
"""
    assert links_in(status) == [(2, pytest.approx(53.124e9)), (0, 0.0)]


def test_this_machine_has_the_cores_we_may_use():
    import os

    assert detect().cores == len(os.sched_getaffinity(0))
