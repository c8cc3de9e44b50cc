# `make demo` and `make test` are all a newcomer needs: both make .venv and install what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types docs bench clean

demo: $(STAMP)
	$(BIN)/sipp demo --force

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests $(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_kernels.py
	$(BIN)/python benchmarks/bench_networks.py
	$(BIN)/python benchmarks/bench_budget.py

clean:
	rm -rf $(VENV) demo dist site
