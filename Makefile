# Every target sets up what it needs; only Python >= 3.11 with venv and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test slow lint coverage clean

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

coverage: $(VENV)/.ready
	$(BIN)/pytest -q --cov --cov-report=
	$(BIN)/coverage report --include='src/hybridkv/specs/*,src/hybridkv/plan/*,src/hybridkv/keys.py,src/hybridkv/stores/*' --fail-under=95 --skip-covered

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hybridkv needs Python >= 3.11; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ echo "python3's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
