"""The interpreter kernel compiles for every GPU, type and operation, without a GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unisono import _native
from unisono.devices import nvrtc, rtc
from unisono.dtypes import DTYPES, REDUCTIONS, check_op
from unisono.errors import BadArgument, CompilationFailed, DeviceError

ROOT = Path(__file__).parents[2]
FULL = 90  # the architecture for which every pair is compiled
OTHERS = (75, 80, 100, 120)
MOST_REGISTERS = 64
"""Of a kernel: two blocks of 512 threads on a multiprocessor."""


def has_meaning(dtype, op):
    try:
        check_op(DTYPES[dtype], op)
    except BadArgument:
        return False
    return True


def operations(dtype):
    return [op for op in REDUCTIONS if has_meaning(dtype, op)]


def cases():
    """All pairs for one architecture; for others each type, with one operation."""
    yield from ((FULL, dtype, op) for dtype in DTYPES for op in operations(dtype))
    for turn, arch in enumerate(OTHERS):
        for i, dtype in enumerate(DTYPES):
            known = operations(dtype)
            yield arch, dtype, known[(i + turn) % len(known)]


SOME = [
    (75, "float32", "sum"),
    (80, "bfloat16", "max"),
    (90, "float8_e4m3fn", "sum"),
    (90, "complex128", "prod"),
    (100, "int64", "min"),
    (120, "bool", "bor"),
]
QUICK = [SOME[0], SOME[2]]
CASES = list(dict.fromkeys([*SOME, *cases()]))


@pytest.fixture(scope="module")
def library():
    try:
        return nvrtc.find()
    except DeviceError as why:
        pytest.skip(str(why))


@pytest.mark.cases(1)
@pytest.mark.quick(case=QUICK)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernel_compiles_without_warnings_and_spills(library, case):
    arch, dtype, op = case
    if arch not in library.architectures():
        pytest.skip(f"{library} does not compile for sm_{arch}")
    options = (*rtc.options_for(arch, dtype, op), "--ptxas-options=-v")
    image, log = library.compile("device/kernel.cu", rtc.sources(), options)
    assert image.startswith(b"\x7fELF")
    assert "warning" not in log.lower()
    entries = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(entries) == sorted(rtc.ENTRIES)
    assert all(entry.encode() in image for entry in entries)
    frame = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", log)
    assert set(frame) == {
        ("0", s) for s in ("stack frame", "spill stores", "spill loads")
    }
    registers = re.findall(r"Used (\d+) registers", log)
    assert len(registers) == len(entries)
    assert max(map(int, registers)) <= MOST_REGISTERS


def test_sources_are_those_of_this_tree():
    sources = _native.device_sources()
    for name, text in sources.items():
        assert text == (ROOT / "native" / name).read_text(), f"{name}: build it again"
    included = {
        name
        for text in sources.values()
        for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    }
    assert included == sources.keys() - {"device/kernel.cu"}


def test_options_keep_the_bits_of_the_cpu():
    options = rtc.options_for(90, "float16", "sum")
    assert {"--fmad=false", "--ftz=false", "--prec-div=true"} <= set(options)
    assert "--gpu-architecture=sm_90" in options
    assert "-DUNISONO_DTYPE=9" in options
    assert "-DUNISONO_OP=0" in options


def test_multiply_add_is_not_fused(library):
    """The code is another one without the option, and only then."""
    source = 'extern "C" __global__ void f(float *x) { x[0] = x[1] * x[2] + x[3]; }'
    arch = rtc.architecture(library, (8, 0))
    options = rtc.options_for(arch, "float32", "prod")
    fused = [option for option in options if option != "--fmad=false"]

    def code(*chosen):
        return library.compile("f.cu", {"f.cu": source}, chosen).image

    assert code(*options) == code(*options, "-DIRRELEVANT")
    assert code(*options) != code(*fused)


@pytest.mark.parametrize(
    ("dtype", "op"), [("float33", "sum"), ("float32", "sun"), ("float32", "band")]
)
def test_unknown_types_and_operations_are_refused(dtype, op):
    with pytest.raises(BadArgument):
        rtc.options_for(90, dtype, op)


def test_failed_compilation_has_the_log(library):
    with pytest.raises(
        CompilationFailed, match=r"NVRTC .*could not compile a\.cu"
    ) as e:
        library.compile("a.cu", {"a.cu": "int f( {"}, ["--std=c++20"])
    assert "a.cu(1): error" in e.value.log
    assert e.value.log.splitlines()[0] in str(e.value)


@pytest.mark.parametrize(("dtype", "op"), [case[1:] for case in SOME])
def test_source_for_hip_is_valid(tmp_path, dtype, op):
    """Checked by a compiler of the host: HIP's own names are declared, not defined."""
    compiler = shutil.which("clang++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    for name, text in _native.device_sources().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    numbers = (
        f"-DUNISONO_DTYPE={DTYPES[dtype].code}",
        f"-DUNISONO_OP={REDUCTIONS[op]}",
    )
    done = subprocess.run(
        [
            *(compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"),
            *("-Wno-unknown-pragmas", "-include", ROOT / "tests/support/fake_hip.hpp"),
            *(*numbers, f"-I{tmp_path}", "-x", "c++", tmp_path / "device/kernel.cu"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
