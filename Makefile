# The commands of daily work; `make` alone lists them. What they need is checked first: .ci/prerequisites.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help demo build test test-quick test-long lint format bench clean

python := .venv/bin/python
# Stamps: a second call does only what changed since.
installed := .venv/.stamp-requirements
installed_dev := .venv/.stamp-requirements-dev
registered := .venv/.stamp-registered
built := .venv/.stamp-built
# torch itself is a source of the build: another version needs another extension.
torch := $(wildcard .venv/lib/python3.*/site-packages/torch/version.py)
sources := Cargo.toml $(wildcard Cargo.lock) build.rs setup.py $(shell find src cpp -name '*.rs' -o -name '*.[ch]pp') \
    $(torch)

ranks ?= 2
demo_flags ?=

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(built) ## set up, build, train a small GPT with 2 ranks and compare with gloo (ranks=N, demo_flags=...)
	PATH=$$PWD/.venv/bin:$$PATH OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=$(ranks) examples/train_gpt.py --backend sagellm $(demo_flags)

build: $(built) ## set up where needed and build the extension in place

test: $(built) $(installed_dev) ## Rust, loom and Python tests; the last line has the totals (under 15 minutes)
	@$(python) .ci/totals full

test-quick: $(built) $(installed_dev) ## the part for daily work (under 3 minutes)
	@$(python) .ci/totals quick

test-long: $(built) $(installed_dev) ## the many-times runs
	@$(python) .ci/totals long

lint: $(installed_dev) ## formatters and linters, warnings denied
	@.ci/lint

format: $(installed_dev) ## let the formatters rewrite the sources
	cargo fmt
	cargo fmt --manifest-path tests/vendor/Cargo.toml
	$(python) -m ruff format .
	$(python) -m ruff check --fix .
	find cpp tests/vendor -name '*.[ch]pp' -o -name '*.c' | xargs -r .venv/bin/clang-format -i

bench: $(built) $(installed_dev) ## collectives against gloo; results below out/
	@mkdir -p out
	$(python) benchmarks/collectives.py --help >/dev/null
	$(python) benchmarks/collectives.py $(bench_flags)

clean: ## remove what was built; .venv stays
	rm -rf target build dist out torch_ext/sagellm.egg-info torch_ext/sagellm/_build.py
	rm -f torch_ext/sagellm/*.so $(built) $(registered)

$(installed): requirements.txt .ci/setup
	@.ci/setup requirements.txt
	@touch $@

$(installed_dev): requirements-dev.txt requirements.txt .ci/setup
	@.ci/setup requirements-dev.txt
	@touch $@

# Once, an editable install tells torch the backend's name; afterwards only the extension is built anew. It is built
# first, because pip would hide what cargo and the compiler say for minutes.
$(built): $(sources) pyproject.toml $(installed)
	@.ci/prerequisites
	$(python) setup.py --quiet build_ext --inplace
	@if [[ ! -e $(registered) || -n "$$(find $(torch) pyproject.toml -newer $(registered))" ]]; then \
	    echo "== telling this environment the name sagellm"; \
	    $(python) -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e . && touch $(registered); fi
	@touch $@
