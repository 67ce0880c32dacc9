# `make demo` and `make test` do everything they need on a machine with Python 3.11, pip and gcc.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
PYTEST_ARGS ?=
PARITY_ARGS ?=
# Where pip finds the CPU build of PyTorch, if the package index it is set up with has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
READY := .venv/.ready
TORCH = $(shell sed -nE 's/^(torch==[^ ]+).*/\1/p' requirements.lock)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help venv demo parity test lint breadth bench bench-plan bench-gpu live faults invariants soak fuzz clean distclean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

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

parity: $(READY) ## one task trained in four ways; writes docs/parity.md and its figure (about 15 minutes)
	$(BIN)/python -m examples.echo_parity --docs docs $(PARITY_ARGS)

test: lint ## everything that CI runs: lint, types, contracts, wheel, tests; fast ones first
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY) ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Slow targets, not part of `make test`, go below (`name: $(READY) ## what it shows`).

breadth: $(READY) ## record, prove and refit tiny models of many architectures; writes docs/architectures.md (about an hour)
	$(BIN)/python -m tests.engine.recording.breadth.harness $(BREADTH_ARGS)

bench: $(READY) ## how fast an engine gets new weights, by every method; writes build/bench.json (minutes)
	$(BIN)/python -m benchmarks.refit $(BENCH_ARGS)

bench-plan: $(READY) ## what planning costs a rank of a large refit; writes build/bench_plan.json (minutes)
	$(BIN)/python -m benchmarks.planning $(BENCH_PLAN_ARGS)

bench-gpu: $(READY) ## the same between GPUs over NCCL, without an engine; writes build/bench_gpu.json
	$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

live: $(READY) ## refit live engines of many kinds there and back; writes docs/live.md (minutes)
	$(BIN)/python -m tests.engine.recording.live.harness $(LIVE_ARGS)

faults: $(READY) ## inject some 400 faults into real refits and judge what follows; writes build/faults.json
	$(BIN)/python -m tests.faults.matrix $(FAULTS_ARGS)

invariants: $(READY) ## 1,000 random interleavings of steps, publishes, slow readers, failures, generation
	$(BIN)/python -m tests.faults.invariants $(INVARIANTS_ARGS)

fuzz: $(READY) ## 100,000 malformed messages into every decoder (minutes)
	$(BIN)/python -m tests.faults.fuzz $(FUZZ_ARGS)

soak: $(READY) ## 500 refits, one in ten struck by a fault: memory, descriptors, threads, sockets must not grow
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

clean: ## remove build results and caches
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
