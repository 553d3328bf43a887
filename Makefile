# Every command of the project. `make` alone lists them.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
# Only to make the environment; empty means the first Python 3.11 on PATH.
PYTHON ?=
# More options for `make demo` and `make demo-slurm`, such as ARGS="total_steps=20 seed=1".
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-slurm trace test test-fast test-parts test-patient lint format type golden devcluster-up devcluster-down lock clean

help:  ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv:  ## Install what is missing into .venv (nothing, in no time, when it is up to date)
	@$(PY) -m launch.setup --check --venv "$(VENV)" 2>/dev/null || launch/setup/venv.sh "$(VENV)" "$(PYTHON)"

demo: venv  ## Train a small policy on this machine, about two minutes: runs/demo
	$(PY) -m launch +experiment=demo launch.run_dir=runs/demo launch.replace_finished=true $(ARGS)

demo-slurm: venv  ## The same run as a heterogeneous job on a private Slurm: runs/demo-slurm
	@set -e; export_line=$$($(PY) -m launch.devcluster up); eval "$$export_line"; set -x; \
	$(PY) -m launch +experiment=demo cluster=devcluster rollout_gpus=2 \
	    launch.run_dir=runs/demo-slurm launch.replace_finished=true $(ARGS); set +x; \
	echo "the private Slurm is still up: make devcluster-down"

trace: venv  ## Write a Chrome trace of a run: make trace RUN=runs/demo
	@if [ -z "$(RUN)" ]; then echo "which run? make trace RUN=runs/demo" >&2; exit 2; fi
	$(PY) -m traces export "$(RUN)"

test: lint  ## Everything: lint, and all tests (some start a real vLLM and a private Slurm)
	@echo "unit and contract tests, and beside them those that mostly wait for Slurm: both show what they did when they are through"
	$(MAKE) --no-print-directory -j2 --output-sync=target test-parts test-patient
	$(PY) -m pytest -m "not patient" tests/integration

test-fast: venv  ## The unit tests, properties with fewer examples: no Slurm, no vLLM, one process each
	$(PY) -m pytest -n 2 --dist worksteal --hypothesis-profile=fast tests/unit

test-parts: venv  ## Unit and contract tests: no Slurm, no vLLM
	$(PY) -m pytest -n 2 --dist loadfile tests/unit tests/contract

test-patient: venv  ## Tests that wait for time limits and grace times of a private Slurm
	$(PY) -m pytest -m patient tests/integration

lint: venv  ## ruff (rules and format) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: venv  ## Let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

type: venv  ## mypy alone
	$(PY) -m mypy

golden: venv  ## Write the stored texts in tests/golden anew; look at the difference before committing it
	LIBRA_UPDATE_GOLDEN=1 $(PY) -m pytest -q tests/unit -k stored

devcluster-up: venv  ## Start a private Slurm of four nodes on this machine
	@$(PY) -m launch.devcluster up

devcluster-down: venv  ## Stop it and delete its folder
	@$(PY) -m launch.devcluster down

lock: venv  ## For maintainers: resolve the newest allowed versions into requirements/cpu.lock
	$(PY) -m launch.setup.lock

clean:  ## Delete caches and build outputs (not .venv, not runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis libra_slurm.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './runs/*' -prune -exec rm -rf {} +
