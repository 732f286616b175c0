# make setup       environment in .venv (Python 3.11, CPU)
# make quickstart  setup, then train the tiny model with VAPO
# make test        all tests but the slow ones; test-fast: unit tests; test-slow: the slow ones; test-mcore-next: a newer Megatron-Core
# make test-docs   every command of the pages, as written or with small sizes, in a copy of the tree
# make test-chaos  25 runs killed at random times and resumed (three of them are in make test)
# make test-slurm  jobs on a real Slurm of fake nodes (needs root; installs Debian's slurm-wlm and munge if they are missing)
# make lint        ruff, mypy, shellcheck
# make bench       benchmarks, one JSON object a line

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALLED := $(VENV)/.installed
TINY := models/tiny/.made
BENCHMARKS := $(filter-out benchmarks/gpu_%,$(wildcard benchmarks/*.py))

.PHONY: setup quickstart test test-fast test-slow test-docs test-chaos test-slurm test-mcore-next lint format bench clean

setup: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) is not installed; install it or give PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps --no-compile --requirement requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@# The stack imports; its modules are compiled here once, and not by every process of the first run.
	VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -W ignore -c "import megatron.core, torch, transformers, vllm"
	touch $@

$(TINY): tools/make_tiny_model.py tools/addition_task.py | $(INSTALLED)
	$(BIN)/python tools/make_tiny_model.py --output models/tiny
	touch $@

quickstart: $(INSTALLED) $(TINY)
	$(BIN)/vapo-mcore train examples/configs/quickstart.yaml --clean

test: test-fast
	$(BIN)/python -m pytest tests --ignore tests/unit --ignore tests/docs -m "not slow"

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit -m "not slow" --numprocesses 2 --dist loadfile

test-docs: $(INSTALLED)
	$(BIN)/python -m pytest tests/docs --durations 10

test-chaos: $(INSTALLED)
	$(BIN)/python -m pytest tests/chaos

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest tests -m slow

test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest tests/slurm

# Layouts, offload, the CPU optimizer and resumed runs with a newer Megatron-Core: its wheel asks for Python 3.12 but, unpacked and first on the path, runs under 3.11.
NEXT := $(VENV)/megatron_core_next
test-mcore-next: $(INSTALLED)
	test -d $(NEXT)/megatron || { $(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --dest $(NEXT) megatron-core==0.19.2 \
	  && $(BIN)/python -m zipfile -e $(NEXT)/megatron_core-*.whl $(NEXT); }
	PYTHONPATH=$(abspath $(NEXT)) $(BIN)/python -m pytest tests/distributed/test_layouts.py tests/distributed/test_offload.py \
	  tests/distributed/test_cpu_optimizer.py tests/integration/test_resume_in_process.py -k "not checkpoints"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/*.sbatch slurm/*.sh

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@for benchmark in $(BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python $$benchmark; done

clean:
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
