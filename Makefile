# make setup       environment in .venv for a machine without a GPU; PYTHON=python3.12 and VENV=FOLDER choose another Python and folder
# make setup-gpu   environment of a machine with NVIDIA GPUs (torch, vLLM, Transformer Engine, Megatron-Core, in the order that works);
#                  SETUP_OPTIONS=--dry-run prints its commands
# make quickstart  setup, then train the tiny model with VAPO; SETTINGS="run.steps=5 seed=7" changes settings of the recipe
# make quickstart-critic  the same on a game whose state the critic can read off the text (docs/critic.md)
# make certify     measure on the quickstart's recipe whether trainer, engine, critic and graders agree (docs/certify.md)
# make test        all tests but the slow ones; test-fast: unit tests; test-slow: the slow ones; test-mcore-next: a newer Megatron-Core
# make test-gpu-stack  Transformer Engine's layers without a GPU: builds the environment of setup-gpu (.venv_gpu_stack; 35 minutes on two cores), then runs
#                  tests/te_reference in it
# make test-docs   the shorter commands of the pages, with small sizes, in a copy of the tree; test-docs-slow: all of them, as written
# make nightly     all that .ci/run leaves out: test-slow (35 killed runs and the public index's packages included), test-docs-slow (the quickstart
#                  with its 60 steps included), test-mcore-next, test-gpu-stack; NIGHTLY="test-slow test-docs-slow" runs these alone
# make test-chaos  35 runs killed at random times and resumed (three of them are in make test)
# make test-slurm  jobs on a real Slurm of fake nodes (needs root; installs Debian's slurm-wlm and munge if they are missing)
# make lint        ruff (rules and formatting), mypy, shellcheck; oxlint and oxfmt on the JavaScript of the report
# make bench       benchmarks, one JSON object a line

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
# The environment's own Python if it exists, else the first that runs.
PYTHON ?= $(or $(shell for name in $(BIN)/python python3.11 python3.12 python3; do \
  $$name -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2> /dev/null && echo $$name && break; done),python3.11)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALLED := $(VENV)/.installed
TINY := models/tiny/.made
GAME := models/tiny_game/.made
BENCHMARKS := $(filter-out benchmarks/gpu_% benchmarks/critic_diagnosis.py,$(wildcard benchmarks/*.py))  # critic_diagnosis: an hour

.PHONY: setup setup-gpu test-gpu-stack python quickstart quickstart-critic certify test test-fast test-slow test-docs test-docs-slow test-chaos test-slurm test-mcore-next nightly lint format bench clean

setup: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt requirements/torch_cuda.txt pyproject.toml tools/setup_environment.py | python
	@$(PYTHON) tools/setup_environment.py --venv $(VENV)
	@touch $@

setup-gpu: | python
	@$(PYTHON) tools/setup_gpu.py --venv $(VENV) $(SETUP_OPTIONS)

# A PYTHON that is given is checked although the environment may exist: another version needs another folder.
python:
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) \
	  || { echo "error: PYTHON=$(PYTHON) does not run; install Python 3.11 or 3.12, or give its path: make setup PYTHON=/path/to/python3.12" >&2; exit 2; }; \
	case $$version in 3.11|3.12) ;; \
	  *) echo "error: PYTHON=$(PYTHON) is Python $$version; 3.11 and 3.12 are supported: make setup PYTHON=/path/to/python3.12" >&2; exit 2;; esac; \
	there=$$(test ! -x $(BIN)/python || $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true); \
	test -z "$$there" -o "$$there" = "$$version" \
	  || { echo "error: $(VENV) has Python $$there, and PYTHON=$(PYTHON) is $$version; name another folder (VENV=.venv$$version) or remove it (rm -r $(VENV))" >&2; exit 2; }

$(TINY): tools/make_tiny_model.py tools/addition_task.py | $(INSTALLED)
	@$(BIN)/python tools/make_tiny_model.py --output models/tiny $(TINY_OPTIONS)
	@touch $@

quickstart: $(INSTALLED) $(TINY)
	@echo "training models/tiny with VAPO: examples/configs/quickstart.yaml"
	@$(BIN)/vapo-mcore train examples/configs/quickstart.yaml --clean $(SETTINGS)
	@printf '%s\n' '' 'What to try next:' \
	  '  $(BIN)/vapo-mcore report runs/quickstart    # curves, samples and diagnosis of this run on one page: runs/quickstart/report.html' \
	  '  $(BIN)/vapo-mcore eval examples/configs/quickstart.yaml --checkpoint runs/quickstart/export/hf    # the trained policy on held-out problems' \
	  '  $(BIN)/vapo-mcore train examples/configs/quickstart.yaml run.dir=runs/faster policy.optimizer.lr=4e-4    # the same with one setting changed'

$(GAME): tools/make_game_model.py examples/extensions/doors_and_dice.py | $(INSTALLED)
	@$(BIN)/python tools/make_game_model.py --output models/tiny_game $(GAME_OPTIONS)
	@touch $@

quickstart-critic: $(INSTALLED) $(GAME)
	@echo "training models/tiny_game with VAPO: examples/configs/critic_game_vapo.yaml"
	@$(BIN)/vapo-mcore train examples/configs/critic_game_vapo.yaml --clean $(SETTINGS)
	@$(BIN)/vapo-mcore report runs/critic_game_vapo

certify: $(INSTALLED) $(TINY)
	@$(BIN)/vapo-mcore certify examples/configs/quickstart.yaml

# Two files at a time, each in one process; tests/conftest.py says which files come first.
TWO_FILES := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# What it measures depends on timing: it runs alone.
MEASURES := tests/distributed/test_planning.py
test: test-fast
	$(BIN)/python -m pytest tests/distributed tests/fake_cuda tests/integration tests/chaos tests/slurm --ignore $(MEASURES) -m "not slow" $(TWO_FILES) --durations 10
	$(BIN)/python -m pytest $(MEASURES) -m "not slow" --durations 10

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit tests/te_reference/test_references.py -m "not slow" $(TWO_FILES) --durations 10

test-docs: $(INSTALLED)
	$(BIN)/python -m pytest tests/docs -m "not slow" --durations 10

test-docs-slow: $(INSTALLED)
	$(BIN)/python -m pytest tests/docs --durations 10

test-chaos: $(INSTALLED)
	$(BIN)/python -m pytest tests/chaos

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest tests --ignore tests/docs --ignore tests/te_reference -m slow

# The environment is kept; SETUP_OPTIONS="--jobs N" says how many compilers run at a time.
GPU_STACK := .venv_gpu_stack
$(GPU_STACK)/.installed: tools/setup_gpu.py | python
	@$(PYTHON) tools/setup_gpu.py --venv $(GPU_STACK) $(SETUP_OPTIONS)
	@$(GPU_STACK)/bin/python -m pip --disable-pip-version-check -qq install pytest hypothesis
	@touch $@

test-gpu-stack: $(GPU_STACK)/.installed
	OMP_NUM_THREADS=1 $(GPU_STACK)/bin/python -m pytest tests/te_reference -rP --durations 10

test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest tests/slurm

# Layouts, offload, the CPU optimizer and resumed runs with a newer Megatron-Core: its wheel asks for Python 3.12 but, unpacked and first on the path, runs under 3.11.
NEXT := $(VENV)/megatron_core_next
test-mcore-next: $(INSTALLED)
	test -d $(NEXT)/megatron || { $(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --dest $(NEXT) megatron-core==0.19.2 \
	  && $(BIN)/python -m zipfile -e $(NEXT)/megatron_core-*.whl $(NEXT); }
	PYTHONPATH=$(abspath $(NEXT)) $(BIN)/python -m pytest tests/distributed/test_layouts.py tests/distributed/test_offload.py \
	  tests/distributed/test_cpu_optimizer.py tests/integration/test_resume_in_process.py -k "not checkpoints"

# All of them run, also after one that fails; the last line names those that failed.
NIGHTLY ?= test-slow test-docs-slow test-mcore-next test-gpu-stack
nightly: $(INSTALLED)
	@failed=; for target in $(NIGHTLY); do echo "nightly: $$target"; $(MAKE) $$target || failed="$$failed $$target"; done; \
	  test -z "$$failed" || { echo "nightly: failed:$$failed" >&2; exit 1; }

REPORT_SCRIPTS := $(wildcard vapo_mcore/report/assets/*.js)
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select DOC102 .  # docstrings name arguments that there are
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/*.sbatch slurm/*.sh
	$(BIN)/oxfmt --check $(REPORT_SCRIPTS)
	@mkdir -p build && cat $(REPORT_SCRIPTS) > build/report.js  # a page runs them in one scope
	$(BIN)/oxlint --no-ignore --deny-warnings build/report.js

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/oxfmt $(REPORT_SCRIPTS)

bench: $(INSTALLED)
	@for benchmark in $(BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python $$benchmark; done

clean:
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
