"""The worked changes of CONTRIBUTING.md, carried out as written in a copy of the tree.

    ```python title="f.py"   is written to f.py, which must not be there yet
    ```diff title="f.py"     lines with + go below the one before, which f.py has once
    ```console               lines after `$ ` are commands, the others their output

In what is expected, `...` stands for anything.
"""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import snippets

import unisono._native

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.one_in(2)
LIMIT_S = 600

# An editable install names its own sources whatever PYTHONPATH says.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__
                    and not type(f).__name__.startswith("ScikitBuild")]
"""


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)[1]


class Tree:
    """A copy of the sources and the tests that this interpreter can be pointed at."""

    def __init__(self, folder):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copy(unisono._native.__file__, folder / "src" / "unisono")
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE, encoding="utf-8")

    def carry_out(self, text):
        """Every snippet of a section; how many there were of each kind."""
        done = {"python": 0, "diff": 0, "console": 0}
        for snippet in snippets(text):
            if snippet.kind == "python":
                self.write(snippet)
            elif snippet.kind == "diff":
                self.insert(snippet)
            elif snippet.kind == "console":
                self.commands(snippet)
            done[snippet.kind] += 1
        return done

    def write(self, snippet):
        file = self.folder / snippet.title
        assert not file.exists()
        file.write_text(snippet.text, encoding="utf-8")

    def insert(self, snippet):
        file = self.folder / snippet.title
        lines = file.read_text(encoding="utf-8").splitlines()
        before = None
        for line in snippet.text.splitlines():
            if line.startswith("+"):
                lines.insert(before + 1, line[1:])
                before += 1
            else:
                assert line.startswith(" ")
                assert lines.count(line[1:]) == 1, f"{snippet.title}: {line[1:]!r}"
                before = lines.index(line[1:])
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def commands(self, snippet):
        for part in re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            out = self.run(*shlex.split(command))
            same = doctest.OutputChecker().check_output
            assert same(expected, out, doctest.ELLIPSIS), f"$ {command}\n{out}"

    def run(self, *words):
        path = os.pathsep.join(str(self.folder / name) for name in ("site", "src"))
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"$ {words}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_commands_use_the_copy(tree):
    words = ["timeit", "-n1", "-r1", "-s", "import unisono; print(unisono.__file__)"]
    assert str(tree.folder / "src") in tree.run(*words)


def test_algorithm_example_works(tree):
    done = tree.carry_out(section("An algorithm"))
    assert done == {"python": 1, "diff": 1, "console": 2}
    tree.run("ruff", "format", "--check", "src/unisono/algorithms", "tests/algorithms")


@pytest.mark.sweep
def test_strategy_example_works(tree):
    done = tree.carry_out(section("A strategy"))
    assert done == {"python": 2, "diff": 1, "console": 1}
    tree.run("ruff", "format", "--check", "src/unisono/parallel", "tests/parallel")


def test_files_of_the_transports_exist():
    text = section("A transport")
    for folder in re.findall(r"`((?:src|native|tests)(?:/[\w/]+)?)`", text):
        assert (ROOT / folder).is_dir(), folder
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / "src" / "unisono" / "transports" / name).is_file(), name
