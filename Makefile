# `make demo` and `make test` need nothing but Python 3.10 or newer: both set up .venv first.
PYTHON ?= python3
# Of every target of `make fuzz`, and how many targets run at the same time.
FUZZ_SECONDS ?= 600
FUZZ_JOBS ?= 1
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup lint types test test-all coverage fuzz demo bench bench-cpu clean

setup: $(VENV)/installed

# Again only when the dependencies changed: the package itself is installed in place.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[all,dev]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/glossary.py

types: setup
	$(BIN)/mypy

# What every change runs. Tests marked slow are left out.
test: lint types
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# Everything, as CI does.
test-all: lint types
	$(BIN)/python -m pytest -n auto --dist worksteal

coverage: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --cov=comrope --cov-report=term

# Ctrl-C ends it and prints the table. Failing inputs: out/fuzz/TARGET/failures.
fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[fuzz]"
	$(BIN)/python tools/fuzz/run.py --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS)

demo: setup
	$(BIN)/comrope reproduce classification --preset demo

bench: setup
	$(BIN)/python benchmarks/rotation.py

# The tables and the figure of rotations on CPUs in docs/fast.md, in about 12 minutes.
bench-cpu: setup
	$(BIN)/comrope bench --preset cpu --out out/bench-cpu
	cp out/bench-cpu/results.json benchmarks/results/cpu.json
	$(BIN)/comrope report docs/fast.md

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
