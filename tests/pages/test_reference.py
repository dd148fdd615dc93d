"""The API reference: every public name is on a page, and has a docstring."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from docs import make_reference as reference

import unisono

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
# Modules that have their names in `__all__`, and are imported to be compared with it.
MODULES = [
    "unisono.algorithms",
    "unisono.codecs",
    "unisono.parallel",
    "unisono.schedule",
    "unisono.search",
    "unisono.simulate",
    "unisono.synthesize",
    "unisono.testing",
    "unisono.topology",
    "unisono.trace",
    "unisono.tune",
]


@pytest.fixture(scope="module")
def pages():
    """The text of each page; griffe reads all sources for it."""
    return reference.pages()


@pytest.fixture(scope="module")
def documented(pages):
    return {path for text in pages.values() for path in DIRECTIVE.findall(text)}


def test_every_name_of_the_package_is_documented(pages, documented):
    targets = {reference.target(path) for path in documented}
    for name in unisono.__all__:
        assert reference.target(reference.path_of(name)) in targets, name
        assert f"| `unisono.{name}` |" in pages["unisono"]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_that_a_module_exports_is_documented(module, documented):
    importlib.import_module(module)
    names = sys.modules[module].__all__
    assert names
    assert {f"{module}.{name}" for name in names} <= documented


def test_every_page_is_among_those_whose_names_are_checked(pages):
    assert set(pages) == {"unisono", *(p.file for p in reference.PAGES)}


def test_every_error_is_documented(documented):
    from unisono import errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.UnisonoError):
            assert f"unisono.errors.{name}" in documented


def members(path):
    """What is at a path and, if it is a class, what is public in it."""
    there = reference.found(path)
    yield path, there
    if there.is_class:
        for name, member in there.all_members.items():
            if member.is_public and member.is_function and not name.startswith("__"):
                yield f"{path}.{name}", member


@pytest.mark.parametrize("file", ["unisono", *(p.file for p in reference.PAGES)])
def test_every_public_name_has_a_docstring(file, pages):
    paths = DIRECTIVE.findall(pages[file])
    assert paths
    for name, there in (member for path in paths for member in members(path)):
        assert there.docstring, name
        assert there.docstring.value.strip(), name


def test_every_page_is_in_the_navigation_and_in_the_index(pages):
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    for file in pages:
        assert f"reference/{file}.md" in nav
        assert f"]({file}.md)" in index


def test_existing_pages_are_those_that_are_made(docs, pages):
    made = {file.stem for file in (docs / "reference").glob("*.md")}
    assert made == {*pages, "index"}


def test_docs_extra_has_what_the_site_is_built_with():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml names Python objects, which are of no matter here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    plugins = {next(iter(p)) if isinstance(p, dict) else p for p in config["plugins"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    docs = " ".join(project["project"]["optional-dependencies"]["docs"])
    assert plugins == {"search", "mkdocstrings"}
    assert "mkdocstrings[python]" in docs
