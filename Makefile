# `make demo` and `make test` do everything they need on a machine with Python 3.11, pip and gcc.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
PYTEST_ARGS ?=
# Where pip finds the CPU build of PyTorch, if the package index it is set up with has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
READY := .venv/.ready
TORCH = $(shell sed -nE 's/^(torch==[^ ]+).*/\1/p' requirements.lock)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help venv demo test lint breadth clean distclean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(READY) ## make .venv from requirements.lock

# vLLM's CPU build wants exactly this torch: the quick try without another index never takes a CUDA build.
$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) not found: install Python 3.11, or say PYTHON=..."; exit 1; }
	rm -f $(READY)
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --no-deps "$(TORCH)" \
	  || { echo "... so from PyTorch's own index of CPU builds:"; \
	       $(PIP) install --quiet --no-deps --extra-index-url "$(TORCH_INDEX)" "$(TORCH)"; }
	$(PIP) install --quiet --no-deps --requirement requirements.lock
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: $(READY) ## a small RL run on a real vLLM server, which proves itself at the end (a few minutes)
	$(BIN)/python examples/grpo_tiny.py

test: lint ## everything that CI runs: lint, types, contracts, wheel, tests; fast ones first
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY) ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Slow targets, not part of `make test`, go below (`name: $(READY) ## what it shows`).

breadth: $(READY) ## record, prove and refit tiny models of many architectures; writes docs/architectures.md (hours)
	$(BIN)/python -m tests.engine.recording.breadth.harness $(BREADTH_ARGS)

clean: ## remove build results and caches
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
