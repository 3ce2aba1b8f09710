# Each target installs what it needs into .venv first; a stamp per extra keeps the second call fast.
#
#   make test PYTHON=python3.12     build .venv with another interpreter
#   make test PY=path/to/python     use that interpreter as it stands, install nothing
#   make test ARGS="-k graph -x"    pass arguments on to the tool

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
VENV := .venv

ifeq ($(origin PY),command line)
need =
else
override PY := $(VENV)/bin/python
need = $(VENV)/.stamp-$(1)
endif

PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help demo test test-quick pyro-tests fuzz test-all lint format types docs tutorials notebooks bench bench-full dist clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo        train a discrete VAE with three estimators, write demo_output/"
	@echo "make test        the tests but the slow ones"
	@echo "make test-quick  one case of each test that takes no time, after every edit"
	@echo "make pyro-tests SRC=path/to/pyro  Pyro's own tests of ELBOs, with ours in place of TraceGraph_ELBO"
	@echo "make fuzz        thousands of random programs; ARGS=\"--programs 5000 --config default\", --config all, --show SEED"
	@echo "make test-all    every test, the doctests of docstrings and docs, and the tutorials"
	@echo "make lint        ruff: rules and format, nothing is changed"
	@echo "make format      ruff: mend what it can"
	@echo "make types       mypy"
	@echo "make docs        HTML pages in docs/_build/html, warnings are errors"
	@echo "make tutorials   run the notebooks, short, and keep nothing; make notebooks runs them in full and keeps outputs"
	@echo "make bench       the short benchmarks; bench-full for all"
	@echo "make dist        wheel and sdist in dist/, and the wheel tested in a clean environment by the tests of the sdist"
	@echo "make clean       remove what these targets write, but not $(VENV)"

demo: $(call need,demo)
	$(PY) demo/digits.py $(ARGS)

test: $(call need,test)
	$(PYTEST) -m "not slow" $(ARGS)

test-quick: $(call need,test)
	$(PYTEST) --quick -q $(ARGS)

test-all: $(call need,test) $(call need,tutorials)
	$(PYTEST) --doctest-modules --doctest-glob="*.md" --ignore-glob="docs/*.py" --ignore=docs/tutorials \
	  tests pyro_bpq docs $(ARGS)
	$(TUTORIALS) --smoke

# Pyro is the installed one; only the tests come from the checkout.
PYRO_TESTS = gradient inference valid_models enum autoguide

pyro-tests: $(call need,test)
	@test -f "$(SRC)/tests/infer/test_gradient.py" \
	  || { echo "say where a checkout of Pyro lies: make pyro-tests SRC=path/to/pyro" >&2; exit 1; }
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests/pyro_tests$${PYTHONPATH:+:$$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTEST) -p swapped_elbo -p no:cacheprovider -c "$(SRC)/setup.cfg" --rootdir "$(SRC)" -q -rfEX \
	  $(PYRO_TESTS:%="$(SRC)/tests/infer/test_%.py") $(ARGS)

fuzz: $(call need,test)
	PYTHONPATH="$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 $(PY) -m fuzz --workers $(WORKERS) $(ARGS)

lint: $(call need,dev)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(call need,dev)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(call need,dev)
	$(PY) -m mypy $(ARGS)

docs: $(call need,docs)
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

# Kernels find the package by its path, whether it is installed or not.
TUTORIALS = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 $(PY) tutorials/build.py

tutorials: $(call need,tutorials)
	$(TUTORIALS) --smoke $(ARGS)

notebooks: $(call need,tutorials)
	$(TUTORIALS) $(ARGS)

bench: $(call need,bench)
	$(PY) benchmarks/run.py $(ARGS)

bench-full: $(call need,bench)
	$(PY) benchmarks/run.py --full $(ARGS)

dist: $(call need,dist)
	rm -rf build dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*
	PYTHON="$(PY)" WORKERS=$(WORKERS) bash .ci/dist $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf docs/_build docs/generated docs/tutorials docs/benchmarks.md docs/gallery.md docs/benchmark_plots demo_output
	find pyro_bpq tests demo benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "pyro_bpq needs Python 3.10 or newer; say which: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) lacks the venv module (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[$*]'
	@touch $@
