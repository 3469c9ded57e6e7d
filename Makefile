# The verbs of the project. Each sets up by itself what it needs: Python 3.11+ and Java 17 or 21 are all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Where it is set, every process that tests start would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-ready test-fast lint bench soak docs walks dist lock clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## create .venv with the locked dependencies

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Floodmark needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python requirements.lock
	@# compat: as a path. By a finder it would lose to a folder named like the package, as a clone is to the folder above it.
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --config-setting editable_mode=compat --editable .
	$(BIN)/python -m compileall -q floodmark
	@touch $(READY)

demo: $(READY) ## sources, jobs, sinks and maintenance, with kill -9 at every stage; then a count of rows
	$(BIN)/floodmark demo

# All of it in a folder of its own, settings too: other lakes of this folder, as the README makes one, are left alone.
up: $(READY) ## a lake in ./up/lake: rows over HTTP and from ./up/drop, shipped to ./up/out, with its page
	@mkdir -p up && { test -e up/floodmark.toml || cp examples/floodmark.toml up/floodmark.toml; }
	@echo "Settings are in up/floodmark.toml; for commands: $(BIN)/floodmark --config up/floodmark.toml status"
	@echo "Once it says its ADDRESS, open that in a browser, and send rows:"
	@echo "  curl --data-binary '{\"id\": 1, \"kind\": \"hello\"}' ADDRESS/api/tables/events/rows"
	@echo "  echo '{\"id\": 2, \"kind\": \"from a file\"}' > up/drop/hello.jsonl"
	@exec $(BIN)/floodmark --config up/floodmark.toml run --create

# Tests wait for syncs more than for anything else: in memory, if there is room, they do not.
SCRATCH = $(shell test -w /dev/shm && test "$$(df -Pk /dev/shm | awk 'END {print $$4}')" -gt 6000000 \
	&& echo /dev/shm || echo "$${TMPDIR:-/tmp}")

test: $(READY) ## run everything: style, spelling, types, layers, tests; downloads a Chromium (BROWSER=skip: without)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 lint test-ready
	@scratch=$$(mktemp -d $(SCRATCH)/floodmark-test-XXXXXX) && trap 'rm -rf "$$scratch"' EXIT && \
		$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --basetemp "$$scratch/pytest"

# Beside lint, on the second core. Collecting compiles the tests once: three workers would each do it.
test-ready: $(READY)
	@$(BIN)/python -m tests.browser.chromium
	@$(BIN)/python -m tests.short_java
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true  # what is wrong, the run itself reports

test-fast: $(READY) ## run the tests that start no JVM
	$(BIN)/python -m pytest tests/unit tests/contract

lint: $(READY) ## check style, spelling, types, the number of Any, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell --skip ./tests
	$(BIN)/codespell --ignore-words tests/misspelled.txt tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.any_count

bench: $(READY) ## measure: a table, and JSON in bench/out
	$(BIN)/python -m bench

soak: $(READY) ## run what `make test` leaves out, in pieces (ONLY="tests/crash …"); hours, and it can go on where it stopped
	@$(BIN)/python -m tests.short_java
	SCRATCH=$(SCRATCH) $(BIN)/python -m tests.soak $(SOAK) $(ONLY)

docs: $(READY) ## generate docs/cli.md
	$(BIN)/python -m docs.generate

walks: $(READY) ## trace two real runs, count the rooms, and write both into docs/architecture.md
	$(BIN)/python -m docs.walks

dist: $(READY) ## build the wheel and the source package into dist/, and try them in an empty environment
	@rm -rf dist floodmark.egg-info  # its list of files would be taken over from the last time
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist
	$(BIN)/python -m tests.wheel

lock: ## choose versions anew (writes requirements.lock)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --no-emit-index-url --no-header \
		--no-annotate pyproject.toml requirements.in -o requirements.lock

clean: ## remove generated files
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache bench/out build dist
