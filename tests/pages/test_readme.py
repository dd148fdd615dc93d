"""The README in both languages: the same commands and code, and all of it real."""

import re
import shlex
from pathlib import Path

import pytest
from docs.make_pages import BESIDE
from snippets import Page, here, snippets

from unisono.cli.app import make_app

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")
)
MADE = {ROOT / "docs" / place for place in BESIDE.values()}
KEPT = [
    page
    for kind in ("*", "docs/*", "docs/tutorial/*")
    for page in ROOT.glob(f"{kind}.md")
]
PAGES = sorted(set(KEPT) - MADE)


def code(text):
    """All fenced blocks, without comments and what is before them."""
    return [(s.kind, re.sub(r"[ ]*# .*", "", s.text)) for s in snippets(text)]


def commands(text):
    """Lines of fenced blocks that call unisono, without comments."""
    for snippet in snippets(text):
        if snippet.kind in ("sh", "console", "", "bash", "text"):
            for line in snippet.text.splitlines():
                line = re.split(r"\s{2,}|\s#\s|; echo", line.removeprefix("$ "))[0]
                if re.match(r"unisono [a-z]", line):
                    yield line


def test_both_readmes_have_the_same_code_and_commands():
    assert code(ENGLISH) == code(CHINESE)
    assert list(commands(ENGLISH)) == list(commands(CHINESE))
    assert len([line for line in commands(ENGLISH) if "first.py" not in line]) == 5


def test_overviews_have_the_same_code_and_commands():
    english, chinese = (
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("overview.md", "overview.zh.md")
    )
    assert code(english) == code(chinese)
    assert len(list(commands(english))) > 10


def test_both_readmes_have_the_same_numbers():
    pattern = r"\d[\d,]*\.\d+|\d+,\d+"
    assert sorted(re.findall(pattern, ENGLISH)) == sorted(re.findall(pattern, CHINESE))


def test_readmes_link_to_each_other():
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE


ALL = sorted({line for p in PAGES for line in commands(p.read_text("utf-8"))})


@pytest.fixture(scope="module")
def app():
    return make_app()


@pytest.mark.parametrize("line", ALL)
def test_commands_on_pages_are_valid(app, line):
    """They are parsed as the command line would, not run."""
    app.parse_args(shlex.split(line)[1:], print_error=False, exit_on_error=False)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_script_of_the_readme_prints_the_shown_output(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Page(ROOT / name).run() == 2


def test_first_snippet_of_the_overview_runs(capsys):
    first = next(iter(snippets((ROOT / "docs" / "overview.md").read_text("utf-8"))))
    exec(first.text, {})
    assert "step 8/8  all_gather" in capsys.readouterr().out


def test_every_measured_row_is_on_the_performance_page():
    measured = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \d.*\|$", ENGLISH, re.MULTILINE)
    assert len(table) == 4
    for row in table:
        assert row in measured


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_pages_compiles(page):
    for snippet in snippets(page.read_text(encoding="utf-8")):
        if snippet.kind == "python":
            compile(snippet.text, f"{page.name}:{snippet.line}", "exec")


def test_options_that_pages_name_exist():
    """Of each line of the command line's table: the verb, and all that is behind it."""
    table = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `unisono (.*)$", table, re.MULTILINE)
    assert len(rows) > 10
    option = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
    for row in rows:
        verb = re.match(r"simulate train|config save|trace [a-z-]+|[a-z]+", row)[0]
        code, known = here(["unisono", *verb.split(), "--help"])
        assert code == 0
        named = set(option.findall(row))
        assert named <= set(option.findall(known)), row


def test_variables_that_pages_name_exist():
    kinds = ("src/**/*.py", "tests/**/*.py", "native/**/*.cpp")
    sources = [file for kind in kinds for file in ROOT.glob(kind)]
    code = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # tells of what is no more, too
            continue
        for name in re.findall(r"\bUNISONO_[A-Z_]+\b", page.read_text("utf-8")):
            assert name in code, f"{page.name}: {name}"
