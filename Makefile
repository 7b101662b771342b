# The commands of daily work; `make` alone lists them. What they need is checked first: .ci/prerequisites.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help demo certify build wheels test test-quick test-long test-ecosystem test-gpu bench-gpu prebuilt built-gpu lint format miri bench bench-hosts docs coverage clean

python := .venv/bin/python
# Stamps: a second call does only what changed since.
installed := .venv/.stamp-requirements
installed_dev := .venv/.stamp-requirements-dev
installed_ecosystem := .venv-ecosystem/.stamp-requirements
installed_213 := .venv-ecosystem-2.13/.stamp-requirements
built_213 := .venv-ecosystem-2.13/.stamp-built
# The systems for which vLLM for processors and TorchRec have wheels; on others their tests are skipped.
with_213 := $(filter Linux-x86_64 Linux-aarch64,$(shell uname -s)-$(shell uname -m))
installed_docs := .venv-docs/.stamp-requirements
installed_wheels := .venv-wheels/.stamp-requirements
registered := .venv/.stamp-registered
built := .venv/.stamp-built
# torch itself is a source of the build: another version needs another extension.
torch := $(wildcard .venv/lib/python3.*/site-packages/torch/version.py)
sources := Cargo.toml $(wildcard Cargo.lock) build.rs setup.py $(shell find src nccl-sys/src cpp -name '*.rs' -o -name '*.[ch]pp') \
    $(torch)

# The machine with the GPU may have torch in another Python, and no cargo: then SAGELLM_PREBUILT names what `make
# prebuilt` wrote elsewhere, only the C++ is compiled, and nothing is installed. pytest has to be there.
gpu_python ?= $(if $(wildcard $(python)),$(python),python3)
gpu_run := PYTHONPATH=$$PWD/torch_ext$${PYTHONPATH:+:$$PYTHONPATH} $(gpu_python)

ranks ?= 2
demo_flags ?=

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(built) ## set up, build, train a small GPT with 2 ranks and compare with gloo (ranks=N, demo_flags=...)
	PATH=$$PWD/.venv/bin:$$PATH OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=$(ranks) -m torch_sagellm.demos.train_gpt --backend sagellm $(demo_flags)

build: $(built) ## set up where needed and build the extension in place

wheels: $(installed_wheels) ## wheels for torch 2.11 to 2.15, one for each CPython that is here, and the source distribution, in dist/
	@.ci/prerequisites
	.venv-wheels/bin/python .ci/build-wheels

test: $(built) $(installed_dev) ## Rust, loom and Python tests; the last line has the totals (under half an hour on 2 cores)
	@$(python) .ci/totals full

test-quick: $(built) $(installed_dev) ## the part for daily work (under 3 minutes)
	@$(python) .ci/totals quick

test-long: $(built) $(installed_dev) ## the many-times runs
	@$(python) .ci/totals long

test-ecosystem: $(built) $(installed_ecosystem) $(if $(with_213),$(built_213)) ## programs of PyPI under the name gloo (25 minutes on 2 cores, 13 GB of disk)
	PYTHONPATH=$$PWD/torch_ext .venv-ecosystem/bin/python -m pytest -m long -ra tests/py/ecosystem $(if $(with_213),-k "not (vllm or torchrec)")
	$(if $(with_213),.venv-ecosystem-2.13/bin/python -m pytest -m long -ra tests/py/ecosystem -k "vllm or torchrec")

test-gpu: built-gpu ## tests on an NVIDIA GPU (under 8 minutes; fails if there is none; see benchmarks/README.md)
	@$(gpu_run) .ci/totals gpu

bench-gpu: built-gpu ## host time a call against torch's nccl on an NVIDIA GPU; results below out/
	$(gpu_run) benchmarks/gpu.py --out out $(bench_flags)

certify: built-gpu ## correctness, hang, bandwidth and overlap of this machine's cards or cores, as a report below out/ (under 15 minutes)
	@mkdir -p out
	cd out && PYTHONPATH=$(CURDIR)/torch_ext$${PYTHONPATH:+:$$PYTHONPATH} $(if $(wildcard $(python)),$(CURDIR)/$(python),$(gpu_python)) -m torch_sagellm certify $(certify_flags)

prebuilt: $(installed) ## the Rust core for a machine without cargo, in build/prebuilt (SAGELLM_PREBUILT names it there)
	@.ci/prerequisites
	$(python) setup.py --quiet prebuilt

# egg_info writes metadata beside the sources, from which torch learns the backend's name as from an installed package.
built-gpu: $(if $(SAGELLM_PREBUILT),,$(built) $(installed_dev))
	$(if $(SAGELLM_PREBUILT),$(gpu_python) setup.py --quiet egg_info build_ext --inplace)

lint: $(installed_dev) ## formatters and linters, warnings denied
	@.ci/lint

format: $(installed_dev) ## let the formatters rewrite the sources
	cargo fmt --all
	cargo fmt --manifest-path tests/simulators/Cargo.toml
	$(python) -m ruff format .
	$(python) -m ruff check --fix .
	find cpp tests/simulators -name '*.[ch]pp' -o -name '*.c' | xargs -r .venv/bin/clang-format -i

miri: ## Rust tests under Miri, for invalid accesses of memory; needs a nightly toolchain with Miri (over 25 minutes)
	@.ci/miri

bench: $(built) $(installed_dev) ## collectives against gloo; results below out/
	@mkdir -p out
	$(python) benchmarks/collectives.py --help >/dev/null
	$(python) benchmarks/collectives.py --out out $(bench_flags)

bench-hosts: $(built) $(installed_dev) ## groups over several hosts against gloo, in network namespaces, as root (under 10 minutes); results below out/
	@mkdir -p out
	$(python) benchmarks/hosts.py --out out $(bench_flags)

coverage: $(installed_dev) ## line coverage of the package and of the Rust core, at least 85 % each
	@.ci/prerequisites
	@$(python) .ci/coverage

docs: $(installed_docs) ## the site of the documentation, with the API reference, in build/site; warnings fail it (seconds)
	@.venv-docs/bin/python .ci/docs

clean: ## remove what was built; .venv stays
	rm -rf target build dist out torch_ext/torch_sagellm.egg-info torch_ext/torch_sagellm/_build.py
	rm -f torch_ext/torch_sagellm/*.so $(built) $(built).begun $(registered)

$(installed): requirements.txt .ci/setup
	@.ci/setup requirements.txt
	@touch $@

$(installed_dev): requirements-dev.txt requirements.txt .ci/setup
	@.ci/setup requirements-dev.txt
	@touch $@

# An environment of its own: these programs bring hundreds of packages. torch is the one that the extension was built for.
$(installed_ecosystem): requirements-ecosystem.txt $(installed) $(torch)
	$(python) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python -m pip install --disable-pip-version-check --quiet \
	    "torch==$$($(python) -c 'from importlib.metadata import version; print(version("torch"))')" -r requirements-ecosystem.txt
	@touch $@

# vLLM and TorchRec's operators are built for one version of torch, so they have a second environment. They name builds of
# torch and of the operators that do not fit: the lines that end in "alone" are installed without what they ask for.
$(installed_213): requirements-ecosystem-2.13.txt $(installed)
	$(python) -m venv .venv-ecosystem-2.13
	.venv-ecosystem-2.13/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r <(grep 'alone$$' $<)
	.venv-ecosystem-2.13/bin/python -m pip install --disable-pip-version-check --quiet -r <(grep -v 'alone$$' $<)
	@touch $@

$(built_213): $(sources) pyproject.toml $(shell find torch_ext -name '*.py' -o -name '*.pyi') $(installed_213) | $(built)
	.venv-ecosystem-2.13/bin/python -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps \
	    --force-reinstall .
	@touch $@

# An environment of its own: the reference is read from the sources, so no torch is needed.
$(installed_docs): requirements-docs.txt
	@python=$$(.ci/python) && "$$python" -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --quiet -r requirements-docs.txt
	@touch $@

# An environment of its own: the linker in it has 170 MB, and no other command wants it.
$(installed_wheels): requirements-wheels.txt
	@python=$$(.ci/python) && "$$python" -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --disable-pip-version-check --quiet -r requirements-wheels.txt
	@touch $@

# An editable install tells torch the backend's name; it is repeated only when torch or pyproject.toml changes. The
# extension is built first, because pip would hide the output of cargo and the compiler until it ends.
$(built): $(sources) pyproject.toml $(installed)
	@.ci/prerequisites
	@touch $@.begun # the stamp's time: what is edited during the build is newer
	$(python) setup.py --quiet build_ext --inplace
	@if [[ ! -e $(registered) || -n "$$(find $(torch) pyproject.toml -newer $(registered))" ]]; then \
	    echo "== telling this environment the name sagellm"; \
	    $(python) -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e . && touch $(registered); fi
	@mv $@.begun $@
