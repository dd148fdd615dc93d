"""Our declarations of UCX's structs and constants are those of its headers."""

import subprocess
from pathlib import Path

import pytest
from ucx_worlds import needs_ucx

from unisono import _native

pytestmark = needs_ucx


def headers():
    """The folder of the headers that belong to the loaded library."""
    library = Path(_native.ucx_version()[3]).resolve()
    for folder in library.parents:
        if (folder / "include" / "ucp" / "api" / "ucp.h").exists():
            return folder / "include"
    pytest.skip(f"there are no headers beside {library}")


def test_declarations_are_those_of_the_headers(tmp_path):
    folder = headers()
    layout, sizes = _native.ucx_layout(), _native.ucx_sizes()
    constants = _native.ucx_constants()
    lines = ["#include <stddef.h>", "#include <ucp/api/ucp.h>"]
    for name, offset in layout.items():
        struct, _, field = name.partition(".")
        lines.append(f'_Static_assert(offsetof({struct}, {field}) == {offset}, "");')
    for name, value in constants.items():
        lines.append(f'_Static_assert(({name}) == ({value}), "");')
    lines.append(
        f'_Static_assert(sizeof(ucs_status_t) == {sizes.pop("ucs_status_t")}, "");'
    )
    for name, size in sizes.items():
        lines.append(f'_Static_assert(sizeof({name}) <= {size}, "");')
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines) + "\n")
    command = ["cc", "-fsyntax-only", "-I", str(folder), str(source)]
    try:
        end = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    assert end.returncode == 0, end.stderr
