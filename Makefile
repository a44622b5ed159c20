# Every target makes the virtual environment that it needs, once; the second time it starts at once.
#
#   make demo      the main job, on real input          make docs   the pages: runs their code and builds them
#   make test      what CI runs                         make lint   format, lint, types, layers
#   make test-all  the slow tests too                   make bench  timings, side by side
#   make coverage  lines and branches that `make test` runs; ARGS='-m "slow or not slow"' for test-all
#   make bench-compare BASE=old/wrappers.json     what changed (old: in all), fails on a regression
#   make bench-gpu                                where CUDA is; bench-gpu-predicted TORCH=2.15.0 predicts without
#   make bench-gpu-rehearsal                      its stages on the CPU; bench-gpu-bring downloads wheels for a device
#   make test-gpu-kernels                         kernels for GPUs, interpreted and compiled without one
#   make dist                                     an sdist and a wheel; test-dist tries them in fresh environments
#   make train-distributed                        trains on two processes, and goes on with one
#   make readme    refresh README and docs from what the code and the demo print
#
# TORCH=2.15.0 and PYTHON=python3.13 run any of them on another release, in an environment of its own. TORCH=nightly
# takes the newest torch that pip finds: PIP_PRE=1 and PIP_EXTRA_INDEX_URL tell pip where.

PYTHON ?= python3
TORCH ?=
ARGS ?=
WORKERS ?= 2

# `.venv` has the Python of `python3` and the torch of constraints.txt; another Python or torch is in the name.
RELEASE := -c 'import sys; print(*sys.version_info[:2], sep=".")'
ifneq ($(PYTHON),python3)
RELEASE_OF_PYTHON := $(shell $(PYTHON) $(RELEASE))
$(if $(RELEASE_OF_PYTHON),,$(error expected an interpreter: PYTHON=python3.13, got PYTHON=$(PYTHON)))
OTHER_PYTHON := $(filter-out $(shell python3 $(RELEASE)),$(RELEASE_OF_PYTHON))
endif
OTHER_TORCH := $(filter-out $(shell sed -n 's/^torch==//p' constraints.txt),$(TORCH))
VENV := .venv$(if $(OTHER_PYTHON),-py$(OTHER_PYTHON))$(if $(OTHER_TORCH),-torch-$(OTHER_TORCH))
BIN := $(VENV)/bin
PINS := $(VENV)/constraints.txt
PROSE := *.md docs/*.md bench/*.md subclasses desugar
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pytest keeps the tests that it has compiled, which takes each worker 8 seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo train-distributed test test-all coverage test-gpu-kernels bench bench-compare bench-gpu bench-gpu-rehearsal bench-gpu-bring bench-gpu-predicted docs lint format readme dist test-dist clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,15p

# ---------------------------------------------------------------------------------------------------------
# environments: one stamp file for each set of extras

$(PINS): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(OTHER_TORCH),sed 's/^torch==.*/torch$(addprefix ==,$(filter-out nightly,$(OTHER_TORCH)))/' constraints.txt > $@,cp constraints.txt $@)
	$(BIN)/python -m pip install --quiet --constraint $@ setuptools

$(VENV)/.has-%: $(PINS) pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --no-build-isolation --editable '.[$*]'
	$(if $(filter dev bench,$*),$(BIN)/python -m pip install --quiet --no-deps --constraint $(PINS) torchao || echo "no torchao: what compares with it is skipped")
	$(if $(filter dev,$*),$(BIN)/python -m pip install --quiet --no-deps --constraint $(PINS) tlparse || echo "no tlparse: the tests that read its pages are skipped")
	@touch $@

# ---------------------------------------------------------------------------------------------------------
# what one does with it

demo: $(VENV)/.has-demo
	OMP_NUM_THREADS=2 $(BIN)/python examples/train_ragged_lm.py $(ARGS)

train-distributed: $(VENV)/.has-demo
	rm -rf demo-out/checkpoint
	$(TORCHRUN) --nproc-per-node 2 examples/train_distributed.py --steps 30 --save demo-out/checkpoint $(ARGS)
	$(TORCHRUN) --nproc-per-node 1 examples/train_distributed.py --steps 40 --load demo-out/checkpoint $(ARGS)

test: $(VENV)/.has-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(VENV)/.has-dev $(VENV)/.has-models
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" $(ARGS)

coverage: $(VENV)/.has-dev
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered --sort=miss

test-gpu-kernels: $(VENV)/.has-dev $(VENV)/.has-gpu-tests
	$(BIN)/python -m pytest -m triton --no-skips $(ARGS)

bench: $(VENV)/.has-bench
	$(BIN)/python -m bench.compare $(ARGS)

bench-compare: $(VENV)/.has-bench
	@test -n "$(BASE)" || { echo "expected a saved run: make bench-compare BASE=old/wrappers.json [NEW=...], or a folder of them"; exit 2; }
	$(BIN)/python -m bench.regressions $(BASE) $(NEW)

# The device has no network, and its own torch: no environment is made. The wheels of `bench-gpu-bring` are used.
bench-gpu:
	@PYTHONPATH=. $(PYTHON) -m bench.gpu $(ARGS)

bench-gpu-rehearsal: $(VENV)/.has-bench
	$(BIN)/python -m bench.gpu --rehearse --budget 900 $(ARGS)

bench-gpu-bring:
	PYTHONPATH=. $(PYTHON) -m bench.gpu.wheels $(ARGS)

bench-gpu-predicted: $(VENV)/.has-bench
	$(BIN)/python -m bench.gpu_predicted $(ARGS)

docs: $(VENV)/.has-docs $(VENV)/.has-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow tests/test_docs.py tests/test_notebook.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: $(VENV)/.has-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(PROSE)
	$(BIN)/python -m docs.prose
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.has-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m docs.wrap

readme: $(VENV)/.has-dev
	OMP_NUM_THREADS=2 $(BIN)/python -m docs.refresh

dist: $(VENV)/.has-dist
	rm -rf dist *.egg-info
	$(BIN)/python -m build --no-isolation --outdir dist

test-dist: dist $(VENV)/.has-dev
	DIST=dist $(BIN)/python -m pytest -m "slow or not slow" --no-skips tests/test_packaging.py $(ARGS)

clean:
	rm -rf .venv* docs/_build build dist *.egg-info
