"""The scripts of docs/pytorch.md, and what runs them: without the frameworks."""

import ast
import importlib.util

import pytest

from clients import main, runs
from clients.main import Outcome, agree, run
from clients.runs import Client
from clients.snippets import snippets

SNIPPETS = snippets()


def test_every_framework_of_the_page_has_a_script():
    found = {name for snippet in SNIPPETS.values() for name in snippet.imports}
    assert found - {"torch"} == {
        "accelerate",
        "deepspeed",
        "lightning",
        "ray",
        "transformers",
    }
    assert {f for c in runs.clients() for f, _ in c.files} == set(SNIPPETS)


@pytest.mark.parametrize("file", SNIPPETS)
def test_scripts_of_the_page_can_be_parsed_and_name_the_backend(file):
    snippet = SNIPPETS[file]
    names = [n.value for n in ast.walk(ast.parse(snippet.code)) if is_text(n)]
    assert names.count("unisono") == 1
    assert snippet.command.split()[0] in ("python", "torchrun")
    assert snippet.command.split()[-1] == file


def test_every_script_of_ours_is_run():
    commands = [words for c in runs.clients() for words in c.commands]
    for script in runs.SCRIPTS.glob("*.py"):
        ast.parse(script.read_text())
        assert any(str(script) in words for words in commands), script


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("file", SNIPPETS)
def test_what_scripts_import_is_there(file):
    tree = ast.parse(SNIPPETS[file].code)
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        if importlib.util.find_spec(node.module.partition(".")[0]) is None:
            pytest.skip(f"{node.module} is not installed: make clients")
        module = importlib.import_module(node.module)
        assert all(hasattr(module, alias.name) for alias in node.names)


def test_each_backend_runs_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "BUILD", tmp_path)
    code = (
        "import os\n"
        "assert not os.path.exists('left')\n"
        "open('left', 'w')\n"
        "print('other', 7)\n"
        "print('loss', 0.5, len('unisono'))\n"
        "assert (os.environ.get('UNISONO_TORCH_REPLACES') == 'gloo') "
        '== ("unisono" == "uni" + "sono")\n'
    )
    client = Client("one", (), ("python it.py",), (("it.py", code),))
    ends = [run(client, backend, 60.0) for backend in ("gloo", "unisono")]
    assert [(end.ok, end.numbers) for end in ends] == [(True, [0.5, 7.0])] * 2
    assert agree(*ends) == "yes"


def test_client_that_fails_or_hangs_is_said_to(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "BUILD", tmp_path)
    fails = ("it.py", "raise SystemExit('no luck')")
    end = run(Client("one", (), ("python it.py",), (fails,)), "gloo", 60.0)
    assert str(end) == "fails"
    assert "no luck" in end.text
    hangs = ("it.py", "import time\ntime.sleep(600)")
    end = run(Client("one", (), ("python it.py",), (hangs,)), "gloo", 0.2)
    assert str(end) == "hangs"
    assert not end.ok


@pytest.mark.parametrize(
    ("ours", "same"),
    [([1.00001, 2.0], "yes"), ([1.1, 2.0], "no"), ([1.0], "no"), ([], "no")],
)
def test_results_are_compared_by_value(ours, same):
    theirs = Outcome(0, 1.0, [1.0, 2.0], "")
    assert agree(theirs, Outcome(0, 1.0, ours, "")) == same
    assert agree(theirs, Outcome(1, 1.0, ours, "")) == "–"


def test_table_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{main.BEGIN}| old |\n{main.END}after\n")
    monkeypatch.setattr(main, "PAGE", page)
    main.write(["| a | 1 s | 2 s | yes |"])
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith(f"| a | 1 s | 2 s | yes |\n{main.END}after\n")
