# Every target does the set-up it needs; a second run re-installs nothing.
.PHONY: setup demo test lint type fmt bench lock
.DELETE_ON_ERROR:
SHELL := /bin/bash -euo pipefail

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Named after what was installed, so a changed pin installs again and nothing else does.
STAMP := $(VENV)/installed-$(shell cat Makefile pyproject.toml requirements-cpu.lock | sha256sum | cut -c1-16)

setup: $(STAMP)

$(STAMP):
	@python=$$(for name in python3.11 python3.12 python3.13 python3; do \
	    $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	      && echo $$name && break; done || true); \
	  test -n "$$python" || { echo 'rltrain needs Python 3.11, 3.12 or 3.13; none is on PATH' >&2; exit 1; }; \
	  test -x $(BIN)/python || $$python -m venv $(VENV)
	$(PIP) install -q --no-deps --no-compile '$(TORCH)' 2>/dev/null \
	  || $(PIP) install -q --no-deps --no-compile --index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP) install -q --no-deps --no-compile -r requirements-cpu.lock
	$(PIP) install -q --no-deps --no-compile -e .
	@$(BIN)/python docker/check_install.py
	@rm -f $(VENV)/installed-* && touch $@

demo: setup
	$(BIN)/python -m rltrain.main +recipe=grpo_moe_r3

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile.*

type: setup
	$(BIN)/mypy

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks.throughput
