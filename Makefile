# Two commands for a fresh clone: `make demo` and `make test`. Each builds .venv once (stamp files remember it).
# On a GPU machine:  make demo TORCH=torch==2.11.0 TORCH_INDEX=      (the default PyPI wheel carries CUDA)

TORCH       ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS        ?= 2
DEVICE      ?= cpu
VENV        ?= .venv
# The first interpreter of a supported version that can make environments.
PYTHON      ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test test-all lint docs table clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      real sentences through a real encoder, its norms and linear layers served by Tilewright"
	@echo "make test      lint, types, and the tests that fit in minutes"
	@echo "make test-all  every test, every config, every architecture"
	@echo "make docs      the documentation site, into site/"
	@echo "make lint      ruff and mypy alone"

demo: $(VENV)/.demo
	$(BIN)/tilewright demo

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --device $(DEVICE) -m "not slow" $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --device $(DEVICE) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

table: $(VENV)/.dev
	$(BIN)/python scripts/results_table.py --write
	$(BIN)/python scripts/page_output.py docs/tile-guide.md --write

clean:
	rm -rf $(VENV) build dist site

# torch comes first and alone. The extra index makes a CPU build win (2.13.0+cpu sorts above 2.13.0); where that index
# cannot be reached pip only warns, and takes what the configured index has. Its dependencies come with ours, below. A
# CUDA wheel of 2.13 wants another Triton than the one that the tests pin: pip then puts torch 2.11 in its place.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; try: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "making $(VENV) with $(TORCH)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --no-deps --retries 1 --timeout 30 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing the demo: a minute or two, once"
	$(PIP) install -e ".[demo,triton,tilelang,cuda]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "installing the tools: a minute or two, once"
	$(PIP) install -e ".[dev]"
	@touch $@
