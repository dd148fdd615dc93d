"""MSCCL XML: out and in again, files written by hand, and files that are wrong."""

import xml.etree.ElementTree as ET

import pytest

import unisono
from unisono.errors import BadArgument, NotOffered, ScheduleError
from unisono.interop import msccl

PLAIN = [
    ("all_reduce", "ring", 4),
    ("all_reduce", "recursive_doubling", 8),
    ("all_reduce", "rabenseifner", 5),
    ("all_reduce", "direct", 4),
    ("all_reduce", "double_tree", 6),
    ("all_reduce", "hierarchical", 6),
    ("all_reduce", "dissemination:carry", 7),
    ("all_gather", "ring", 4),
    ("all_gather", "circulant", 5),
    ("reduce_scatter", "ring", 4),
    ("all_to_all", "direct", 4),
    ("all_to_all", "bruck", 5),
    ("broadcast", "tree", 7),
    ("reduce", "chain", 4),
    ("all_reduce", "ring", 1),
]

# The ring of three ranks as msccl-tools writes it: fused steps, one block a rank.
RING = """<algo name="ring" proto="LL" nchannels="1" nchunksperloop="3" ngpus="3"
 coll="allreduce" inplace="1">
{}
</algo>"""
BLOCK = """<gpu id="{r}" i_chunks="3" o_chunks="3" s_chunks="0">
 <tb id="0" send="{next}" recv="{prev}" chan="0">
  <step s="0" type="s" srcbuf="i" srcoff="{a}" dstbuf="i" dstoff="{a}" cnt="1"
   depid="-1" deps="-1" hasdep="0"/>
  <step s="1" type="rrs" srcbuf="i" srcoff="{b}" dstbuf="i" dstoff="{b}" cnt="1"
   depid="-1" deps="-1" hasdep="0"/>
  <step s="2" type="rrcs" srcbuf="i" srcoff="{c}" dstbuf="i" dstoff="{c}" cnt="1"
   depid="-1" deps="-1" hasdep="0"/>
  <step s="3" type="rcs" srcbuf="i" srcoff="{a}" dstbuf="i" dstoff="{a}" cnt="1"
   depid="-1" deps="-1" hasdep="0"/>
  <step s="4" type="r" srcbuf="i" srcoff="{b}" dstbuf="i" dstoff="{b}" cnt="1"
   depid="-1" deps="-1" hasdep="0"/>
 </tb>
</gpu>"""


def by_hand():
    blocks = []
    for r in range(3):
        places = {"a": r, "b": (r - 1) % 3, "c": (r - 2) % 3}
        blocks.append(BLOCK.format(r=r, next=(r + 1) % 3, prev=(r - 1) % 3, **places))
    return RING.format("\n".join(blocks))


@pytest.mark.parametrize(("collective", "algorithm", "n"), PLAIN)
def test_written_file_is_read_back_and_verified(collective, algorithm, n):
    schedule = unisono.schedule(collective, algorithm, n=n)
    text = msccl.dumps(schedule)
    back = msccl.loads(text)
    assert back.collective is schedule.collective
    assert (back.n, back.name) == (n, schedule.name)
    sent = schedule.cost().sent.sum()
    assert back.cost().sent.sum() == pytest.approx(sent)


@pytest.mark.parametrize(("collective", "algorithm", "n"), PLAIN)
def test_files_keep_to_the_rules_of_the_runtime(collective, algorithm, n):
    root = ET.fromstring(msccl.dumps(unisono.schedule(collective, algorithm, n=n)))
    assert int(root.get("ngpus")) == len(root.findall("gpu")) == n
    for gpu in root:
        blocks = {int(tb.get("id")): tb for tb in gpu}
        assert sorted(blocks) == list(range(len(blocks)))
        connections = [("s", tb.get("send")) for tb in gpu if tb.get("send") != "-1"]
        connections += [("r", tb.get("recv")) for tb in gpu if tb.get("recv") != "-1"]
        assert len(connections) == len(set(connections))
        for tb in gpu:
            assert [int(s.get("s")) for s in tb] == list(range(len(tb)))
            for step in tb:
                if step.get("depid") != "-1":
                    awaited = blocks[int(step.get("depid"))][int(step.get("deps"))]
                    assert awaited.get("hasdep") == "1"
                for end in ("src", "dst"):
                    size = int(gpu.get(f"{step.get(end + 'buf')}_chunks"))
                    if step.get("type") != "nop" and size:
                        place = int(step.get(end + "off")) + int(step.get("cnt"))
                        assert place <= size or collective == "all_to_all"


def test_handwritten_file_with_fused_steps_is_read():
    schedule = msccl.loads(by_hand())
    assert schedule.title == "all_reduce by ring, n=3"
    cost = schedule.cost()
    assert cost.sent.tolist() == pytest.approx([4 / 3] * 3)


def test_file_of_two_ranks_that_exchange_and_copy_is_read():
    text = """<algo name="pair" proto="Simple" nchannels="1" nchunksperloop="2"
     ngpus="2" coll="allgather" inplace="0">
     <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">
      <tb id="0" send="-1" recv="-1" chan="0"><step s="0" type="cpy" srcbuf="i"
       srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb>
      <tb id="1" send="1" recv="1" chan="0">
       <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1"
        depid="-1" deps="-1" hasdep="0"/>
       <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1"
        depid="-1" deps="-1" hasdep="0"/></tb></gpu>
     <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0">
      <tb id="0" send="0" recv="0" chan="0">
       <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1"
        depid="-1" deps="-1" hasdep="0"/>
       <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1"
        depid="-1" deps="-1" hasdep="0"/></tb></gpu></algo>"""
    assert msccl.loads(text).cost().transfers == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("<algo", "<algos", "not XML"),
        ('coll="allreduce"', 'coll="scan"', "expected one of"),
        ('ngpus="3"', 'ngpus="4"', "there are other"),
        ('ngpus="3"', 'ngpus="x"', "expected a number"),
        ('type="rcs"', 'type="rsc"', "none of MSCCL's"),
        ('srcoff="2"', 'srcoff="7"', "there are 3 chunks"),
        ('send="1"', 'send="5"', "there is no such gpu"),
        ('type="r"', 'type="nop"', "sends 4 times"),
        ('depid="-1"', 'depid="8"', "which does not exist"),
        ('srcbuf="i"', 'srcbuf="q"', "no such place"),
    ],
)
def test_broken_files_are_refused_with_the_reason(old, new, why):
    text = by_hand().replace(old, new)
    assert text != by_hand()
    with pytest.raises(BadArgument, match=why):
        msccl.loads(text)


def test_file_with_a_cycle_of_waits_is_a_deadlock():
    text = by_hand().replace('type="s"', 'type="rcs"')
    text = text.replace('<step s="4" type="r"', '<step s="4" type="nop"')
    with pytest.raises(BadArgument, match="deadlock"):
        msccl.loads(text)


def test_file_that_computes_something_else_is_proven_wrong():
    wrong = by_hand().replace('type="rrcs"', 'type="rcs"')
    with pytest.raises(ScheduleError):
        msccl.loads(wrong)
    assert msccl.loads(wrong, verify=False).n == 3


def test_race_is_refused():
    text = msccl.dumps(unisono.schedule("all_reduce", "direct", n=4))
    root = ET.fromstring(text)
    for step in root.iter("step"):
        if step.get("type") == "rrc":
            step.set("depid", "-1")
    with pytest.raises(BadArgument, match="neither waits for the other"):
        msccl.loads(ET.tostring(root, encoding="unicode"))


def test_schedules_that_msccl_cannot_express_are_refused():
    with pytest.raises(NotOffered, match="no scatter"):
        msccl.dumps(unisono.schedule("scatter", "tree", n=4))
    with pytest.raises(NotOffered, match="root"):
        msccl.dumps(unisono.schedule("broadcast", "tree", n=4, root=2))


def test_files_go_to_disk_and_back(tmp_path):
    path = tmp_path / "ring.xml"
    msccl.save(unisono.schedule("all_reduce", "ring", n=3), path)
    assert msccl.load(path).n == 3
    with pytest.raises(BadArgument, match="cannot be read"):
        msccl.load(tmp_path / "none.xml")
