PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where no bytecode is written, as in many containers, each of the processes that tests start compiles torch anew:
# a second or two every time, and ten seconds in a worker of pytest. It goes outside the source.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

.PHONY: demo test types suite format clean

demo: $(VENV)/demo
	$(BIN)/momentprop demo --out demo

test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory --jobs=2 types suite

# Beside the tests, which at times wait for processes.
types: $(VENV)/dev
	$(BIN)/mypy

# Without torch's cache of fake tensors, networks are traced in two thirds of the time.
suite: $(VENV)/dev
	OMP_NUM_THREADS=1 TORCH_FAKE_TENSOR_DISPATCH_CACHE=0 $(BIN)/pytest -n auto --dist worksteal

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One stamp per set of packages, so that each command installs what it needs and no more: the tests more
# than the demo.
$(VENV)/demo: PACKAGES = -e . -e ./reproduction
$(VENV)/dev: PACKAGES = -e '.[dev]' -e './reproduction[ray]'
$(VENV)/demo $(VENV)/dev: pyproject.toml reproduction/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $(PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
