# All set-up is done here: Python 3.11 or newer and make are enough.
#
#   make train   train the quickstart (ARGS="llama_style --run.steps 50" for another)
#   make test    run the tests (TESTS=tests/test_config.py for some of them)
#   make lint    style; make types: types; make clean: remove the environment
#
# PYTHON chooses the interpreter of a new environment: make train PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TESTS ?=

BIN := $(VENV)/bin
CORE := $(VENV)/.core
TEST := $(VENV)/.test

.PHONY: train test lint types format clean

train: $(CORE)
	$(BIN)/shardtrain train $(ARGS)
	@echo "more: . $(BIN)/activate; shardtrain --help"

test: $(TEST)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(TEST)
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(CORE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11; try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(TEST): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
