"""Where NVRTC and NCCL are found, in which order, and what is said if they are not."""

import _ctypes
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from unisono.devices import found, nccl, nvrtc
from unisono.errors import NcclMissing, NvrtcMissing, NvrtcTooOld


@dataclass(frozen=True)
class Kind:
    """A library to look for."""

    module: ModuleType
    text: str
    """Of a library that says its version, and does nothing."""
    function: str
    """What other libraries do not have."""
    missing: type
    too_old: type
    install: str
    tell: Callable
    """What `env` and `doctor` say."""
    looked: tuple
    """Words for places, each of which an error has."""
    places: int
    wheel: str
    order: tuple
    """Settings of the environment, files and versions: each before those above it."""
    older: tuple
    """A version that is refused, and the words."""


NVRTC = Kind(
    module=nvrtc,
    text="""
    int nvrtcVersion(int *major, int *minor) {{ *major = {0}; *minor = {1}; return 0; }}
    const char *nvrtcGetErrorString(int code) {{ return "an error"; }}
    """,
    function="nvrtcVersion",
    missing=NvrtcMissing,
    too_old=NvrtcTooOld,
    install="pip install nvidia-cuda-nvrtc",
    tell=found.compiler,
    looked=("UNISONO_NVRTC", "wheels", "torch", "CUDA_HOME", "dynamic loader"),
    places=6,
    wheel="nvidia/cu13/lib/libnvrtc.so.13",
    order=(
        ("", "usr/local/cuda-12.4/lib64/libnvrtc.so.12", (12, 4)),
        ("", "usr/local/cuda-13.1/targets/x/lib/libnvrtc.so.13", (13, 1)),
        ("CUDA_PATH=path", "path/lib64/libnvrtc.so", (12, 0)),
        ("CUDA_HOME=home", "home/lib/libnvrtc.so.12", (12, 1)),
        ("", "torch/lib/libnvrtc-672ee683.so.12.2", (12, 2)),
        ("", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", (12, 3)),
        ("", "nvidia/cu13/lib/libnvrtc.so.13", (13, 2)),
        ("UNISONO_NVRTC=elsewhere/it.so", "elsewhere/it.so", (12, 5)),
    ),
    older=((11, 8), r"NVRTC 11\.8 .* has no C\+\+20.*12\.0"),
)
NCCL = Kind(
    module=nccl,
    text="""
    int ncclGetVersion(int *c) {{ *c = {0} * 10000 + {1} * 100 + {2}; return 0; }}
    """,
    function="ncclGetVersion",
    missing=NcclMissing,
    too_old=NcclMissing,
    install="pip install nvidia-nccl-cu13",
    tell=found.collectives,
    looked=("UNISONO_NCCL", "wheels", "torch", "dynamic loader"),
    places=5,
    wheel="nvidia/nccl/lib/libnccl.so.2",
    order=(
        ("", "torch/lib/libnccl.so.2", (2, 19, 3)),
        ("", "nvidia/nccl/lib/libnccl.so.2", (2, 27, 5)),
        ("UNISONO_NCCL=elsewhere/it.so", "elsewhere/it.so", (2, 30, 1)),
    ),
    older=((2, 17, 5), r"NCCL 2\.17\.5 .* is too old: .*2\.18"),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(kind, (12, 4)): a library that says it is of this version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("libraries")

    def make(kind, version):
        built = folder / f"{kind.function}{version}.so"
        if not built.exists():
            source = built.with_suffix(".c")
            source.write_text(kind.text.format(*version))
            subprocess.run([compiler, "-shared", source, "-o", built], check=True)
        return built

    return make


@pytest.fixture(params=[NVRTC, NCCL], ids=["nvrtc", "nccl"])
def host(request, compiled, monkeypatch, tmp_path):
    """One where the library is nowhere, but in what `put` and `find` see of it."""
    kind = request.param
    for name in (kind.module.VARIABLE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kind.module, "package_folders", lambda name: [tmp_path / name])
    monkeypatch.setattr(nvrtc, "_USUAL", tmp_path / "usr" / "local")
    places = dict(kind.module._PLACES)
    places["libraries of this process"] = lambda: iter(())
    places["the dynamic loader"] = lambda: iter(())
    monkeypatch.setattr(kind.module, "_PLACES", tuple(places.items()))
    opened, original = [], ctypes.CDLL

    def open_library(path):
        opened.append(original(path))
        return opened[-1]

    def put(name, version):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiled(kind, version), path)
        return str(path)

    def find():
        kind.module.find.cache_clear()
        return kind.module.find()

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    yield SimpleNamespace(kind=kind, put=put, find=find, folder=tmp_path)
    kind.module.find.cache_clear()
    for one in opened:  # else other tests find it among the libraries of this process
        _ctypes.dlclose(one._handle)


def test_nothing_found_says_where_and_what_to_do(host):
    with pytest.raises(host.kind.missing, match=host.kind.install) as missing:
        host.find()
    assert len(missing.value.looked) == host.kind.places
    for place in host.kind.looked:
        assert place in str(missing.value)
    told = host.kind.tell()
    assert told.fix == host.kind.install
    assert not told.usable


def test_order_of_places(host, monkeypatch):
    """From the last place to the first: each is preferred to those before it."""
    for setting, name, version in host.kind.order:
        if setting:
            variable, _, path = setting.partition("=")
            monkeypatch.setenv(variable, str(host.folder / path))
        path = host.put(name, version)
        last = host.find()
        assert last.path == path
        assert last.version == version
    assert str(last).endswith(f" {'.'.join(map(str, version))} ({path})")


@pytest.mark.parametrize("host", [NCCL], indirect=True, ids=["nccl"])
def test_what_is_told_of_one_that_was_found(host):
    path = host.put(host.kind.wheel, (2, 27, 5))
    assert found.collectives() == (True, f"2.27.5 ({path})", "")


def test_library_of_this_process_comes_before_wheels(host):
    _, _, version = host.kind.order[-1]
    loaded = host.put(f"loaded/{host.kind.wheel}", version)
    name = host.kind.module.__name__
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        f"import {name} as kind\n"
        "print(kind.find().path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, loaded],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == loaded


@pytest.mark.parametrize("host", [NVRTC], indirect=True, ids=["nvrtc"])
def test_builtins_are_not_taken_for_the_compiler(host):
    host.put("nvidia/cu13/lib/libnvrtc-builtins.so.13.4", (13, 4))
    host.put("nvidia/cu13/lib/libnvrtc.alt.so.13", (13, 4))
    with pytest.raises(NvrtcMissing):
        host.find()


def test_what_cannot_be_opened_is_passed_over(host):
    broken = host.folder / host.kind.wheel
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    wheels = f"wheels in site-packages: {broken}"
    with pytest.raises(host.kind.missing, match=wheels):
        host.find()
    _, name, version = host.kind.order[0]
    usual = host.put(name, version)
    assert host.find().path == usual


def test_old_library_is_refused(host, monkeypatch):
    version, words = host.kind.older
    old = host.put(host.kind.wheel, version)
    with pytest.raises(host.kind.too_old, match=words) as refused:
        host.find()
    if host.kind is NVRTC:
        assert refused.value.version == version
    _, name, version = host.kind.order[0]
    usual = host.put(name, version)
    assert host.find().path == usual
    monkeypatch.setenv(host.kind.module.VARIABLE, old)
    with pytest.raises(host.kind.too_old, match=words):
        host.find()


@pytest.mark.parametrize("content", [None, "no library"])
def test_named_library_must_be_one(host, monkeypatch, content):
    _, _, version = host.kind.order[0]
    host.put(host.kind.wheel, version)
    named = host.folder / "named.so"
    if content is not None:
        named.write_text(content)
    variable = host.kind.module.VARIABLE
    monkeypatch.setenv(variable, str(named))
    with pytest.raises(host.kind.missing, match=f"{variable}={named} cannot be used"):
        host.find()


def test_another_library_is_not_taken(host, monkeypatch):
    monkeypatch.setenv(host.kind.module.VARIABLE, "libc.so.6")
    with pytest.raises(host.kind.missing, match=f"has no {host.kind.function}"):
        host.find()
