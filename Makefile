# `make help` lists the targets. Everything that is made lies in .venv/ and build/.

PYTHON ?= python3
# Where the CPU build of torch comes from; any index that carries it will do.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# GPU=1 takes the plain builds of torch and ONNX Runtime, for CUDA.
GPU ?=
# Front models to serve, separated by commas; empty: all of model_repository/.
MODELS ?=
# What `make bench` measures: a module of bench/, such as encode, gateway or drill.
BENCH ?= encode
# Further options of `make serve`, `make demo`, `make bench`, `make simulate`, `make gpu` and `make test`.
ARGS ?=

# Four processes, one file of tests each at a time, in the order in which they were collected (tests/conftest.py):
# a test of a running server mostly waits, so that two cores carry four. OpenMP's threads sleep where they wait, for
# with more threads than cores torch takes several times the processor time if they spin.
# A test that hangs, or that ends its process, ends the run: with a new process pytest-xdist may wait for ever.
IN_PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --timeout 600
# What Python compiles is kept, also where a container's image says not to: `setup` leaves it to the first import, and
# each process of a server or a test would compile torch and all else anew.
unexport PYTHONDONTWRITEBYTECODE
comma := ,
BIN := .venv/bin
# `make gpu` runs without `make setup` too, for instance in a container that has torch.
GPU_PYTHON := $(or $(wildcard .venv/bin/python),$(PYTHON))
LOG := build/setup.log
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A terminal shows pip's own output and bars; elsewhere the log has it.
TERMINAL := $(shell [ -t 2 ] && echo 1)
PIP_LOG := $(if $(TERMINAL),,>>$(LOG) 2>&1)
PIP_ERROR := $(if $(TERMINAL),see above,$$(grep -o 'ERROR: .*' $(LOG) | tail -1) (log: $(LOG)))
# $(call install,WHAT,OPTIONS,HINT): says why where WHAT cannot be installed, and HINT.
install = $(PIP) install --no-compile $(2) $(PIP_LOG) || { echo "make setup: $(1) could not be installed: $(PIP_ERROR)$(3)"; exit 1; }
MODEL_NAMES := $(subst $(comma), ,$(MODELS))
TORCH := requirements/torch-$(if $(GPU),gpu,cpu).txt
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup engines serve demo image test test-long conformance lint bench simulate gpu clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: .venv/.serve ## make .venv and build/: packages, the server, the demo checkpoints (MODELS=a,b: only theirs)
	@$(BIN)/shapeshift setup $(MODEL_NAMES)

engines: setup ## compile and verify what model_repository/*/config.pbtxt asks for; what is current stays
	@$(BIN)/shapeshift engines $(MODEL_NAMES)

# These choices of `shapeshift serve` want everything built before.
BUILD_BEFORE := $(filter --strict --repository% --fleet% --print-models,$(ARGS))

serve: setup ## start Triton; each front model is built and loaded beside those that serve (MODELS=a,b chooses; ARGS=--strict: all or none)
	@$(if $(BUILD_BEFORE),$(BIN)/shapeshift engines --keep-going --brief $(MODEL_NAMES))
	@exec $(BIN)/shapeshift serve $(if $(BUILD_BEFORE),,--engines) $(if $(MODELS),--models "$(MODELS)") $(ARGS)

demo: engines ## see it work, 5 minutes: a server, its live page, a load that changes shape, and a table of what each technique gained (ARGS=--seconds=60)
	@$(BIN)/python -m bench.demo $(ARGS)

image: setup ## build the container image for CPUs (BASE=...: from another one with this Python; ARGS goes to docker build)
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m docker.image $(ARGS)

test: .venv/.test engines ## run the tests (ARGS goes to pytest; ARGS=--cov: fails below the floor in pyproject.toml)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

test-long: .venv/.test engines ## run the tests that take minutes: sanitizers, fuzz, changed sources that tests must notice, every model family, own models of the pages
	@$(BIN)/python -m pytest -m long $(ARGS)

conformance: .venv/.test engines ## execute what the pages print (images, compose, manifests, upgrades, suites of others), and write docs/conformance.md: up to an hour
	@OMP_WAIT_POLICY=passive $(BIN)/python -m tests.docs.conformance $(ARGS)

lint: .venv/.test ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/.test engines ## measure ours against others, python -m bench.$$BENCH (BENCH=encode, a technique, gateway, drill, ...; ARGS=--quick: under 3 minutes)
	@$(BIN)/python -m bench.$(BENCH) $(ARGS)

simulate: .venv/.test ## the tables and figures of the papers beside ours, in simulation (15 minutes; ARGS=--quick, or "--parts arlo,flover")
	@$(BIN)/python -m bench.papers $(ARGS)

gpu: ## the tests that need an NVIDIA GPU, then every figure of the GPU path (29 minutes; ARGS="--parts engines,decode"); without a GPU a rehearsal. Needs torch, transformers, peft and timm
	@if $(GPU_PYTHON) -c 'import pytest' 2>/dev/null; \
	  then $(GPU_PYTHON) -m pytest -m gpu $$(grep -rl --include='test_*.py' 'mark\.gpu' tests); \
	  else echo "gpu: pytest is not installed, so the tests are left out"; fi
	@$(GPU_PYTHON) -m bench.gpu $(ARGS)

clean: ## remove .venv and build/
	rm -rf .venv build

.venv/.serve: $(TORCH) requirements/lock.txt pyproject.toml setup.py
	@[[ "$(CURDIR)" != *" "* ]] || { echo "make setup: the path of this checkout has a space, and Triton's Python backend starts no model from such a path: $(CURDIR); move it to a path without spaces"; exit 1; }
	@for name in $(MODEL_NAMES); do [ -f "model_repository/$$name/config.pbtxt" ] || { echo "make: MODELS: no model $$name in model_repository; there are: $$(cd model_repository && echo *)"; exit 1; }; done
	@mkdir -p build
	@command -v $(PYTHON) >/dev/null || { echo "make setup: no $(PYTHON): install Python 3.11 or 3.12, or say PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { echo "make setup: $$($(PYTHON) --version) will not do: Python 3.11 or 3.12 is needed, say PYTHON=python3.11 (to get one without root: pip install uv && uv python install 3.12, then make setup PYTHON=\$$(uv python find 3.12))"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make setup: $(PYTHON) lacks venv: install it (Debian: python3-venv)"; exit 1; }
	@echo "setup: packages into .venv ($(if $(GPU),some GB,450 MB) to download, then a minute or two$(if $(TERMINAL),,; log: $(LOG)))"
	@$(PYTHON) -m venv .venv
	@: >$(LOG)
	@$(call install,torch,$(if $(GPU),,--no-deps --retries 1 --extra-index-url $(TORCH_INDEX)) -r $(TORCH),; if no index carries it$(comma) set TORCH_INDEX=...)
	@$(call install,packages of requirements/lock.txt,--no-deps -r <(grep -v $(if $(GPU),^onnxruntime,^$$) requirements/lock.txt))
	@$(call install,shapeshift,--no-deps --no-build-isolation -e .)
	@touch $@

.venv/.test: .venv/.serve requirements/test.txt requirements/fleet.txt
	@echo "setup: packages for tests and benchmarks"
	@$(call install,packages of requirements/test.txt and fleet.txt,--no-deps -r requirements/test.txt -r requirements/fleet.txt)
	@touch $@
