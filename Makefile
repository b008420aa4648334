# Everything is installed into .venv, and into .venv-demo what the demo needs. Needed: Python 3.11 or later, pip and make.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= $(VENV)-demo
DIST ?= dist
BUILD ?= build
BIN := $(VENV)/bin
# Two test files at a time: many tests wait for processes. The nets are too small for more threads. In the order of their
# names: by the number of tests, a file of one long test would begin last and run alone.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
INSTALLED := $(VENV)/.installed
NAMED := pyproject.toml constraints.txt
COMPILED := CMakeLists.txt $(wildcard src/throughtime/kernels/cpu/*)
CHECKED := cmake -S . -DCHECK=ON

.PHONY: demo docs translations test test-all test-device test-oldest mutants check format lint names types imports sanitize arm bench wheel clean help

help:
	@echo "make demo | docs | translations | test | test-all | test-device | test-oldest | mutants | check | format | sanitize | arm | bench | wheel | clean"

# If only C++ has changed, the dependencies are not installed again.
$(INSTALLED): $(NAMED) $(COMPILED)
	@echo "installing throughtime with its extras, the docs' and the tests' tools into $(VENV): some 3 GB, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(if $(filter $(NAMED),$?),--editable '.[dev]',--no-deps --editable .)
	@touch $@

# The core dependencies alone; what pip does is printed as it does it.
demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python examples/demo.py $(DEMO)

$(DEMO_VENV)/.installed: $(NAMED) $(COMPILED)
	@echo "installing throughtime, torch and the other core dependencies into $(DEMO_VENV), once; torch takes most of the time"
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

test: $(INSTALLED)
	$(PYTEST)

test-all: $(INSTALLED)
	$(PYTEST) -m "slow or not slow" tests src tests/device

# The laws on a device that PyTorch computes on but that has no memory of the host: needs a C++ compiler, no GPU.
test-device: $(INSTALLED)
	$(PYTEST) tests/device

# Each edit of the source in tests/mutants.toml, and the test that fails; some 20 minutes.
mutants: $(INSTALLED)
	$(BIN)/python tests/mutants.py

# Each on the oldest supported versions, in a folder before the environment. The newest libraries with adapters need
# newer ones of the core, so the two are apart.
OLD_ADAPTERS := lightning_* ignite* accelerate*
OLD_CORE := cli config csv* formats* package predict report run_audit run_files state
test-oldest: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest --requirement oldest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest-core --requirement oldest-core.txt
	PYTHONPATH=$(abspath $(VENV))/oldest $(PYTEST) $(wildcard $(OLD_ADAPTERS:%=tests/test_%.py))
	PYTHONPATH=$(abspath $(VENV))/oldest-core $(PYTEST) $(wildcard $(OLD_CORE:%=tests/test_%.py))

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Class names, banned identifiers, line lengths and the size of the package.
names: $(INSTALLED)
	$(BIN)/python tools/check_names.py

types: $(INSTALLED)
	$(BIN)/basedpyright --warnings --pythonpath $(BIN)/python

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-cache

# The site in English, and in Chinese with what is translated; every warning is an error. The live page trains two nets.
SITE := $(BUILD)/site
SPHINX := $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs 2 --define nb_execution_cache_path=$(abspath $(BUILD))/notebooks
docs: $(INSTALLED)
	$(SPHINX) --doctree-dir $(BUILD)/doctrees/en docs $(SITE)
	$(SPHINX) --doctree-dir $(BUILD)/doctrees/zh_CN --define language=zh_CN docs $(SITE)/zh_CN
	$(BIN)/python docs/live.py $(SITE)/live.html && cp $(SITE)/live.html $(SITE)/zh_CN

# Writes what has changed in English into the translations: new messages empty, changed ones marked fuzzy.
translations: $(INSTALLED)
	$(BIN)/sphinx-build --fresh-env --quiet --builder dummy --doctree-dir $(BUILD)/doctrees/translations \
		--define language=zh_CN --define nb_execution_mode=off --define update_translations=1 \
		docs $(BUILD)/translations

check: lint names types imports test

# The compiled library without Python at every instruction set: memory errors, undefined behaviour, data races.
sanitize:
	$(CHECKED) -B $(BUILD)/address -DSANITIZE=address,undefined
	cmake --build $(BUILD)/address --parallel 2
	$(BUILD)/address/check brief
	$(CHECKED) -B $(BUILD)/thread -DSANITIZE=thread
	cmake --build $(BUILD)/thread --parallel 2
	$(BUILD)/thread/check brief

# The same for ARM64, emulated. Debian: g++-aarch64-linux-gnu qemu-user-static
arm:
	$(CHECKED) -B $(BUILD)/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build $(BUILD)/arm --parallel 2
	qemu-aarch64-static -L /usr/aarch64-linux-gnu $(BUILD)/arm/check brief

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench --docs docs/reference/benchmarks.md $(BENCH)

# An sdist, and a wheel for every Python; on Linux with the tag of the oldest system that can run it.
wheel: $(INSTALLED)
	rm -rf $(BUILD)/wheel
	$(BIN)/python -m build --sdist --outdir $(DIST)
	$(BIN)/python -m build --wheel --outdir $(BUILD)/wheel
	if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir $(DIST) $(BUILD)/wheel/*.whl; \
	else mv $(BUILD)/wheel/*.whl $(DIST); fi

clean:
	rm -rf $(VENV) $(DEMO_VENV) build dist
