# Two commands are all there is to know: `make serve` and `make test`. Each sets up what it needs, on Debian and on
# macOS alike, from nothing but make and Python 3.11 or newer. Everything lands in .venv and .cache;
# only the Redis server that `make test` needs comes from the system's package manager where there is none.

VENV := .venv
BIN := $(VENV)/bin
OWN_UV := .cache/uv/bin/uv
UV := $(shell command -v uv 2>/dev/null || echo $(OWN_UV))
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

# Hundreds of processes are started by the tests: each would compile all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# uv takes the Python that is here and never fetches one.
export UV_PYTHON_DOWNLOADS := never
export UV_PROJECT_ENVIRONMENT := $(VENV)

SYNCED := $(VENV)/.synced
ARGS :=
DIST := dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Tests that wait on servers wait side by side.
WORKERS := 4

.PHONY: help serve test lint types imports unit test-sdk test-clients test-providers test-engines test-openapi test-page test-crash test-leaks test-slow test-deep test-restarts test-failover chaos soak fmt bench clean docs test-deploy test-dist dist

help:
	@echo "make serve          serve what is on this machine, or the demo model (ARGS='--config my.yaml')"
	@echo "make test           everything that is checked before a change goes in"
	@echo "make lint fmt       look at the style, or mend it"
	@echo "make types imports unit test-sdk        the parts of make test"
	@echo "make test-clients   every client library: openai before and after 3, anthropic, openai-agents, pydantic-ai, langchain, litellm"
	@echo "make test-providers other providers, through litellm, in an environment of its own"
	@echo "make test-engines   real vLLM, llama.cpp and mlx-lm on this CPU; 5 GB and half an hour the first time"
	@echo "make test-openapi   ask whatever the OpenAPI document allows, and what it does not; four minutes"
	@echo "make test-page      the page in a headless Chromium; three minutes"
	@echo "make test-crash     kill processes at every step of a background response; ten minutes"
	@echo "make test-leaks     twenty thousand streams, a quarter broken off; three minutes"
	@echo "make test-slow      all that make test leaves out for its length"
	@echo "make test-deep      properties with many examples, other ones every time"
	@echo "make test-restarts  restart replicas under load; a minute"
	@echo "make test-failover  62 failovers of Redis under Sentinel and in a cluster, under load; 40 minutes"
	@echo "make test-deploy    compose files and chart by the schemas, the chart rendered where helm is, the image's steps for root"
	@echo "make test-dist      what make dist makes: what is in it, and whether it serves by itself"
	@echo "make chaos          storms of faults for as long as one likes (ARGS='--minutes 15', '--seed 7 --talk 3')"
	@echo "make soak           mixed traffic for hours: flat memory, descriptors and threads (ARGS='--minutes 120 --store redis')"
	@echo "make docs           write the pages that are made of the code"
	@echo "make dist           wheel, source and bill of materials (CycloneDX), in dist/"
	@echo "make bench          measure the gateway (ARGS go to the bench)"
	@echo "make clean          remove what was set up and built"

serve: $(SYNCED)
	$(BIN)/unisono serve $(ARGS)

test: lint types imports unit test-sdk

lint: $(SYNCED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(SYNCED)
	$(BIN)/mypy

imports: $(SYNCED)
	$(BIN)/lint-imports

# Some tests wait for processes that share two cores with all the others. What fails there has another chance by itself,
# in plain sight; what fails twice has failed.
unit: $(SYNCED) .state-server
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS) || { [ $$? = 1 ] && \
		$(BIN)/pytest -m "not slow" --last-failed --last-failed-no-failures none -v $(ARGS); }

# OpenAI's own client library, in an environment of its own.
test-sdk: $(SYNCED)
	CLIENTS=openai-3 tests/e2e/run --ignore tests/e2e/clients/openai_sdk/check_answers.py

# All client libraries, each in an environment of its own.
test-clients: $(SYNCED)
	tests/e2e/run $(ARGS)

# Requests made from the OpenAPI document, in an environment of its own.
test-openapi: $(SYNCED)
	CLIENTS=openapi tests/e2e/run $(ARGS)

# The extra `litellm` keeps other packages at versions of its own, so it has an environment of its own.
test-providers: $(SYNCED)
	UV_PROJECT_ENVIRONMENT=.envs/providers $(UV) sync --quiet --locked --extra litellm
	.envs/providers/bin/python -m pytest tests/providers $(ARGS)

# The page in a browser, which comes from the system's package manager where there is none.
test-page: $(SYNCED) .browser
	tests/web/browser/run $(ARGS)

# An engine that could not be set up fails its tests, after the others have had theirs.
test-engines: $(SYNCED)
	-$(BIN)/python -m tests.engines_all.setup
	$(BIN)/pytest tests/engines_all $(ARGS)

# A gateway killed before and after every command it sends and every chunk it gets while it makes a response.
test-crash: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/e2e/test_background_crashes.py tests/e2e/test_background_store_faults.py $(ARGS)

# What so many leave behind shows over the noise of the allocator.
test-leaks: $(SYNCED)
	$(BIN)/pytest -m slow tests/e2e/test_leaks.py -s $(ARGS)

# Everything that make test leaves out because it takes long, but for real engines.
test-slow: $(SYNCED) .state-server
	$(BIN)/pytest -m "slow and not alone" --ignore tests/engines_all -n 2 --dist loadfile $(ARGS)
	$(BIN)/pytest -m "slow and alone" --ignore tests/engines_all $(ARGS)
	tests/e2e/run
	$(MAKE) --no-print-directory test-page

# Properties with twenty times the examples of make test, other ones every time.
test-deep: $(SYNCED) .state-server
	TEST_DEPTH=5 $(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

# Two replicas, restarted one after the other under 200 streams.
test-restarts: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/e2e/test_rolling.py $(ARGS)

# Two gateways under load while Redis fails over at seeded moments (tests/failover runs single seeds by hand).
test-failover: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/failover -s $(ARGS)

# What is in docker/, by the schemas of compose and Kubernetes; the image's steps in a plain root, where debootstrap is.
test-deploy: $(SYNCED)
	$(BIN)/pytest tests/deployment $(ARGS)

# The wheel, installed away from here.
test-dist: $(SYNCED)
	$(BIN)/pytest tests/deployment/test_release.py $(ARGS)

# Backends that break, stall, die and come back under talks on every surface; says which seed went wrong.
chaos: $(SYNCED)
	$(BIN)/python -m tests.chaos $(ARGS)

# One gateway process under mixed traffic, sampled between rounds; ends with a verdict.
soak: $(SYNCED) .state-server
	$(BIN)/python -m tests.soak $(ARGS)

fmt: $(SYNCED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A page that cannot be made stays as it was.
docs: $(SYNCED)
	$(BIN)/python -m unisono_adapters.matrix >docs/.capabilities && mv docs/.capabilities docs/capabilities.md
	$(BIN)/python -m tests.docs.settings >docs/.configuration && mv docs/.configuration docs/configuration.md
	$(BIN)/python -m tests.docs.mended >docs/.recoveries && mv docs/.recoveries docs/recoveries.md

dist: $(UV)
	@rm -rf $(DIST)
	$(UV) build --quiet --out-dir $(DIST)
	$(UV) export --quiet --locked --no-dev --all-extras --format cyclonedx1.5 --no-header \
		--output-file $(DIST)/unisono-$(VERSION).cdx.json >/dev/null

bench: $(SYNCED) $(UV)
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .cache .envs dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find adapters bench proxy tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(SYNCED): pyproject.toml uv.lock
	@$(MAKE) -s --no-print-directory .python-found $(UV)
	$(UV) sync --quiet --locked --extra demo --extra otel --python-preference only-system
	@touch $@

.PHONY: .python-found
.python-found:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 or newer is not installed. Debian: apt install python3 python3-venv." >&2; \
		echo "macOS: brew install python@3.13, or the installer from python.org." >&2; \
		exit 1; \
	fi

# State shared by replicas is tested on a real server, which the tests start and end themselves. A machine without one
# gets it from its package manager; the service some packages start is not wanted and goes.
.PHONY: .state-server
.state-server:
	@mkdir -p .cache
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { \
		if command -v apt-get >/dev/null; then \
			root=""; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
			$$root apt-get update -qq && $$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server; \
			$$root systemctl disable --now redis-server || true; \
		elif command -v brew >/dev/null; then \
			brew install --quiet redis; \
		fi >.cache/state-server.log 2>&1; \
		command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { \
			echo "redis-server is not installed, and could not be. Debian: apt install redis-server." >&2; \
			echo "macOS: brew install redis. Fedora: dnf install valkey. What was tried: .cache/state-server.log" >&2; \
			exit 1; }; }

.PHONY: .browser
.browser:
	@mkdir -p .cache
	@command -v chromium >/dev/null || { \
		if command -v apt-get >/dev/null; then \
			root=""; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
			$$root apt-get update -qq && $$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; \
		fi >.cache/browser.log 2>&1; \
		command -v chromium >/dev/null || { \
			echo "chromium is not installed, and could not be. Debian: apt install chromium." >&2; \
			echo "What was tried: .cache/browser.log" >&2; \
			exit 1; }; }

# Without uv on PATH: one of our own, from the Python package index.
$(OWN_UV):
	@rm -rf .cache/uv
	@$(PYTHON) -m venv .cache/uv || { \
		echo "$(PYTHON) cannot make a virtual environment. Debian: apt install python3-venv." >&2; \
		rm -rf .cache/uv; exit 1; }
	.cache/uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
