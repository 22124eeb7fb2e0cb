# Every target sets up what it needs in .venv; nothing has to be installed by hand but Python 3.11.
# PIP_* variables are honoured (pip reads them itself), and a torch that is already in the
# environment is kept: `make test VENV=/path/to/your/venv` uses yours.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.takifugu-installed
JOBS ?= 2

.PHONY: help install demo test test-slow lint format bench docs clean

help:
	@echo "make demo | test | test-slow | lint | format | bench | docs | clean"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" \
		>> $(VENV)/constraints.txt 2>/dev/null || grep '^torch==' constraints.txt >> $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)

demo: install
	$(BIN)/takifugu demo

# One thread each: the workers share the cores already.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks.run

docs: install
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
