PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet --no-deps torchvision==0.28.0 timm==1.0.30
	touch $(STAMP)

demo: install
	$(BIN)/neuron-merging demo

test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

bench: install
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
