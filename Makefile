# `make train` teaches a controller to grow networks; `make test` runs every check. Both first set
# up what they need from the pins, in a virtual environment: `make clean` removes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-slow test-portable setup check bench docs clean

train: $(VENV)/.train
	$(BIN)/esper train $(FLAGS)

test: setup check

setup: $(VENV)/.dev

# what `make train` needs is a part of what `make test` needs
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.train: EXTRAS = train
$(VENV)/.docs: EXTRAS = docs

# pip reads the pins from constraints.txt and prints errors only; a line shows that it is alive.
# --no-compile: Python compiles what is imported. The stamp makes a second run start at once
$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Esper needs Python 3.11 or newer; run make PYTHON=python3.11"'
	@echo "Setting up $(VENV) with torch and what else '.[$(EXTRAS)]' needs: a minute or two, once."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(EXTRAS)]' & pid=$$!; \
	trap "kill $$pid; exit 130" INT TERM; seconds=0; \
	while [ -t 1 ] && kill -0 $$pid 2>/dev/null; do \
		printf '\r  installing: %3d s ' $$seconds; sleep 1; seconds=$$((seconds + 1)); \
	done; \
	[ ! -t 1 ] || echo; wait $$pid
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# learning runs, large cases and the site: minutes
test-slow: setup
	$(BIN)/pytest -m slow

# the suite as on older or other CPUs: SSE4.1 alone, AVX2, and one thread
test-portable: setup
	ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(BIN)/pytest
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest
	OMP_NUM_THREADS=1 $(BIN)/pytest

bench: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# the site, in site/
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache
