# `make demo` and `make test` need nothing but Python 3.11 or newer and make: they install the rest in .venv.
# Another Python has a folder of its own: `make test PYTHON=python3.12` installs in .venv-3.12.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter 3.11,$(VERSION)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-slow campaign lint format docs bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,dev,docs]'
	@touch $@

demo: $(INSTALLED)  ## Convert, quantize and verify the example, in a folder of its own.
	@rm -rf build/demo && mkdir -p build/demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh -euc 'cd build/demo; \
	  run() { printf "\n\033[1m$$ %s\033[0m\n" "$$*"; "$$@"; }; \
	  run tpuconv convert ../../examples/tiny-qwen3 --dry-run; \
	  run tpuconv convert ../../examples/tiny-qwen3; \
	  run tpuconv verify; \
	  run tpuconv quantize --config int8_default.yaml; \
	  run tpuconv verify --compare-hf; \
	  run tpuconv generate --prompt "In the beginning"'

test: lint  ## Lint, types and the fast tests, on two processors.
	$(BIN)/python -m pytest -n 2 -q

test-slow: campaign  ## The long ones: before a release and after changes to convert/.
	$(BIN)/python -m pytest -n 2 -q -m slow --ignore tests/adversarial

campaign: $(INSTALLED)  ## All attacks of docs/reliability.md, under an hour; prints how often each was tried.
	$(BIN)/python -m pytest -n 2 -q -m "slow or not slow" tests/adversarial

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## The documentation as a site in build/site, without network.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED)  ## Needs 15 GB of disk, and root to empty the page cache.
	$(BIN)/python benchmarks/convert.py

clean:
	rm -rf .venv .venv-* build *.egg-info
