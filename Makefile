PYTHON ?= python3
BIN := .venv/bin

# Each stamp is a file: what it stands for has been installed, and on top of the one before it.
DEMO := .venv/installed-demo
STAMP := .venv/installed
DOCS := .venv/installed-docs
ZOO := .venv/zoo
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: install demo test test-long lint bench census zoo zoo-sample docs drawing wheel clean

install: $(STAMP)

# Only what the demo needs: torch, the package, and scikit-learn for its images.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $(DEMO)

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps torchvision==0.28.0 timm==1.0.30
	$(BIN)/python tools/torchvision_operators.py
	touch $(STAMP)

demo: $(DEMO)
	$(BIN)/neuron-merging demo

test: install
	$(PYTEST)

# What takes long: other processes, whole disks, published networks, the examples of the pages.
test-long: install
	$(PYTEST) -m long

lint: install
	$(BIN)/ruff check src tests benchmarks examples docs tools
	$(BIN)/ruff format --check src tests benchmarks examples docs tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

bench: install
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/stages.py

# How many files and functions one compress() runs through.
census: install
	$(BIN)/python benchmarks/census.py

# The packages are put beside the environment, without what they depend on: none of them may bring another torch.
$(ZOO): $(STAMP) benchmarks/zoo_networks.py
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ZOO) \
	  $$($(BIN)/python -c "import sys; sys.path.insert(0, 'benchmarks'); import zoo_networks as z; print(z.INSTALL)")
	touch $(ZOO)

zoo: $(ZOO)
	PYTHONPATH=$(ZOO) $(BIN)/python benchmarks/zoo.py --kept zoo.json --csv zoo.csv --page docs/zoo.md

zoo-sample: $(ZOO)
	PYTHONPATH=$(ZOO) $(BIN)/python benchmarks/zoo.py --sample

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

drawing: install
	$(BIN)/python docs/draw_packages.py

# The wheel must bring all that it needs: it is installed where nothing else is, and the demo runs from there.
wheel: install
	rm -rf dist
	$(BIN)/python -m build
	set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; unset PYTHONPATH; \
	$(PYTHON) -m venv "$$place/env"; \
	"$$place/env/bin/python" -m pip install --quiet --constraint constraints.txt torch; \
	"$$place/env/bin/python" -m pip install --quiet --constraint constraints.txt "$$(ls "$$PWD"/dist/*.whl)[demo]"; \
	cd "$$place" && env/bin/neuron-merging demo
	@echo "pip install '$$(ls "$$PWD"/dist/*.whl)'    # with extras: pip install '$$(ls "$$PWD"/dist/*.whl)[onnx,report]'"

clean:
	rm -rf site dist .venv .pytest_cache .mypy_cache .ruff_cache
