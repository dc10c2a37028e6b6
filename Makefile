# Every target does the set-up it needs; a second run re-installs nothing.
.PHONY: setup demo test hosts chaos mutants lint type fmt docs sizes bench lock wheel
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install --no-deps --no-compile
# PyPI's own torch is a CUDA build of several GB. The CPU build is on some machines' disks, where
# pip finds it, and else comes from here. It is installed without a hash: PyPI has none of it.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Named after what was installed: a changed pin installs again, and nothing else does.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml requirements-cpu.lock | sha256sum | cut -c1-16)

# Where the environment forbids bytecode, each of a run's processes would compile what it imports
# anew, a third of its start. Empty means allowed: the check of the installation writes most of it.
export PYTHONDONTWRITEBYTECODE :=

setup: $(STAMP)

$(STAMP):
	@for python in python3.11 python3.12 python3.13 python3; do \
	  test -x $(BIN)/pip && break; \
	  $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	    || continue; \
	  $$python -m venv $(VENV) || rm -rf $(VENV); \
	done; \
	test -x $(BIN)/pip \
	  || { echo 'rltrain needs Python 3.11, 3.12 or 3.13 with venv on PATH; found none' >&2; exit 1; }
	@echo 'Installing the CPU stack into $(VENV) (2.4 GB, some minutes) ...'
	@torch=$$(grep '^torch==' requirements-cpu.lock); \
	  $(PIP) "$$torch" 2>/dev/null || $(PIP) --index-url $(TORCH_INDEX) "$$torch"
	@grep -v '^torch==' requirements-cpu.lock > $(VENV)/rest.lock
	@$(PIP) --require-hashes -r $(VENV)/rest.lock
	@$(PIP) --no-build-isolation --editable .
	@$(BIN)/python -W ignore docker/check_install.py
	@rm -f $(VENV)/installed-* && touch $@

demo: setup
	$(BIN)/python -m rltrain.main +recipe=grpo_moe_r3

# What starts Ray, engines or ranks has the machine to itself; the rest runs in two processes.
HEAVY := tests/chaos tests/distributed tests/gpu tests/hosts tests/integration

test: setup
	$(BIN)/python -m pytest -m 'not slow' --numprocesses 2 $(HEAVY:%=--ignore=%)
	$(BIN)/python -m pytest -m 'not slow' $(HEAVY)

# Runs over three hosts, which are network namespaces of this machine: docs/clusters.md. To try things
# on such hosts: .venv/bin/python -m tests.hosts up 3
hosts: setup
	$(BIN)/python -m pytest tests/hosts

# Hours on 2 cores: every fault that docs/reliability.md lists, whose table it writes. For some of
# them: .venv/bin/python -m tests.chaos --only TEXT
chaos: setup
	$(BIN)/python -m tests.chaos

# Hours on 2 cores: every fault of tests/mutants is planted in a copy, and its test has to fail. For
# some of them: .venv/bin/python -m tests.mutants.run --only TEXT
mutants: setup
	$(BIN)/python -m tests.mutants.run

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint docker/Dockerfile.*

type: setup
	$(BIN)/mypy

fmt: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Broken links and anchors are errors; --quiet would hide them from MkDocs' strict mode.
# Read the site with: python -m http.server -d build/docs
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Prints lines by room, and what is longer than it should be; enforces nothing.
sizes: setup
	$(BIN)/python tests/sizes.py

# In sizes for a CPU; as they are these commands measure a slice of Qwen3-30B-A3B on a GPU.
# make bench BENCH=after && rltrain bench compare before after
BENCH := bench
bench: setup
	$(BIN)/python -m benchmarks.rollout --layers 0 --prompt-tokens 8 --response-tokens 3 \
	  --out $(BENCH)/rollout.json
	$(BIN)/python -m benchmarks.step --layers 0 --prompt-tokens 8 --response-tokens 16 \
	  --out $(BENCH)/step.json
	$(BIN)/python -m benchmarks.routes --layers 4 --experts 32 --k 4 --tokens 64 \
	  --out $(BENCH)/routes.json

# dist/rltrain-VERSION-py3-none-any.whl; tests/recipes/test_wheel.py installs and runs it.
wheel: setup
	$(BIN)/python -m build --wheel --no-isolation

# The lock is what .venv has of what pyproject.toml needs; docker/lock.py says how to change a pin.
lock:
	$(BIN)/python docker/lock.py
