# The two commands of the README are `make serve` and `make test`; everything they need is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Test files run side by side; each keeps to one thread, so that they share the cores and do not fight for them.
JOBS ?= 2

.PHONY: serve test lint format bench install install-test install-lint clean

serve: install
	$(BIN)/suimon serve $(ARGS)

test: install-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: install-lint typecheck-links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typecheck $(BIN)/mypy --strict --explicit-package-bases -p suimon.gateway -p suimon.core_engine

format: install-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python bench/serve.py $(ARGS)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test
install-lint: $(VENV)/.installed-lint

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Suimon needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch goes first and pinned: an unpinned one may bring gigabytes of a newer CUDA build.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

CONTRIB := $(patsubst %/pyproject.toml,%,$(wildcard contrib/*/pyproject.toml))
$(VENV)/.installed-test: $(VENV)/.installed $(CONTRIB:=/pyproject.toml)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,llama-cpp]'
	$(BIN)/python -m pip install --quiet --no-deps $(addprefix --editable ./,$(CONTRIB))
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lint]'
	touch $@

# mypy cannot see names mapped by setuptools' package-dir; these links give it the tree that users import.
.PHONY: typecheck-links
typecheck-links:
	mkdir -p .typecheck/suimon
	for package in gateway core_engine kernels plugins; do ln -sfn ../../$$package .typecheck/suimon/$$package; done

clean:
	rm -rf $(VENV) .typecheck build dist *.egg-info
