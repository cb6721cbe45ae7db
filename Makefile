# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIDE_BY_SIDE := -n 2 --dist loadgroup

.PHONY: demo test lint types tests test-datasets test-gpu test-network test-scale test-browser test-tracking test-matrix test-slow
.PHONY: figures screenshots results docs notebooks dist clean

demo: $(VENV)/.installed
	$(BIN)/fedrema run

test: lint types tests

lint: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.developing
	$(BIN)/mypy

tests: $(VENV)/.developing
	$(BIN)/pytest $(SIDE_BY_SIDE) --cov --cov-fail-under=90

# Needs MNIST, Fashion-MNIST and CIFAR-10 in the folder that FEDREMA_DATA names.
test-datasets: $(VENV)/.developing
	$(BIN)/pytest $(SIDE_BY_SIDE) -m datasets

# Needs a CUDA device.
test-gpu: $(VENV)/.developing
	$(BIN)/pytest -m gpu
	$(BIN)/python benchmarks/check_kernels.py

# Real servers and nodes on loopback, with TLS and keys, a proxy and a load balancer; about half an hour.
test-network: $(VENV)/.proxying
	$(BIN)/pytest -n 2 -m network
	$(BIN)/python benchmarks/check_network.py

# Every file of a run × every kind of damage × every command, and a crash at every point of a run.
test-matrix: $(VENV)/.developing
	$(BIN)/pytest $(SIDE_BY_SIDE) -m matrix

# Ray clusters, the bench with every method, attacks on three nodes.
test-slow: $(VENV)/.developing
	$(BIN)/pytest $(SIDE_BY_SIDE) -m slow

# Peak memory with many clients, ten minutes.
test-scale: $(VENV)/.developing
	$(BIN)/python benchmarks/check_scale.py

# The page in a real browser: the system's Chromium, else one that playwright or the system's packages bring.
test-browser: $(VENV)/.browsing
	$(BIN)/pytest -m browser

# --track into real local stores of MLflow and W&B; TensorBoard's is among the ordinary tests.
test-tracking: $(VENV)/.developing
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mlflow,wandb]'
	$(BIN)/pytest tests/reporting/trackers

# The page's pictures in README and docs.
screenshots: $(VENV)/.browsing
	$(BIN)/python tools/make_screenshots.py

# Every picture and table in README and docs.
figures: $(VENV)/.installed
	$(BIN)/python tools/make_figures.py
	$(BIN)/python tools/make_methods.py
	$(BIN)/python tools/make_tasks.py
	$(BIN)/python tools/make_security.py
	$(BIN)/python tools/make_badges.py
	$(BIN)/python tools/make_explainer.py

# The documentation site, in build/docs; a dead link or an undocumented public name is an error.
docs: $(VENV)/.documenting
	rm -rf build/docs
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --conf-dir tools/site docs build/docs
	@echo "Built build/docs/index.html"

# The tables and figures that show finished runs: reproduction, FedPrior, leaderboard, advice; trains nothing.
results: $(VENV)/.installed
	$(BIN)/python tools/make_reproduction.py
	$(BIN)/python tools/make_beyond.py
	$(BIN)/python tools/make_leaderboard.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.documenting: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# Tests with a proxy that is not there are skipped.
$(VENV)/.proxying: $(VENV)/.developing
	{ command -v squid && command -v haproxy; } \
		|| apt-get install --yes squid haproxy || { apt-get update && apt-get install --yes squid haproxy; } || true
	touch $@

$(VENV)/.browsing: $(VENV)/.developing
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| $(BIN)/playwright install --with-deps chromium || { apt-get update && apt-get install --yes chromium; }
	touch $@

# The notebooks with their outputs, each executed in a new kernel and an empty folder.
notebooks: $(VENV)/.developing
	$(BIN)/python tools/make_notebooks.py

# Wheel and sdist in dist/, tested in a clean environment: files, metadata, commands, README and tutorial on an unseen table.
dist: $(VENV)/.developing
	$(BIN)/python tools/check_dist.py

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache build dist
