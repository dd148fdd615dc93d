"""Imports inside unisono.parallel run downwards, type-checking ones included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from unisono import parallel

ROOT = Path(parallel.__file__).parent
LAYERS = {"common": 0, "data": 1, "estimate": 2, "model": 2, "sharded": 2}
"""A package imports from itself and from lower ones."""


def module_name(file):
    parts = file.relative_to(ROOT.parent.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(file): file for file in ROOT.rglob("*.py")}
MODULES = {name for name, file in FILES.items() if file.name != "__init__.py"}


def imported(text):
    """Every module of the package that the source imports, wherever it does."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(node.module)
        else:
            continue
        yield from names & MODULES


def package(module):
    return module.split(".")[2]


GRAPH = {name: set(imported(FILES[name].read_text())) - {name} for name in MODULES}


def test_imports_inside_functions_and_type_checking_blocks_count():
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from unisono.parallel.data.ddp import DDP\n"
        "def f():\n"
        "    from unisono.parallel.common import flat\n"
    )
    found = set(imported(source))
    assert found == {"unisono.parallel.data.ddp", "unisono.parallel.common.flat"}


def test_no_module_imports_itself_through_others():
    try:
        order = list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")
    assert set(order) == MODULES


def test_packages_import_lower_packages_only():
    wrong = [
        f"{importer} -> {module}"
        for importer, modules in GRAPH.items()
        for module in modules
        if package(importer) in LAYERS
        and package(importer) != package(module)
        and LAYERS[package(importer)] <= LAYERS[package(module)]
    ]
    assert wrong == []


def test_every_module_is_in_a_package_or_a_deprecated_alias():
    loose = {package(m) for m in MODULES if m.count(".") == 2}
    assert loose == {"checkpoint", "pipeline"}
    assert {package(m) for m in MODULES} - loose == set(LAYERS)
