# Two commands matter: `make demo` and `make test`. Each makes its own environment, once.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
BIN = $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Each process takes a core and up to 3 GiB.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist worksteal
METADATA = setup.cfg setup.py pyproject.toml

.PHONY: demo test test-all quick test-oldest test-with fuzz zoo lint format docs benchmark clean

demo: $(VENV)/.examples
	$(BIN)/python examples/cg_solve.py

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL)

# A few tests of every module, for while one edits: a minute or two.
quick: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) --quick

test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest $(PARALLEL)

# All tests, with those that take long, and all cases of each.
test-all: $(VENV)/.test
	HVP_FUZZ=1 $(BIN)/python -m pytest $(PARALLEL)

# The tests of random examples, with a hundred times as many, other ones each time: 600 random
# programs among them. An hour or two.
fuzz: $(VENV)/.test
	HVP_FUZZ=100 $(BIN)/python -m pytest $(PARALLEL) -m "hypothesis or random"

# Real architectures, each in a process of its own: three quarters of an hour.
zoo: $(VENV)/.test
	$(BIN)/python -m tests.zoo

# Any other pair: make test-with PYTHON=python3.13 TENSORFLOW=2.21
test-with:
	$(MAKE) test VENV=.venv-$(notdir $(PYTHON))-$(TENSORFLOW) PIN="tensorflow==$(TENSORFLOW).*"

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	rm -rf docs/gallery docs/_build
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "Read docs/_build/html/index.html"

# More than an hour, and nothing else should run meanwhile. Each part says how long it took, and can be
# run by itself: make benchmark-products. The extra `peers` (JAX, PyTorch, ...) is installed by
# hand, or left out: pip install -e '.[peers]'
BENCHMARKS = products first_products inputs fits sparse matrices blocks spectra recycling kronecker uncertainty \
	influence_scores attribution training memory scale precision streaming solving optimizers devices
benchmark: $(addprefix benchmark-,$(BENCHMARKS))

benchmark-products benchmark-memory benchmark-scale benchmark-devices: OPTIONS = --figure
benchmark-spectra: OPTIONS = --monitor
benchmark-blocks: SCRIPT = matrices
benchmark-blocks: OPTIONS = --blocks
benchmark-solving benchmark-optimizers: export OPENBLAS_NUM_THREADS = 1
benchmark-%: SCRIPT = $*
benchmark-%: $(VENV)/.examples
	@begin=$$(date +%s); $(BIN)/python docs/benchmarks/$(SCRIPT).py $(OPTIONS) && \
		echo "$@ took $$(( ($$(date +%s) - begin + 59) / 60 )) minutes"

clean:
	rm -rf .venv .venv-* docs/_build docs/gallery build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(OLDEST)/bin/python:
	$(PYTHON) -m venv $(OLDEST)

$(VENV)/.examples: $(METADATA) | $(VENV)/bin/python
	@echo "Installing hvp and TensorFlow into $(VENV); this takes a few minutes, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples]' $(PIN)
	touch $@

$(VENV)/.test: $(METADATA) $(VENV)/.examples
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' $(PIN)
	touch $@

$(VENV)/.lint: $(METADATA) $(VENV)/.examples
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lint]'
	touch $@

$(VENV)/.docs: $(METADATA) $(VENV)/.examples
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples,docs]'
	touch $@

$(OLDEST)/.test: $(METADATA) tests/oldest.txt | $(OLDEST)/bin/python
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c tests/oldest.txt -e '.[test]'
	touch $@
