# Two targets do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test test-all suite types contracts docs package browser format clean

# One more than cores: tests wait for the processes that they start. By module: servers that a module shares are
# started once. In the order of their names: those with few tests, which start servers, do not come last.
WORKERS := -n $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadscope --no-loadscope-reorder

# Leaves what each test worker would compile for itself, or wait for. Without it the tests only take longer.
COMPILE := $(BIN)/python scripts/compile_tests.py > $(VENV)/compile_tests.log 2>&1 || \
	echo "scripts/compile_tests.py failed, see $(VENV)/compile_tests.log: the tests will take longer"

demo: $(STAMP)
	$(BIN)/loraplex demo

test: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j 3 types suite

suite: browser contracts docs
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

# Beside everything else: it has one core busy for a minute.
types: $(DEV_STAMP)
	$(BIN)/mypy

contracts: $(DEV_STAMP)
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.make_tables --check
	$(BIN)/python -m benchmarks.draw_http --check
	$(COMPILE)

# Half a minute where there is none yet.
browser:
	@scripts/install_test_packages.sh

# Also draws more examples for property tests (tests/examples.py). With 100 MB of schemas that only one test
# there reads.
test-all: test
	$(BIN)/python -m pip install --quiet -c constraints.txt kubernetes-validate
	$(BIN)/python -m pytest $(WORKERS) -m "slow or hypothesis" --hypothesis-profile thorough

# The docs as a site, in site/; links that lead nowhere are errors.
docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict

# What is published, in dist/: sdist and wheel, of the version of the latest tag.
package: $(DEV_STAMP)
	rm -rf dist
	$(BIN)/python -m build $(BUILD_OPTIONS)
	$(BIN)/python -m twine check --strict dist/*

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pip that comes with Python 3.11 takes two and a half times as long to choose releases. It does without a
# newer one, where there is none.
NEWER_PIP := $(BIN)/python -m pip install --quiet 'pip>=25'

$(VENV)/bin/python:
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(NEWER_PIP) || true

# The constraints file pins torch to the release that the tests run with; GPU figures name their own.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e .
	touch $@

# pip compiles all modules on one core, a third of the install. Here all cores do, and leave out what nothing
# in the tests imports, or what is compiled already (mypy); a module that cannot be compiled (a template, say) is
# no error.
NEVER_IMPORTED := /(tests?|test_utils|fontTools|graphql|mypyc?|networkx|pip|playwright/async_api|setuptools|werkzeug|$\
	huggingface_hub/(cli|inference)|hypothesis/extra|$\
	moto/(?!cloudwatch|core|events|iam|moto_|s3|sts|utilities)[^/]+|numba/cuda|numpy/(distutils|f2py)|pydantic/v1|pygments/lexers|$\
	ray/(air|autoscaler|dag|dashboard|data|llm|rllib|serve|train|tune)|schemathesis/cli|$\
	sympy/(combinatorics|parsing|physics|stats|vector)|torch/(_inductor|_vendor|ao|onnx|testing)|torchgen/(api|packaged)|$\
	transformers/(cli|exporters|pipelines|models/(?!auto|bloom|llama|mistral|qwen[23]/)[^/]+)|triton/experimental)/

$(DEV_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(NEVER_IMPORTED)' $(VENV)/lib || true
	touch $@ $(STAMP)

clean:
	rm -rf $(VENV) build dist site *.egg-info
