# Everything a person runs here. Each target does its own set-up: Python >= 3.11 and make are all it takes.
#   make train                                     train the example and draw its pictures
#   make train ARGS="--stage 1 --devices 2"        arguments go through to the example,
#   make test ARGS="-k layout -x"                  or to pytest, which runs a process a core (-n 0 for one)
#   make test PYTHON=python3.13 VENV=.venv-3.13    another Python, beside the first
#   make wheel PYTHONS="python3.12 python3.13"     the wheel in several Pythons

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
PYTHONS ?= $(PYTHON)

BIN := $(VENV)/bin

# What jax 0.12 has already and will use by default, and JAX's checks of those who use it.
NEXT := JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 JAX_ENABLE_CHECKS=1 JAX_NUMPY_DTYPE_PROMOTION=strict
# The engine: constructs, derivative rules, loops and remat, and the exact numbers of gathers, bytes and FLOPs.
ENGINE := $(patsubst %,tests/gather/test_%.py,alike constructs derivatives gather_counts merged narrow \
	on_shards paired random_programs residuals rules tiled unusual_losses yardstick)
# Not together with those: with jax_remat3 and a policy, JAX itself leaves a tracer behind.
LEAKS := $(patsubst %,tests/gather/test_%.py,constructs derivatives)

.DEFAULT_GOAL := help
.PHONY: help train test next lint format docs dist wheel clean
# Keeps the stamps: make would take them for intermediate files.
.SECONDARY:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.has-examples ## train a byte-level GPT on the standard library's source (under 5 minutes on 2 cores)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/.has-dev ## run the tests that are not slow; ARGS="-m slow" for the others
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

next: $(VENV)/.has-dev ## run the engine's tests with JAX's next internals and its own checks (needs jax 0.12)
	$(NEXT) $(BIN)/python -c 'import jax; assert jax.config.jax_custom_jvp3'
	$(NEXT) $(BIN)/python -m pytest -n auto --dist worksteal $(ENGINE) $(ARGS)
	JAX_CHECK_TRACER_LEAKS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(LEAKS) $(ARGS)

lint: $(VENV)/.has-dev ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.has-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/.has-release ## build the wheel and the source distribution, and check what they say of themselves
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

wheel: dist ## install the wheel in fresh environments and use it; PYTHONS="python3.12 python3.13" for several
	@set -e; for python in $(PYTHONS); do \
		fresh=$$(mktemp -d); $$python --version; $$python -m venv $$fresh; \
		$$fresh/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl; \
		(cd $$fresh; bin/python -m pip check; bin/zerojax estimate 7.5e9 --devices 64; \
			bin/python -c 'import zerojax; print(len([getattr(zerojax, name) for name in zerojax.__all__]), "names")'); \
		rm -rf $$fresh; \
	done

docs: $(VENV)/.has-docs ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the virtual environment, the caches and the built documentation
	rm -rf $(VENV) .hypothesis .pytest_cache .ruff_cache site

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "zerojax needs Python 3.11 or newer: make PYTHON=python3.12, say"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# What tests/outside reads is the installed versions' own, so it is fetched by them.
$(VENV)/.has-outside: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[outside]'
	$(BIN)/python tests/outside/sources.py
	@touch $@

$(VENV)/.has-%: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
