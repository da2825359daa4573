# Each target sets itself up in .venv; all it needs is git, make and Python 3.11 to 3.13.
#   make demo    watch a model whose experts do not fit in memory generate text
#   make test    the whole test suite
#   make check   lint, format, types, and whether the documentation builds
#   make docs    the documentation as a site, in build/site
# PYTHON=/path/to/python chooses the interpreter. pip's own settings (index, cache, ...) apply.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check docs setup clean

demo: $(STAMP)
	$(BIN)/daop demo

test: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --durations=10  # passive: tests share the cores with other work

check: $(STAMP) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site

setup: $(STAMP)

clean:
	rm -rf $(VENV) build dist daop.egg-info

# The stamp comes last, so that an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints-dev.txt setup.py $(wildcard runtime/csrc/*)
	@python=$$(bash .ci/find-python "$(PYTHON)") || exit 1; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "making $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV) || { \
	    echo "could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	$(BIN)/python -m pip install -c constraints-dev.txt -e '.[dev]'
	@touch $@
