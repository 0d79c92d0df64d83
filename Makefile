# DigenRL. `make train` and `make test` need nothing but Python 3.11 or 3.12 and make.
# The first of these that runs and is new enough; a version manager's shim may exist and not run.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; exit; }; done; \
  echo python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
DEVICE ?= cpu
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# What a person wants to see of pip's hundreds of lines, as it happens; all of them are in install.log.
define PIP_PROGRESS
n=0; large='Downloading ([^ ]+)\.whl \(([0-9]{2,}(\.[0-9]+)? MB|[0-9.]+ GB)\)'; while IFS= read -r line; do \
  case "$$line" in \
    Collecting*) n=$$((n + 1)); if ((n % 25 == 0)); then echo "  found $$n packages"; fi;; \
    *Downloading*) if [[ $$line =~ $$large ]]; then echo "  downloading $${BASH_REMATCH[1]%%-cp*} ($${BASH_REMATCH[2]})"; fi;; \
    "Installing collected"*) echo "  installing $$n packages";; \
    ERROR*) echo "$${line:0:200}";; \
  esac; done
endef

.DEFAULT_GOAL := help
.PHONY: help train test check serve learn clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

# The stamp lies in the environment: removing .venv, or changing a requirement, installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else \
	  "DigenRL needs Python 3.11 or 3.12, found %d.%d; set PYTHON=/path/to/python3.12" % v)'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing DigenRL and its dependencies into $(VENV) (about 2 GB, a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --upgrade pip 2>/dev/null
	@$(BIN)/python -u -m pip install --progress-bar off -c constraints.txt -e '.[dev]' 2>&1 | tee $(VENV)/install.log \
	  | { $(PIP_PROGRESS); }
	@$(BIN)/digenrl --version
	@touch $@

train: $(VENV)/.installed ## Train the tiny text-to-image model with GRPO (about 3 minutes on 2 cores)
	@$(BIN)/digenrl train tiny-ocr cluster.device=$(DEVICE)

test: $(VENV)/.installed ## Run the whole test suite, a file per core at a time
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --durations=15

check: $(VENV)/.installed ## Lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: $(VENV)/.installed ## Open the Prefect and MLflow pages of past runs (Ctrl-C stops them)
	@$(BIN)/digenrl serve

learn: $(VENV)/.installed ## Train tiny-ocr with seeds 0, 1, 2 and write the table in docs/learning.md
	@$(BIN)/python benchmarks/learn.py

clean: ## Remove .venv and the services' state; runs/ too with ALL=1
	@if [ -x $(BIN)/digenrl ]; then $(BIN)/digenrl stop; fi
	rm -rf $(VENV) runs/.services build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@if [ "$(ALL)" = 1 ]; then rm -rf runs; fi
