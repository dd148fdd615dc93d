"""Algorithms of others: from a file given by its path, or an installed package."""

import sys
import threading
from textwrap import dedent
from types import ModuleType

import pytest

from unisono import BadArgument, ScheduleError, schedule
from unisono.algorithms import library, load_file, read
from unisono.algorithms.choices import candidates
from unisono.simulate.candidates import candidates as simulated
from unisono.topology import parse

RIGHT = """
    '''Told by the root.'''
    from unisono import algorithm
    from unisono.schedule import copy_step

    @algorithm
    def broadcast(n, late: bool = False):
        '''The root tells one after the other.'''
        for r in range(1, n):
            yield copy_step(0, src=0, dst=r)

    @algorithm
    def reduce(n):
        return broadcast(n).mirror()
"""


@pytest.fixture
def written(tmp_path):
    """Write a file of algorithms, and give its path."""

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(dedent(text).lstrip("\n"))
        return str(path)

    return write


def body(*lines: str) -> str:
    """A file with a broadcast, whose body begins in line 5."""
    names = "from unisono import Step, algorithm, schedule"
    head = [f"{names}; from unisono.schedule import copy_step", "", "@algorithm"]
    return "\n".join([*head, "def broadcast(n):", *(f"    {line}" for line in lines)])


@pytest.mark.parametrize("what", ["broadcast", "reduce"])
def test_correct_file_is_verified(written, what):
    for n in (1, 2, 5, 13):
        for root in range(n):
            made = schedule(what, written(RIGHT), n, root=root)
            assert made.verify().schedule.root == root
            assert made.name == "mine"


def test_file_takes_parameters_after_its_path(written):
    assert schedule("broadcast", written(RIGHT) + ":late", 4).name == "mine:late"


def test_path_may_contain_a_plus_sign(written):
    made = schedule("broadcast", written(RIGHT, "one+other.py"), 4)
    assert made.name == "one+other"


def test_file_is_read_again_at_each_load(written):
    path = written(RIGHT)
    assert schedule("broadcast", path, 4).num_steps == 3
    written(body("yield copy_step(0, src=0, dst=range(1, n))"))
    assert schedule("broadcast", path, 4).num_steps == 1


def test_load_file_gives_the_algorithms_in_the_order_of_their_lines(written):
    found = load_file(written(RIGHT))
    assert [a.collective.name for a in found] == ["broadcast", "reduce"]
    assert found[0].about == "The root tells one after the other."


def test_wrong_file_gives_a_counter_example(written):
    forgets = written(body("for r in range(1, n - 1):", "    yield copy_step(0, 0, r)"))
    with pytest.raises(ScheduleError, match="rank 4 never receives chunk 0") as wrong:
        schedule("broadcast", forgets, 5).verify()
    assert (wrong.value.rank, wrong.value.chunk, wrong.value.step) == (4, 0, None)


def test_transfer_to_a_missing_rank_gives_a_counter_example_with_its_step(written):
    leaves = written(body("yield copy_step(0, 0, 1)", "yield copy_step(0, 0, n)"))
    with pytest.raises(ScheduleError, match="step 2") as wrong:
        schedule("broadcast", leaves, 3).verify()
    assert wrong.value.step == 2


WRONG = {
    "syntax": ("x = 1\ndef broadcast(:\n    pass\n", 2, "invalid syntax"),
    "import": ("import os\nimport nowhere_at_all\n", 2, "nowhere_at_all"),
    "while loading": ("x = 0\n\ny = 1 // x\n", 3, "ZeroDivisionError"),
    "in the steps": (
        body("yield copy_step(0, 0, 1)", "1 // 0"),
        6,
        "ZeroDivisionError",
    ),
    "shapes": (body("yield copy_step([0, 1], 0, [1, 2, 3])"), 5, "do not fit together"),
    "half a rank": (body("yield copy_step(0, 0, 1.5)"), 5, "expected whole numbers"),
    "leaves for good": (
        body("raise BaseException('x')\n    yield"),
        5,
        "BaseException",
    ),
    "leaves": (body("raise SystemExit(0)\n    yield"), 5, "SystemExit"),
    "asks for too little": (
        body("return schedule('broadcast', 'chain', n, segments=0)"),
        5,
        "at least 1",
    ),
    "no step": (body("yield 7"), 3, "yielded 7"),
    "no schedule": (body("return 7"), 3, "got a int"),
    "fails to return": (body("return 1 // 0"), 5, "ZeroDivisionError"),
    "another world": (
        body("return schedule('broadcast', 'tree', n + 1)"),
        3,
        "expected broadcast for 4",
    ),
    "another collective": (
        body("return schedule('scatter', 'tree', n)"),
        3,
        "gave scatter",
    ),
    "no collective": (
        body("yield 7").replace("broadcast", "brodcast"),
        3,
        "nearest: broadcast",
    ),
    "no n": (
        body("yield 7").replace("(n)", "(m)"),
        3,
        "must be n",
    ),
    "no default": (
        body("yield 7").replace("(n)", "(n, x)"),
        3,
        "'x' needs a default",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_exception_in_a_file_is_reported_with_its_line(written, kind):
    text, line, why = WRONG[kind]
    path = written(text)
    with pytest.raises(BadArgument, match=why) as wrong:
        schedule("broadcast", path, 4).verify()
    assert str(wrong.value).startswith(f"{path}:{line}: ")


def test_file_without_algorithms_is_refused(written):
    path = written("x = 1\n")
    with pytest.raises(BadArgument, match="@algorithm") as wrong:
        schedule("broadcast", path, 4)
    assert str(wrong.value).startswith(path)


def test_missing_file_is_refused(tmp_path):
    path = str(tmp_path / "missing.py")
    with pytest.raises(BadArgument, match="no such file") as wrong:
        schedule("broadcast", path, 4)
    assert str(wrong.value).startswith(path)


def test_file_without_the_collective_lists_those_it_has(written):
    with pytest.raises(BadArgument, match="only broadcast, reduce"):
        schedule("all_reduce", written(RIGHT), 4)


def test_file_may_define_a_dataclass(written):
    head = """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Link:
            src: int
    """
    path = written(dedent(head) + body("yield copy_step(0, 0, range(1, n))"))
    assert schedule("broadcast", path, 4).verify().steps == 1


def test_description_comes_from_the_files_docstring(written):
    found = load_file(written(RIGHT, "textwrap.py"))
    assert found[0].story == "Told by the root."


def test_exception_in_the_number_of_chunks_is_reported_with_its_line(written):
    text = body("yield copy_step(0, 0, 1)")
    path = written(text.replace("@algorithm", "@algorithm(chunks=lambda n: n // 0)"))
    with pytest.raises(BadArgument, match="ZeroDivisionError") as wrong:
        schedule("broadcast", path, 4)
    assert str(wrong.value).startswith(f"{path}:3: ")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package that announces algorithms, for the length of a test."""

    def install(name, text, target=None):
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        entry = f"[unisono.algorithms]\n{name} = {target or name}\n"
        (about / "entry_points.txt").write_text(entry)
        (tmp_path / f"{name}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        library.cache_clear()
        names.append(name)

    names: list[str] = []
    yield install
    for name in names:
        sys.modules.pop(name, None)
    library.cache_clear()


def test_installed_package_is_found_by_its_entry_point(installed):
    ours = len(library())
    installed("their_telling", RIGHT)
    assert len(library()) == ours + 2
    assert schedule("broadcast", "their_telling:late", 5, root=2).verify().steps == 4
    assert library()["reduce", "their_telling"].story == "Told by the root."


def test_installed_algorithms_are_tuned_and_simulated(installed):
    installed("their_telling", RIGHT)
    for collective in ("broadcast", "reduce"):
        assert "their_telling" in simulated(collective, parse("switch:4"))
        assert "their_telling" in candidates(collective, tuple(range(4)))
    names = candidates("all_reduce", (0, 0, 1, 1))
    assert not [name for name in names if "their_telling" in name]


def test_broken_entry_point_warns_and_is_left_out(installed):
    ours = set(library())
    installed("their_ruin", "raise RuntimeError('out of order')\n")
    with pytest.warns(UserWarning, match=r"their_ruin left out.*out of order"):
        found = set(library())
    assert found == ours


def test_entry_point_without_a_module_warns_and_is_left_out(installed):
    ours = set(library())
    installed("their_void", "", target="no_such_package.rings")
    with pytest.warns(UserWarning, match="no_such_package"):
        found = set(library())
    assert found == ours


def test_installed_package_does_not_replace_built_in_algorithms(installed):
    installed("tree", RIGHT)
    with pytest.warns(UserWarning, match="exists already"):
        library()
    assert library()["broadcast", "tree"].module == "unisono.algorithms.tree"
    assert schedule("broadcast", "tree", 16).num_steps == 4


@pytest.mark.parametrize(
    "text",
    [
        "@algorithm\nclass broadcast: pass\n",
        "@algorithm\nasync def broadcast(n): return 1\n",
        "@algorithm(also=3)\ndef broadcast(n): yield\n",
        "@algorithm(also=[{'x': 1}])\ndef broadcast(n): yield\n",
        "@algorithm(least={'x': 1})\ndef broadcast(n): yield\n",
        "@algorithm(needs=print)\ndef broadcast(n): yield\n",
        "@algorithm(chunks=2.5)\ndef broadcast(n): yield\n",
        "@algorithm(chunks=0)\ndef broadcast(n): yield\n",
    ],
)
def test_invalid_decorator_arguments_are_refused(written, text):
    path = written(f"from unisono import algorithm\n{text}")
    with pytest.raises(BadArgument) as wrong:
        schedule("broadcast", path, 4)
    assert path in str(wrong.value) or "plain functions" in str(wrong.value)


GATED = """
    import a_gate
    from unisono import algorithm
    from unisono.schedule import copy_step

    @algorithm
    def broadcast(n):
        yield from steps(n)

    a_gate.reached.set()
    assert a_gate.opened.wait(30)

    def steps(n):
        for r in range(1, n):
            yield copy_step(0, src=0, dst=r)
"""


def test_file_is_complete_for_a_thread_that_reads_it_while_another_loads_it(
    written, monkeypatch
):
    gate = ModuleType("a_gate")
    gate.reached, gate.opened = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "a_gate", gate)
    path = written(GATED)
    found = []

    def use():
        found.append(len(list(schedule("broadcast", read(path), 3))))

    first, second = (threading.Thread(target=use) for _ in range(2))
    first.start()
    assert gate.reached.wait(30)
    second.start()
    second.join(0.5)  # it ends only where it does not wait for the first
    gate.opened.set()
    for thread in (first, second):
        thread.join(30)
    assert found == [2, 2]
