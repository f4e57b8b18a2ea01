# Everything runs in .venv, made on first use. PYTHON picks the interpreter it is made from (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
# One process per core; the suite's tensors are small, so torch threads would only fight each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-gpu lint format typecheck wheel check clean

demo: $(INSTALLED)
	$(BIN)/vllm-dsa replay --arch sm90 --num-speculative-tokens 3

test: $(INSTALLED_DEV)
	$(PYTEST) -n auto --dist worksteal

# On a GPU machine's own Python, which carries torch and DeepGEMM: PYTHON=python3 make test-gpu
test-gpu:
	VDSA_REQUIRE_GPU=1 $(PYTHON) -m pytest -m gpu

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format --dry-run --Werror

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format -i

typecheck: $(INSTALLED_DEV)
	$(BIN)/mypy

wheel: $(INSTALLED_DEV)
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python tools/check_wheel.py dist

check: test lint typecheck wheel

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip 25.1 is the first to read dependency groups.
$(VENV)/bin/activate:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'

$(INSTALLED): pyproject.toml constraints-dev.txt | $(VENV)/bin/activate
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[cli,plot]'
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints-dev.txt --group dev
	touch $@
