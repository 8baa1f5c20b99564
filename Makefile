# Two commands do everything on a fresh clone: `make demo` and `make test`. The rest is for those who work on lowprec.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard native/*.cc native/*.h native/*/*.cc native/*/*.h) CMakeLists.txt pyproject.toml
JOBS ?= 2

.PHONY: setup demo test test-all lint docs bench ci clean

setup: $(STAMP)

# The pinned torch goes in first: asked for by a range, pip may take a build that brings gigabytes with it.
$(VENV)/.requirements: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements-dev.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(STAMP): $(VENV)/.requirements $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/lowprec compare --report demo-report.html

# One thread a worker: two workers with two threads each would fight over two cores. Tests of threads ask for their own.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not long"

test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
	bash tests/native/sanitize.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/*.cc native/*.h)

docs: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/lowprec bench all --json bench.json

ci:
	bash .ci/run

clean:
	rm -rf $(VENV) build dist site
