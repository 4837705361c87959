# Every target makes .venv first where it is missing. `make demo` is the whole line on a tiny model; `make test` proves it.
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo-out

.PHONY: demo test lint venv clean

venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=python3.12 or the like")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: venv
	bash demo.sh $(BIN) $(DEMO)

test: venv
	$(BIN)/python -m pytest -n auto

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
