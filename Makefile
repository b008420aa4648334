# Everything installs into .venv; nothing else is assumed than Python 3.11 or later, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two at a time, a file each: many tests wait for processes that they started. Their nets are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all test-oldest check format lint types imports bench wheel clean help

help:
	@echo "make demo | test | test-all | test-oldest | check | format | bench | wheel | clean"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/throughtime demo $(DEMO)

test: $(INSTALLED)
	$(PYTEST)

test-all: $(INSTALLED)
	$(PYTEST) -m "slow or not slow"

# The adapters on the oldest versions that they support, laid over the environment.
test-oldest: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest --requirement oldest.txt
	PYTHONPATH=$(abspath $(VENV))/oldest $(PYTEST) $(wildcard tests/test_lightning_*.py tests/test_ignite*.py tests/test_accelerate*.py)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/basedpyright --warnings --pythonpath $(BIN)/python

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-cache

check: lint types imports test

bench: $(INSTALLED)
	$(BIN)/python benchmarks/update_loop.py

wheel: $(INSTALLED)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist
