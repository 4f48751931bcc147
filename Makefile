# Everything a newcomer needs: `make help`. All that these targets install or write stays in this folder.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The first Python that fits and can make a virtual environment; give PYTHON=... to choose another.
USABLE = import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$name" -c '$(USABLE)' >/dev/null 2>&1 && { command -v "$$name"; break; }; done)

# Where the CPU build of torch is. Where this cannot be reached, pip takes what its own index has (perhaps CUDA: larger).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
ZIG := $(VENV)/zig
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-cache-dir --no-input
SOURCES := $(shell find csrc -type f -not -name '*.pyc' 2>/dev/null)
DRIVER := $(shell find tests/kernels -name '*.cpp' -o -name '*.h')
ARGS ?=

# Caches of the tools and libraries used here: in this folder, not in the user's home.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export XDG_CONFIG_HOME := $(CURDIR)/.cache/config
export XDG_DATA_HOME := $(CURDIR)/.cache/data
export XDG_STATE_HOME := $(CURDIR)/.cache/state
export HF_HOME := $(CURDIR)/.cache/huggingface
export TORCH_HOME := $(CURDIR)/.cache/torch
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/torchinductor
export ZIG_GLOBAL_CACHE_DIR := $(CURDIR)/.cache/zig
export ZIG_LOCAL_CACHE_DIR := $(CURDIR)/.cache/zig
export HF_HUB_OFFLINE := 1
unexport PYTHONDONTWRITEBYTECODE # else each of the many processes compiles all of our modules again
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- the environment: one stamp per layer, so that a second run starts at once

$(VENV)/python.stamp:
	@test -n "$(PYTHON)" || { \
		echo "No Python 3.11, 3.12, 3.13 or 3.14 with venv is on PATH. Debian: apt-get install python3 python3-venv python3-dev" >&2; \
		for name in python3.11 python3.12 python3.13 python3.14 python3; do \
			if command -v "$$name" >/dev/null; then echo "  $$(command -v "$$name"): $$("$$name" -c '$(USABLE)' 2>&1 | tail -n 1 | grep . || "$$name" -V)" >&2; fi; \
		done; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
		echo "$(PYTHON) has no headers (Python.h) to compile against. On Debian: apt-get install python3-dev" >&2; exit 1; }
	@echo "creating .venv with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv --clear "$(VENV)"
	@touch $@

# Without a compiler on PATH, clang comes as a wheel (ziglang). Its binary is called directly, since pip hides the
# environment from builds; and for a plain x86-64, since the kernels choose their instruction set at run time.
$(VENV)/compiler.stamp: $(VENV)/python.stamp
	@rm -rf "$(ZIG)"
	@if [ -z "$${CXX:-}" ] && ! { command -v c++ || command -v g++ || command -v clang++; } >/dev/null; then \
		echo "no C++ compiler on PATH: installing clang from the ziglang wheel (the kernels take 2 minutes more)"; \
		$(PIP) install ziglang || { echo "no compiler to be had. On Debian: apt-get install g++" >&2; exit 1; }; \
		zig=$$($(BIN)/python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))'); \
		mkdir -p "$(ZIG)"; \
		printf '#!/bin/sh\nexec "%s" c++ -mcpu=baseline "$$@"\n' "$$zig" > "$(ZIG)/c++"; \
		printf '#!/bin/sh\nexec "%s" ar "$$@"\n' "$$zig" > "$(ZIG)/ar"; \
		printf '#!/bin/sh\nexec "%s" ranlib "$$@"\n' "$$zig" > "$(ZIG)/ranlib"; \
		chmod +x "$(ZIG)"/*; \
	fi
	@touch $@

$(VENV)/torch.stamp: $(VENV)/python.stamp constraints.txt
	@echo "installing torch (about a minute)"
	@index=; \
	if $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
		index="--extra-index-url=$(TORCH_INDEX)"; fi; \
	$(PIP) install $$index "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)"
	@touch $@

# Built with tools in .venv, whose paths stay the same: only what has changed is compiled again, here and for a wheel.
$(VENV)/kernels.stamp: $(VENV)/compiler.stamp $(SOURCES)
	@echo "compiling the kernels (about 2 minutes)"
	@$(PIP) install scikit-build-core nanobind cmake ninja
	@if [ -d "$(ZIG)" ]; then \
		export CXX="$(ZIG)/c++" CMAKE_ARGS="-DCMAKE_AR=$(ZIG)/ar -DCMAKE_RANLIB=$(ZIG)/ranlib"; fi; \
	$(PIP) install --no-build-isolation --editable ./csrc
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp $(VENV)/kernels.stamp pyproject.toml
	@echo "installing ktqueue"
	@$(PIP) install --no-build-isolation --editable '.[gateway,worker,embedded,arq]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "installing the tools for tests and checks"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' > "$(VENV)/dev.txt"
	@$(PIP) install --requirement "$(VENV)/dev.txt"
	@touch $@

# A folder of its own, beside what a torch for GPUs brings.
$(VENV)/nvrtc.stamp: $(VENV)/dev.stamp
	@$(PIP) install --no-deps --target "$(VENV)/nvrtc" nvidia-cuda-nvrtc
	@touch $@

$(VENV)/fuzz.stamp: $(VENV)/dev.stamp
	@$(PIP) install atheris
	@touch $@

# ---- what people ask for

.PHONY: install demo
install: $(VENV)/demo.stamp ## Set up .venv with ktqueue in it
	@echo "ready: .venv/bin/ktqueue --help"

demo: $(VENV)/demo.stamp ## Stream a story and run a batch on this machine, from nothing
	@$(BIN)/ktqueue demo $(ARGS)

.PHONY: test long compiled installed mutations soak fleet parity models clients sanitize fuzz
# Three processes on two cores, each with whole files or folders, which fixtures serve: many tests wait for processes.
PROCESSES := --numprocesses 3 --dist loadfile --no-loadscope-reorder
test: $(VENV)/dev.stamp ## All tests but the long ones (ARGS="-k journal" for some of all)
	@$(BIN)/python -m pytest $(PROCESSES) $(or $(ARGS),--without-long)

long: $(VENV)/dev.stamp ## The long tests: installations that start, die and start again
	@$(BIN)/python -m pytest $(PROCESSES) -m long $(ARGS)

compiled: $(VENV)/nvrtc.stamp ## GPU kernels compile for an H200, and some run on the CPU, without a GPU
	@$(BIN)/python -m pytest --numprocesses 2 --dist load --timeout 600 -m compiled tests/operators/gpu $(ARGS)

installed: $(VENV)/dev.stamp ## Wheels, and every block of README and docs as printed, with ktqueue installed from its wheels
	@$(BIN)/python -m pytest --numprocesses 2 --dist load -m installed $(ARGS)

mutations: $(VENV)/dev.stamp ## Break one promise after another: its tests must fail, 10 minutes (ARGS="'no fence'" for some)
	@$(BIN)/python tests/mutations/run.py $(ARGS)

soak: $(VENV)/dev.stamp ## 1,000 jobs with cancels, disconnects and killed workers
	@$(BIN)/python -m pytest -m soak $(ARGS)

# Tests that start servers of their own are the same on each kind.
SHARED := $(filter-out %_access.py %_address.py %_cluster.py %_durability.py %_pool.py %_sentinel.py %_server.py, $(wildcard tests/broker/test_*.py))
fleet: $(VENV)/dev.stamp ## The broker's and the gateway's tests with Sentinel and in a cluster (5 minutes)
	@$(BIN)/python -m pytest -m fleet $(ARGS)
	@$(BIN)/python -m pytest --redis sentinel $(SHARED) tests/gateway $(ARGS)
	@$(BIN)/python -m pytest --redis cluster $(SHARED) tests/gateway $(ARGS)

parity: $(VENV)/dev.stamp ## Greedy tokens against transformers, the whole matrix on the demo model
	@$(BIN)/python -m pytest -m parity $(ARGS)

models: $(VENV)/dev.stamp ## Every family against transformers, and docs/reference/models.md (ARGS="qwen3_moe"; LLAMA_PYTHON=...)
	@PYTHONPATH=tests/helpers $(BIN)/python -m tests.served.run $(ARGS)

# Each client has an environment of its own. Its pins come first there, and what ktqueue needs from .venv behind them.
CLIENTS ?= $(patsubst tests/clients/requirements/%.txt,%,$(wildcard tests/clients/requirements/*.txt))
.venv-clients/%/stamp: tests/clients/requirements/%.txt $(VENV)/dev.stamp
	@echo "installing $* in .venv-clients/$*"
	@$(BIN)/python -m venv --clear "$(@D)"
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$(echo $(@D)/lib/python*/site-packages)/ktqueue.pth"
	@PIP_CONSTRAINT=/dev/null timeout 900 "$(@D)/bin/python" -m pip --quiet --disable-pip-version-check --no-cache-dir \
		--no-input install --no-compile --ignore-installed --no-deps --requirement $<
	@if [ -e "tests/clients/$*/package.json" ] && command -v npm >/dev/null; then \
		cp tests/clients/$*/package*.json "$(@D)/" && cd "$(@D)" && timeout 900 npm ci --silent --no-audit --no-fund; fi
	@touch $@

# What a client warns of is its own affair.
clients: $(foreach group,$(CLIENTS),.venv-clients/$(group)/stamp) ## Foreign clients against a real server (CLIENTS=langchain for one)
	@failed=; for group in $(CLIENTS); do \
		echo "== $$group"; \
		KTQUEUE_SERVER_PYTHON="$(BIN)/python" timeout 900 ".venv-clients/$$group/bin/python" -m pytest --quiet -m clients \
			-o filterwarnings=default --disable-warnings $(ARGS) \
			$$(sed -n 's|^# tests: |tests/clients/|p' "tests/clients/requirements/$$group.txt") || failed="$$failed $$group"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

build/sanitize-%/stamp: $(VENV)/fuzz.stamp $(SOURCES) $(DRIVER)
	@echo "compiling the kernels with -fsanitize=$* (a minute or two)"
	@$(BIN)/cmake -S csrc -B $(@D) -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE=$(BIN)/python -DKTQUEUE_SANITIZE="$*" > /dev/null
	@$(BIN)/cmake --build $(@D) --parallel --target kernel_driver thread_pool_check > /dev/null
	@touch $@

sanitize: build/sanitize-address,undefined/stamp build/sanitize-thread/stamp ## Pool and kernels under ASan, UBSan and TSan
	@for build in $(^D); do "$$build/thread_pool_check"; "$$build/kernel_driver" 300; done

FUZZ_SECONDS ?= 60
fuzz: build/sanitize-address,undefined/stamp ## Kernel calls and model files at random, FUZZ_SECONDS=60 each
	@$(<D)/kernel_driver 1000000000 $(FUZZ_SECONDS) $$(date +%s)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest --quiet --timeout 0 tests/loading/gguf/test_fuzz_gguf.py

.PHONY: lint type format
lint: $(VENV)/dev.stamp ## Style, import contracts, shell and docker files, the project's own books
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@git ls-files 'csrc/*.cpp' 'csrc/*.hpp' 'csrc/*.h' | xargs --no-run-if-empty $(BIN)/clang-format --dry-run --Werror
	@$(BIN)/shellcheck .ci/run
	@$(BIN)/hadolint docker/*.Dockerfile
	@$(BIN)/python -m pytest --quiet tests/project

type: $(VENV)/dev.stamp ## mypy --strict, of the product and of the tests
	@$(BIN)/mypy
	@$(BIN)/mypy --explicit-package-bases tests

format: $(VENV)/dev.stamp ## Put Python and C++ into shape
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@git ls-files 'csrc/*.cpp' 'csrc/*.hpp' 'csrc/*.h' | xargs --no-run-if-empty $(BIN)/clang-format -i

$(VENV)/release.stamp: $(VENV)/dev.stamp
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"], sep="\n")' > "$(VENV)/release.txt"
	@$(PIP) install --requirement "$(VENV)/release.txt"
	@touch $@

.PHONY: wheels
wheels: $(VENV)/release.stamp ## Build, check and try what a release uploads, in dist/ (ARGS="--pythons 3.11 --no-trial")
	@$(BIN)/python -m release.wheels $(ARGS)

.PHONY: bench size clean
bench: $(VENV)/dev.stamp ## Measure engine and system; LLAMA_PYTHON=... adds llama.cpp beside it
	@$(BIN)/python -m benchmarks.run $(ARGS)

size: $(VENV)/dev.stamp ## Lines per package and size of the wheel
	@$(BIN)/python -m release.size $(ARGS)

clean: ## Remove all that these targets made
	rm -rf .venv .venv-clients .cache .state .ktqueue build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
