# Every target sets up .venv by itself when it is missing or older than requirements.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint notebooks bench clean
help:            ## show this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv from requirements.txt

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "minillm needs Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: $(READY)   ## the main job: every step on the real model, one table
	$(BIN)/minillm ladder

test: $(READY)   ## the tests, the lessons' doctests and the grader's own checks
	$(BIN)/python -m pytest

lint: $(READY)   ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

notebooks: $(READY)  ## run every notebook top to bottom
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=300 notebooks

bench: $(READY)  ## every benchmark, with its checks
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:           ## remove .venv and caches (not the downloaded model)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
