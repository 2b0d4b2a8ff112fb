# `make quickstart` shows the thing working; `make test` runs everything CI checks. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Bytecode is written where a module is first imported, not for all of torch at once; so it has to be written.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PY) scripts/install.py -c constraints.txt
# `uv`, or `pip` for whom it does better.
export INSTALLER ?= uv
# An option of pip and uv such as `--index-url …`, to take torch from an index of CPU builds.
TORCH_INDEX ?=

QUICKSTART_SPIKE ?= 013_quickstart
QUICKSTART_PARAMETERS ?= -p started=$(STARTED)
QUICKSTART_OUT := out/quickstart
STARTED := $(shell date +%s)
# What waits for clocks, processes and the network runs beside what computes: two cores are busy to the end.
STAGES := install+system lint+sync+clean-check smoke+book+environments lone-share+pytest
WORKERS ?= 3
# Many tests wait for a server, a process or a clock: with two at a time the cores idle half of the time.
PYTEST_WORKERS ?= 3

VENV_STAMP := $(VENV)/.stamp-venv
TORCH_STAMP := $(VENV)/.stamp-torch
CORE_STAMP := $(VENV)/.stamp-core
DEV_STAMP := $(VENV)/.stamp-dev

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

##@ The two commands
# No recipe names $(MAKE): `make -n` would run that line.
.PHONY: quickstart
quickstart: core model ## install the core, teach the bundled model a hidden rule, show the results
	@$(PY) spikes/run.py $(QUICKSTART_SPIKE) --out $(QUICKSTART_OUT) $(QUICKSTART_PARAMETERS)
	@$(PY) -m nbconvert --log-level WARN --to html $(QUICKSTART_OUT)/spike.ipynb
	@$(PY) scripts/quickstart_summary.py $(QUICKSTART_OUT)
	@echo "open:    $(CURDIR)/$(QUICKSTART_OUT)/spike.html"
	@echo "figures: $(QUICKSTART_OUT)/metrics.json"
	@echo "took $$(( $$(date +%s) - $(STARTED) )) s"

.PHONY: test
test: $(VENV_STAMP) ## everything CI checks, with the time of each stage
	@WORKERS=2 $(PY) scripts/stages.py --required install $(STAGES)

##@ Stages of `make test`
.PHONY: core
core: $(CORE_STAMP)

.PHONY: install
install: $(DEV_STAMP) ## install everything development needs

.PHONY: system
system: browser slurm ## what apt has, one after the other, since they wait for the same lock

.PHONY: browser
browser: ## see that headless Chromium is there; as root on Debian, install it
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then chromium --version; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver; \
	else \
		echo "error: the book is tested in headless Chromium, which is not here." >&2; \
		echo "       On Debian: sudo apt-get install chromium chromium-driver" >&2; exit 1; \
	fi

.PHONY: slurm
slurm: ## see that Slurm and munge are there; as root on Debian, install them and leave no service running
	@PATH="$$PATH:/usr/sbin:/sbin"; \
	skipped="so what needs a cluster is skipped. On Debian: sudo apt-get install slurm-wlm munge"; \
	if command -v sbatch >/dev/null && command -v slurmctld >/dev/null && command -v munged >/dev/null; then \
		slurmctld -V; \
		[ "$$(id -u)" = 0 ] || echo "A cluster of one's own needs root: what needs one is skipped."; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
		bounded="-q -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20"; \
		if apt-get $$bounded update && apt-get $$bounded install -y --no-install-recommends slurm-wlm munge; then \
			if [ -d /run/systemd/system ]; then systemctl disable -q --now munge slurmd slurmctld; fi; \
		else \
			echo "Slurm could not be installed, $$skipped"; \
		fi; \
	else \
		echo "Slurm is not here, $$skipped"; \
	fi

.PHONY: sync
sync: $(DEV_STAMP) ## the package is exactly what the notebooks export
	@$(PY) scripts/check_sync.py

.PHONY: clean-check
clean-check: $(DEV_STAMP) ## notebooks are clean, without errors or machine paths; runs keep the contract
	@$(PY) scripts/check_notebooks.py
	@$(PY) scripts/frame.py --check

.PHONY: lint
lint: $(DEV_STAMP) ## ruff, and the figures of the house are those that the book shows
	@$(PY) -m ruff check .
	@$(PY) scripts/measure_house.py --check

.PHONY: nbtest
nbtest: $(DEV_STAMP) ## run every chapter
	@compgen -G 'nbs/*/*.ipynb' >/dev/null || { echo "error: there are no chapters in nbs/" >&2; exit 1; }
	@OMP_NUM_THREADS=1 MPLBACKEND=agg $(VENV)/bin/nbdev_test --n_workers 2 --do_print --timing

.PHONY: lone
lone: $(DEV_STAMP) model ## run every chapter as Colab does: a lone notebook, only its launch cell installs
	@OMP_NUM_THREADS=1 $(PY) scripts/run_lone.py --workers $(WORKERS) --fork

.PHONY: lone-share
lone-share: $(DEV_STAMP) model ## the same for pages whose code has changed since `lone`, spike 006, and a draw of the others
	@OMP_NUM_THREADS=1 $(PY) scripts/run_lone.py --workers $(WORKERS) --fork --share 8

.PHONY: book
book: $(DEV_STAMP) ## build the book with warnings as errors
	@$(VENV)/bin/jupyter-book build --all -W -n --keep-going .

.PHONY: pytest
pytest: $(DEV_STAMP) model ## tests; in parity a skip is a failure, and nothing gets a second chance
	@OMP_NUM_THREADS=1 $(PY) scripts/run_tests.py -n $(PYTEST_WORKERS) --dist loadfile --durations=40

.PHONY: smoke
smoke: $(DEV_STAMP) model ## every spike with smoke=True, some at a time, one thread each; 006 runs in `lone`
	@OMP_NUM_THREADS=1 $(PY) scripts/run_smoke.py --workers $(WORKERS)

##@ Daily work
.PHONY: export
export: $(DEV_STAMP) ## write the package from the notebooks
	@$(VENV)/bin/nbdev_export

.PHONY: frame
frame: $(DEV_STAMP) ## write *Next* and *read first* into the chapters, from the table of contents
	@$(PY) scripts/frame.py

.PHONY: chapters
chapters: $(DEV_STAMP) model ## execute every chapter in place, outputs included
	@MPLBACKEND=module://matplotlib_inline.backend_inline $(PY) scripts/run_chapters.py

.PHONY: clean-nbs
clean-nbs: $(DEV_STAMP) ## bring chapters into their committed form: no counts, no machine paths
	@$(PY) scripts/clean_notebooks.py

.PHONY: model
model: $(CORE_STAMP) ## convert the bundled SmolLM2-135M once, into the user cache
	@$(PY) -c "from composer_nb.models import prepare_smollm2; print('model:', prepare_smollm2())"

.PHONY: environments
environments: env-verl env-monarch env-vllm env-skypilot ## make all, for the tests of parity; PRIME-RL's where git reaches it
	@$(MAKE) --no-print-directory env-prime-rl || echo "PRIME-RL will not be run: its recording is compared"

.PHONY: env-verl
env-verl: $(CORE_STAMP) ## make the environment of verl, once, in the user cache
	@$(VENV)/bin/composer-nb env make verl

.PHONY: env-monarch
env-monarch: $(CORE_STAMP) ## make the environment of Monarch, once, in the user cache
	@$(VENV)/bin/composer-nb env make monarch

.PHONY: env-skypilot
env-skypilot: $(CORE_STAMP) ## make the environment of SkyPilot, once, in the user cache
	@$(VENV)/bin/composer-nb env make skypilot

.PHONY: env-vllm
env-vllm: $(CORE_STAMP) ## make the environment of vLLM, once, in the user cache
	@$(VENV)/bin/composer-nb env make vllm

.PHONY: env-prime-rl
env-prime-rl: $(CORE_STAMP) ## make the environment of PRIME-RL, once; PRIME_RL_SRC may name a copy of its repository
	@$(VENV)/bin/composer-nb env make prime_rl

.PHONY: help
help: ## list targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamps: a second run installs nothing unless the lists changed.
$(VENV_STAMP):
	@scripts/bootstrap_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

$(TORCH_STAMP): constraints.txt | $(VENV_STAMP)
	@$(INSTALL) $(TORCH_INDEX) torch
	@touch $@

$(CORE_STAMP): constraints.txt pyproject.toml requirements-data.txt $(TORCH_STAMP)
	@$(INSTALL) -e '.[smollm2,plot]' papermill ipykernel nbconvert
	@$(INSTALL) --no-deps -r requirements-data.txt
	@touch $@

$(DEV_STAMP): $(CORE_STAMP)
	@$(INSTALL) -e '.[dev]'
	@touch $@
