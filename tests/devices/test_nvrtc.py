"""Where NVRTC is found, in which order, and what an error says if it is not."""

import _ctypes
import ctypes
import shutil
import subprocess
import sys

import pytest

from unisono.devices import found, nvrtc, rtc
from unisono.errors import NvrtcMissing, NvrtcTooOld, UnsupportedDevice

SOURCE = """
int nvrtcVersion(int *major, int *minor) {{ *major = {0}; *minor = {1}; return 0; }}
const char *nvrtcGetErrorString(int code) {{ return "an error"; }}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """library(path, 12, 4): a library that says it is NVRTC 12.4, and does nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("libraries")

    def make(path, *version):
        built = folder / f"{version}.so"
        if not built.exists():
            source = built.with_suffix(".c")
            source.write_text(SOURCE.format(*version))
            subprocess.run([compiler, "-shared", source, "-o", built], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, path)
        return str(path)

    return make


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A host where NVRTC is nowhere; find it anew."""
    for name in (nvrtc.VARIABLE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc, "package_folders", lambda name: [tmp_path / name])
    monkeypatch.setattr(nvrtc, "_USUAL", tmp_path / "usr" / "local")
    places = dict(nvrtc._PLACES)
    places["libraries of this process"] = lambda: iter(())
    places["the dynamic loader"] = lambda: iter(())
    monkeypatch.setattr(nvrtc, "_PLACES", tuple(places.items()))
    opened, original = [], ctypes.CDLL

    def open_library(path):
        opened.append(original(path))
        return opened[-1]

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    nvrtc.find.cache_clear()
    yield tmp_path
    nvrtc.find.cache_clear()
    for one in opened:  # else other tests find it among the libraries of this process
        _ctypes.dlclose(one._handle)


def found_anew():
    nvrtc.find.cache_clear()
    return nvrtc.find()


def test_nothing_found_says_where_and_what_to_do(nothing):
    with pytest.raises(NvrtcMissing, match="pip install nvidia-cuda-nvrtc") as missing:
        nvrtc.find()
    assert len(missing.value.looked) == 6
    for place in ("UNISONO_NVRTC", "wheels", "torch", "CUDA_HOME", "dynamic loader"):
        assert place in str(missing.value)
    assert found.compiler().fix == "pip install nvidia-cuda-nvrtc"
    assert not found.compiler().usable


def test_order_of_places(nothing, library, monkeypatch):
    """From the last place to the first: each is preferred to those before it."""
    usual = library(nothing / "usr/local/cuda-12.4/lib64/libnvrtc.so.12", 12, 4)
    assert found_anew().path == usual
    newer = library(nothing / "usr/local/cuda-13.1/targets/x/lib/libnvrtc.so.13", 13, 1)
    assert found_anew().path == newer
    monkeypatch.setenv("CUDA_PATH", str(nothing / "path"))
    path = library(nothing / "path/lib64/libnvrtc.so", 12, 0)
    assert found_anew().path == path
    monkeypatch.setenv("CUDA_HOME", str(nothing / "home"))
    home = library(nothing / "home/lib/libnvrtc.so.12", 12, 1)
    assert found_anew().path == home
    torch = library(nothing / "torch/lib/libnvrtc-672ee683.so.12.2", 12, 2)
    assert found_anew().path == torch
    wheel = library(nothing / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", 12, 3)
    assert found_anew().path == wheel
    wheel = library(nothing / "nvidia/cu13/lib/libnvrtc.so.13", 13, 2)
    assert found_anew().path == wheel
    assert found_anew().version == (13, 2)
    named = library(nothing / "elsewhere/compiler.so", 12, 5)
    monkeypatch.setenv(nvrtc.VARIABLE, named)
    assert str(found_anew()) == f"NVRTC 12.5 ({named})"


def test_library_of_this_process_comes_before_wheels(nothing, library):
    loaded = library(nothing / "loaded/libnvrtc.so.12", 12, 6)
    library(nothing / "nvidia/cu13/lib/libnvrtc.so.13", 13, 2)
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from unisono.devices import nvrtc\n"
        "print(nvrtc.find().path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, loaded],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == loaded


def test_builtins_are_not_taken_for_the_compiler(nothing, library):
    library(nothing / "nvidia/cu13/lib/libnvrtc-builtins.so.13.4", 13, 4)
    library(nothing / "nvidia/cu13/lib/libnvrtc.alt.so.13", 13, 4)
    with pytest.raises(NvrtcMissing):
        found_anew()


def test_what_cannot_be_opened_is_passed_over(nothing, library):
    broken = nothing / "nvidia/cu13/lib/libnvrtc.so.13"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    with pytest.raises(NvrtcMissing, match=f"wheels in site-packages: {broken}"):
        found_anew()
    usual = library(nothing / "usr/local/cuda/lib64/libnvrtc.so.12", 12, 4)
    assert found_anew().path == usual


def test_nvrtc_without_cpp20_is_too_old(nothing, library, monkeypatch):
    old = library(nothing / "nvidia/cuda_nvrtc/lib/libnvrtc.so.11.8", 11, 8)
    with pytest.raises(NvrtcTooOld, match=r"NVRTC 11\.8 .* has no C\+\+20.*12\.0") as e:
        found_anew()
    assert e.value.version == (11, 8)
    usual = library(nothing / "usr/local/cuda/lib64/libnvrtc.so.12", 12, 0)
    assert found_anew().path == usual
    monkeypatch.setenv(nvrtc.VARIABLE, old)
    with pytest.raises(NvrtcTooOld, match=r"has no C\+\+20"):
        found_anew()


@pytest.mark.parametrize("content", [None, "no library"])
def test_named_library_must_be_one(nothing, library, monkeypatch, content):
    library(nothing / "nvidia/cu13/lib/libnvrtc.so.13", 13, 2)
    named = nothing / "named.so"
    if content is not None:
        named.write_text(content)
    monkeypatch.setenv(nvrtc.VARIABLE, str(named))
    with pytest.raises(NvrtcMissing, match=f"UNISONO_NVRTC={named} cannot be used"):
        found_anew()


def test_another_library_is_not_taken(nothing, monkeypatch):
    monkeypatch.setenv(nvrtc.VARIABLE, "libc.so.6")
    with pytest.raises(NvrtcMissing, match="has no nvrtcVersion"):
        found_anew()


class Known:
    """An NVRTC that knows these architectures."""

    version = (12, 4)

    def __init__(self, *known):
        self.known = list(known)

    def architectures(self):
        return self.known

    def __str__(self):
        return "NVRTC 12.4 (here)"


OLD, NEW = Known(50, 70, 75, 80, 86, 89, 90), Known(75, 80, 86, 90, 100, 103, 120)


@pytest.mark.parametrize(
    ("library", "capability", "arch"),
    [
        (OLD, (7, 0), 70),
        (OLD, (7, 5), 75),
        (OLD, (8, 7), 86),
        (OLD, (9, 0), 90),
        (NEW, (10, 1), 100),
        (NEW, (10, 3), 103),
        (NEW, (12, 1), 120),
    ],
)
def test_newest_architecture_that_the_gpu_runs(library, capability, arch):
    assert rtc.architecture(library, capability) == arch


@pytest.mark.parametrize(
    ("library", "capability", "error", "words"),
    [
        (OLD, (10, 0), NvrtcTooOld, r"10\.0, .*5\.0 to 9\.0; NVRTC 12\.8 .*--upgrade"),
        (OLD, (20, 0), NvrtcTooOld, r"20\.0, .*the newest NVRTC is needed"),
        (OLD, (6, 1), UnsupportedDevice, r"6\.1; unisono needs 7\.0 or newer"),
        (NEW, (7, 0), UnsupportedDevice, r"7\.0, and .*nvidia-cuda-nvrtc-cu12"),
    ],
)
def test_gpu_that_nvrtc_does_not_know(library, capability, error, words):
    with pytest.raises(error, match=words) as refused:
        rtc.architecture(library, capability)
    assert refused.value.capability == capability


def test_absent_driver_is_told(monkeypatch):
    monkeypatch.setattr(found, "_DRIVER", "libno-such-driver.so.1")
    assert found.driver() == (
        *(False, "none (no libno-such-driver.so.1): no NVIDIA GPU can be used here"),
        "",
    )


def test_version_of_the_driver(monkeypatch, tmp_path, library):
    compiler = shutil.which("cc") or shutil.which("gcc")
    source, built = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *v) { *v = 12080; return 0; }")
    subprocess.run([compiler, "-shared", source, "-o", built], check=True)
    monkeypatch.setattr(found, "_DRIVER", str(built))
    assert found.driver() == (True, f"{built}, for CUDA 12.8", "")
