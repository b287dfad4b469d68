# `make` alone lists the targets. Every target does its own set-up.
PYTHON ?= python3
BIN := .venv/bin
INTEROP := triton kserve infinity tritonclient openai2 openai3 envoy
# Tests of processes and sockets mostly wait: many more workers than two cores. Unit and property tests compute: one for each.
WORKERS ?= 6

# Each test of processes starts some: compiling Carpool anew for each would take half of their time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup redis curl promtool postgresql chromium demo check test prometheus eyes pictures lint format docs protos bench overload budget simulate-check gpu chaos fuzz interop clean pytest

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

# The stamp is newer than the requirement files once the environment matches them.
.venv/.ready: requirements/runtime.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Carpool needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv .venv; }
	@echo "installing into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

setup: .venv/.ready ## make .venv with .venv/bin/carpool in it

# A command and Debian's package that has it. Tests start servers of their own: the package's service stays off
# (policy-rc.d is how Debian is told so), and what the package only recommends stays away.
install = command -v $(1) >/dev/null || { echo "installing $(2) ..."; policy=/usr/sbin/policy-rc.d; \
	test -e $$policy || { trap "rm -f $$policy" EXIT; printf '\#!/bin/sh\nexit 101\n' >$$policy; chmod +x $$policy; }; \
	apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2); }

redis: ## install Debian's redis-server if there is none
	@$(call install,redis-server,redis-server)

# The docs' commands use it.
curl: ## install Debian's curl if there is none
	@$(call install,curl,curl)

promtool: ## install Debian's prometheus, which has promtool, if there is none
	@$(call install,promtool,prometheus)

# Debian's browser, and what drives it, which is no part of Carpool's own environment.
chromium: setup
	@$(call install,chromium,chromium fonts-dejavu-core)
	@test -d .eyes/playwright || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target .eyes playwright

demo: setup ## start a gateway and 8 simulated GPUs; shows where to look, and the first curl to try
	@$(BIN)/carpool demo

check: setup lint ## while you work: lint, types, unit and property tests
	@$(BIN)/python -m pytest -n auto tests/property tests/unit

# mypy has one core, the tests wait for processes: beside one another.
test: setup redis curl ## every check: ruff, mypy, import-linter, pytest
	@$(MAKE) --no-print-directory -j 2 lint pytest

# One process compiles the tests first: in a fresh checkout each worker would do it again, half a minute of a core each.
# What fails is broken: nothing is run again.
pytest: setup redis curl
	@$(BIN)/python -m pytest --collect-only -q >/dev/null || true
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --maxfail 12

postgresql: ## install Debian's postgresql if there is none
	@test -n "$$(ls /usr/lib/postgresql/*/bin/postgres 2>/dev/null)" || { $(call install,postgres,postgresql); }

prometheus: setup promtool ## the shipped alerts, by Prometheus's own tool
	@$(BIN)/python -m pytest -n auto tests/prometheus

eyes: setup redis promtool postgresql chromium .venv-eyes/.ready ## what people look at, with the real programs: Prometheus, PostgreSQL, Chromium, … (some minutes)
	@$(call install,prometheus-alertmanager,prometheus-alertmanager)
	@$(BIN)/python -m pytest tests/eyes -s --ignore tests/eyes/test_page.py
	@PYTHONPATH=.eyes $(BIN)/python -m pytest tests/eyes/test_page.py -s

pictures: setup chromium ## draw the pictures of docs/live-page.md and docs/observe.md
	@PYTHONPATH=.eyes:tests $(BIN)/python tests/eyes/pictures.py docs/pictures
	@PYTHONPATH=.eyes:tests $(BIN)/python tests/eyes/troubles.py docs/pictures

lint: setup ## ruff, mypy strict, import-linter
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: setup ## rewrite the code in the one format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: setup ## write the generated pages again
	@$(BIN)/python -m carpool.tools.docs

# What is compiled is not edited: the messages' descriptors, of which core/messages.py makes classes.
PROTOS := src/carpool/core/protos
protos: setup ## compile the .proto files again
	@$(BIN)/python -m grpc_tools.protoc -I $(PROTOS) --include_imports --descriptor_set_out=$(PROTOS)/descriptors.binpb $$(cd $(PROTOS) && find * -name '*.proto' | sort)

bench: setup redis ## measure beside the floor (several minutes)
	@$(BIN)/python bench/run.py

overload: setup ## load from half to ten times the capacity, by tier: the pictures of docs/overload.md (some minutes)
	@$(BIN)/python bench/overload.py

budget: setup redis .venv-interop/envoy/.ready ## where the time of a request goes, Envoy's hop included: the table of docs/observe.md (two minutes)
	@$(BIN)/python bench/budget.py

simulate-check: setup ## what carpool simulate says beside a real gateway: the table of docs/simulate.md (five minutes)
	@$(BIN)/python bench/simulate_check.py

# PyTorch is the one of $(PYTHON): it is no part of Carpool's own environment, whose packages are lent to it.
gpu: setup redis ## a real model on this machine's GPU behind Carpool: the figures of docs/gpu.md (needs PyTorch; some minutes)
	@export PYTHONPATH="$$PWD/src:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(PYTHON) bench/gpu/drive.py --out docs/gpu && $(PYTHON) bench/gpu/report.py docs/gpu

chaos: setup redis ## kill, cut, overload; prints lost / wrong / duplicates, last the share answered as promised (many minutes)
	@$(BIN)/python -m pytest tests/chaos -s

fuzz: setup redis ## 10,000 malformed messages and frames to the gRPC face and to streams (minutes)
	@CARPOOL_TEST_FUZZ=10000 $(BIN)/python -m pytest tests/integration/test_grpc_face.py tests/integration/test_streams.py -k TestFuzz

# Each server has an environment of its own: what they need excludes one another.
.venv-interop/%/.ready: requirements/interop-%.txt
	@$(PYTHON) -m venv .venv-interop/$*
	@echo "installing into .venv-interop/$* ..."
	@.venv-interop/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv-eyes/.ready: requirements/eyes.txt
	@$(PYTHON) -m venv .venv-eyes
	@echo "installing into .venv-eyes ..."
	@.venv-eyes/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv-interop/buf/.ready:
	@$(call install,npm,npm)
	@echo "installing into .venv-interop/buf ..."
	@npm install --silent --no-audit --no-fund --prefix .venv-interop/buf @bufbuild/buf@1.74.0
	@touch $@

interop: setup redis $(INTEROP:%=.venv-interop/%/.ready) .venv-interop/buf/.ready ## real servers behind Carpool, real clients in front: Triton, KServe, infinity, tritonclient, buf, OpenAI, Envoy (2 GB to install)
	@$(BIN)/python -m pytest tests/interop -s

clean: ## remove what the targets made
	@rm -rf .venv .venv-interop .venv-eyes .eyes build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
