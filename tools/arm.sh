#!/bin/sh
# The native core on an emulated Arm: `make arm` runs this, on a Debian of another kind.
#
# What it needs is set up once under .venv-arm: a venv for building, and in root/ the Python
# of the same Debian for arm64, unpacked and never installed, with what the tests import in
# site/. The core is compiled with warnings as errors, looked through for instructions that
# would change bits, and then some of the tests run under qemu, twice where it matters: on
# a processor with every extension, and on one of the first of its kind.
#
# qemu shows wrong code, wrong bits and wrong system calls. It does not show a missing
# acquire or release, because the processor below it keeps loads and stores in order.

set -eu
cd "$(dirname "$0")/.."
here=$PWD/.venv-arm
root=$here/root
site=$here/site
build=build/.venv-arm

cannot() {
  echo "make arm: $1" >&2
  exit 1
}

# Installs what is missing, if we may.
tools() {
  if command -v aarch64-linux-gnu-g++ && { command -v qemu-aarch64-static ||
    command -v qemu-aarch64; }; then
    return
  fi
  wanted="g++-aarch64-linux-gnu qemu-user-static"
  command -v apt-get ||
    cannot "needs a compiler for aarch64 and qemu; this machine has no apt-get to get them"
  [ "$(id -u)" = 0 ] || cannot "first, as root: apt-get install $wanted"
  echo "installing $wanted (once)" >&2
  { DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $wanted
  } > "$here/apt.log" 2>&1 || cannot "$wanted could not be installed: see $here/apt.log"
}

# The Python of this Debian, for arm64: apt looks at lists of its own, so that nothing
# changes for the machine.
arm_root() {
  [ -e "$root/.ready" ] && return
  command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
    cannot "needs apt-get and dpkg-deb, to fetch a Python for arm64"
  echo "fetching a Python for arm64 into $root (once)"
  rm -rf "$root" "$here/apt"
  mkdir -p "$root" "$here/apt/lists/partial" "$here/apt/cache/archives/partial"
  : > "$here/apt/status"
  cat > "$here/apt/conf" << END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "$(id -un)";
Dir::State::lists "$here/apt/lists";
Dir::State::status "$here/apt/status";
Dir::Cache "$here/apt/cache";
Debug::NoLocking "true";
END
  { APT_CONFIG=$here/apt/conf apt-get -q update &&
    APT_CONFIG=$here/apt/conf apt-get -q install -y --no-install-recommends \
      --download-only python3 libpython3-dev libssl-dev libstdc++6
  } > "$here/apt.log" 2>&1 || cannot "apt-get has no Python for arm64: see $here/apt.log"
  for package in "$here"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$root"
  done
  rm -rf "$here/apt"
  touch "$root/.ready"
}

# A Python that starts under qemu, and so do the Pythons that it starts.
arm_python() {
  qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64)
  cat > "$root/usr/bin/python" << END
#!/bin/sh
export PYTHONPATH="$site\${PYTHONPATH:+:\$PYTHONPATH}"
exec $qemu -0 "$root/usr/bin/python" -L "$root" "$root/usr/bin/python3" "\$@"
END
  chmod +x "$root/usr/bin/python"
}

# What the tests import, in builds for arm64.
arm_site() {
  [ -e "$site/.ready" ] && [ "$site/.ready" -nt pyproject.toml ] && return
  echo "fetching wheels for arm64 into $site (once)"
  rm -rf "$site"
  platforms=
  for tag in 2_28 2_27 2_17; do
    platforms="$platforms --platform manylinux_${tag}_aarch64"
  done
  "$here/bin/python" -m pip --disable-pip-version-check -qq install --target "$site" \
    --only-binary=:all: $platforms --platform manylinux2014_aarch64 \
    --python-version "$1" --implementation cp \
    numpy msgspec ml_dtypes nanobind cyclopts rich pytest pytest-timeout hypothesis ||
    cannot "pip found no wheels for Python $1 on aarch64"
  touch "$site/.ready"
}

compile() {
  echo "compiling for aarch64 into $build"
  "$here/bin/cmake" -S . -B "$build" -G Ninja --fresh -Wno-dev \
    -DCMAKE_MAKE_PROGRAM="$here/bin/ninja" -DCMAKE_TOOLCHAIN_FILE=tools/aarch64.cmake \
    -DUNISONO_TEST_HOOKS=ON \
    -DCMAKE_CXX_FLAGS="-Werror -idirafter $root/usr/include \
      -idirafter $root/usr/include/aarch64-linux-gnu" \
    -DPython_EXECUTABLE="$root/usr/bin/python" \
    -DPython_INCLUDE_DIR="$root/usr/include/python$1" > "$here/cmake.log" 2>&1 ||
    { cat "$here/cmake.log"; cannot "the build could not be configured"; }
  "$here/bin/ninja" -C "$build" --quiet || cannot "the core does not compile for aarch64"
  rm -rf "$site/unisono"
  cp -R src/unisono "$site/unisono"
  rm -f "$site"/unisono/*.so
  cp "$build"/_native.*.so "$site/unisono/"
}

# A fused multiply-add rounds once where two instructions round twice.
no_fused() {
  fused=$(aarch64-linux-gnu-objdump -d --no-show-raw-insn "$build"/_native.*.so |
    grep -cE '[[:space:]]f(n?madd|n?msub|ml[as]|cmla)[[:space:]]' || true)
  [ "$fused" = 0 ] || cannot "the core has $fused fused multiply-adds: its bits would differ"
  echo "no fused multiply-adds"
}

# Some of the tests: those of the kernels and codecs to the bit, of the checksum, of the
# verifier and the simulator against their twins in NumPy, and worlds of threads and of
# processes. A test that takes a second elsewhere takes many here. Or those that are named.
run() {
  python=$root/usr/bin/python
  if [ $# -gt 0 ]; then
    exec "$python" -m pytest -p no:cacheprovider --timeout 1200 "$@"
  fi
  threads=tests/runtime/test_conformance.py
  "$python" -m pytest -p no:cacheprovider --timeout 1200 --durations=5 \
    tests/test_reductions.py tests/codecs/test_codec_bits.py \
    tests/transports/test_frames.py tests/schedule/test_verify.py \
    tests/simulate/test_fidelities.py "$threads::test_every_algorithm_on_threads_is_correct[3]" \
    "$threads::test_every_type_and_operation_on_threads_is_correct[2]" \
    "$threads::test_every_algorithm_on_processes_is_correct[2]"
  echo "again, without the atomic instructions of later processors"
  QEMU_CPU=cortex-a53 "$python" tests/runtime/races.py 4
  QEMU_CPU=cortex-a53 "$python" -m unisono run -n 2 examples/all_reduce.py
}

if [ "$(uname -m)" = aarch64 ]; then
  echo "make arm: this machine is an Arm: make test runs everything on it"
  exit
fi
mkdir -p "$here"
tools > /dev/null
[ -e "$here/bin/ninja" ] || {
  "${PYTHON:-python3}" -m venv "$here"
  "$here/bin/python" -m pip --disable-pip-version-check -qq install 'cmake<4' ninja ||
    cannot "pip could not install cmake and ninja"
}
arm_root
version=$(basename "$(readlink "$root/usr/bin/python3")" | sed s/python//)
arm_python
arm_site "$version"
compile "$version"
no_fused
run "$@"
