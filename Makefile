# Every target sets up .venv by itself; Python >= 3.11, make and a C++ compiler suffice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE := CMakeLists.txt $(wildcard native/*)

.PHONY: demo test check bench docs sanitize clean

demo: $(VENV)/.cli
	@$(BIN)/python -m unisono explain all_reduce ring -n 5
	@echo
	@$(BIN)/python -m unisono algorithms -n 13 --verify

test: check
	@$(BIN)/python -m pytest -n 2 --durations=5

check: $(VENV)/.test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.test
	@$(BIN)/python benchmarks/verification.py
	@$(BIN)/python benchmarks/reductions.py

docs: $(VENV)/.docs
	@$(BIN)/python docs/make_pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

# The native core under the address and undefined-behaviour sanitizers, in a venv of its own.
sanitize: .venv-sanitize/.ready
	@LD_PRELOAD=$$($${CXX:-c++} -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=halt_on_error=1 .venv-sanitize/bin/python -m pytest \
	  tests/schedule/test_verify.py tests/schedule/test_mutations.py tests/runtime

.venv-sanitize/.ready: pyproject.toml $(NATIVE)
	@$(PYTHON) -m venv .venv-sanitize
	@.venv-sanitize/bin/python -m pip --disable-pip-version-check -qq install \
	  -C cmake.define.UNISONO_SANITIZE=address,undefined . \
	  pytest pytest-timeout pytest-xdist hypothesis ml_dtypes
	@touch $@

$(VENV)/bin/python:
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, made anew when the build or the dependencies change.
$(VENV)/.%: $(VENV)/bin/python pyproject.toml $(NATIVE)
	@echo "installing unisono[$*] into $(VENV)"
	@$(PIP) install --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-sanitize build site
