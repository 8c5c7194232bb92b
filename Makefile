PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test format clean

demo: $(VENV)/demo
	$(BIN)/momentprop demo --out demo

# Without torch's cache of fake tensors, networks are traced in two thirds of the time.
test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	OMP_NUM_THREADS=1 TORCH_FAKE_TENSOR_DISPATCH_CACHE=0 $(BIN)/pytest -n auto --dist worksteal

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One stamp per set of packages, so that each command installs what it needs and no more: the demo needs the
# library alone, the tests the experiments beside it.
$(VENV)/demo: PACKAGES = -e '.[demo]'
$(VENV)/dev: PACKAGES = -e '.[dev]' -e './reproduction[ray]'
$(VENV)/demo $(VENV)/dev: pyproject.toml reproduction/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $(PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
