# `make demo` and `make test` need nothing but Python 3.11 or newer and make: they install the rest in .venv.
# Another Python has a folder of its own: `make test PYTHON=python3.12` installs in .venv-3.12.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter 3.11,$(VERSION)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test fast test-slow campaign consumers newest newest-trainers release lint style types format docs bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm  # tests/helpers/timm_models.py
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

# Each worker takes the half of what the other one has left when it has nothing to do, so that the tests of a module
# stay together and both end at once.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: style types fast  ## Before every commit: lint, types and the fast tests on two processors; durations, from Python 3.12 on coverage.

# Coverage costs nothing from Python 3.12 on; before, its tracer slows each line. A test that hangs fails after five
# minutes and prints the stack of each thread.
fast: $(INSTALLED)
	$(if $(filter 3.11,$(VERSION)),,COVERAGE_CORE=sysmon) $(PYTEST) --timeout 300 --durations=15 \
	  $(if $(filter 3.11,$(VERSION)),,--cov=tpuconv)

test-slow: campaign  ## Before a release, after changes to convert/ or models/, with new versions of jax or transformers: hours.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[eval,ray]'
	$(PYTEST) -m "slow and not consumers" --ignore tests/adversarial

campaign: $(INSTALLED)  ## After changes to what writes or reads checkpoints: all attacks of docs/reliability.md, about an hour, counted.
	$(PYTEST) -m "slow or not slow" tests/adversarial tests/test_bucket_servers.py tests/test_memory.py

consumers: $(INSTALLED)  ## After changes to exports for servers: they load each form, in environments of 15 GB; about an hour.
	$(BIN)/python -m pytest -q -rs -m consumers tests/test_consumers.py tests/test_vllm_*.py
	$(BIN)/python docs/make_consumers.py

newest:  ## Nightly: the fast tests with the newest release of each dependency, and the types of transformers that are refused.
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[hf,dev]'
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  transformers flax qwix orbax-checkpoint huggingface_hub peft || true
	.venv-newest/bin/python -m pip list --outdated
	.venv-newest/bin/python tools/refused_types.py
	.venv-newest/bin/python -m pytest -q -n 2 --dist worksteal --timeout 300 --deselect tests/test_docs.py

newest-trainers: $(INSTALLED)  ## Nightly: the newest MaxText and Tunix restore, compute and save what is converted, and their runs are exported.
	NEWEST_ORACLES=1 $(BIN)/python -m pytest -q -rs -m oracles tests/test_targets_maxtext.py tests/test_targets_tunix.py
	@for name in maxtext tunix; do echo $$name; grep -iE '^(maxtext|google-tunix|orbax|jax|flax|qwix)' build/oracles/$$name-newest/installed; done

release: $(INSTALLED)  ## For the tag TAG=v0.1.0: tests, both distributions in build/dist, notes in build/notes.md.
	@mkdir -p build && $(BIN)/python tools/release_notes.py $(TAG) > build/notes.md
	$(MAKE) test PYTHON=$(PYTHON)
	@rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	@find build/dist -name '*.whl' -size +3M -exec echo 'the wheel has more than 3 MB: {}' ';' -exec false ';'

lint: style types

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
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
