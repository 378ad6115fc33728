# The main commands are `make serve` and `make test`. Each installs what it needs on Debian or macOS, and requires only
# make and Python 3.11 or newer. Everything is stored in .venv and .cache. Only the Redis server for `make test` is
# installed with the package manager of the system, if it is missing.

VENV := .venv
BIN := $(VENV)/bin
OWN_UV := .cache/uv/bin/uv
UV := $(shell command -v uv 2>/dev/null || echo $(OWN_UV))
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

# The tests start hundreds of processes. Without bytecode files, each of them would compile all its imports.
unexport PYTHONDONTWRITEBYTECODE

# uv uses the installed Python and never downloads one.
export UV_PYTHON_DOWNLOADS := never
export UV_PROJECT_ENVIRONMENT := $(VENV)

SYNCED := $(VENV)/.synced
ARGS :=
DIST := dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CORES := $(shell getconf _NPROCESSORS_ONLN)
# More workers than cores, because tests wait for servers half of the time.
WORKERS := 4
# Parts of the unit tests, which all run at the same time: about two per core, for the same reason, but not more than
# needed, because each part imports everything again. Selected tests (ARGS) are one part.
PARTS := $(patsubst %,.part-%,1 $(if $(ARGS),,2 3 4 $(if $(filter 1 2,$(CORES)),,5 6 7 8)))
# All parts and the two longest other checks start at once.
JOBS := $(words $(PARTS) types test-sdk)

.PHONY: help serve test lint types imports unit test-sdk test-clients test-agents test-providers test-guardrails test-phoenix test-webui test-lm-eval test-engines test-structured test-openapi test-page vendor screenshots test-crash test-leaks test-slow test-deep test-parser test-restarts test-failover chaos soak fmt bench clean docs test-deploy test-dist dist

help:
	@echo "make serve          serve the gpt-oss backends on this machine, or the demo model (ARGS='--config my.yaml')"
	@echo "make test           all checks that a change must pass"
	@echo "make lint fmt       check the style, or fix it"
	@echo "make types imports unit test-sdk        parts of make test"
	@echo "make test-clients   all client libraries: openai before and after 3, anthropic, openai-agents, pydantic-ai, langchain, llama-index, cohere, litellm, npm"
	@echo "make test-agents    Codex, Claude Code and opencode as locked, or their newest versions (ARGS=--newest); ten minutes"
	@echo "make test-guardrails guardrails with a real Presidio, in a separate environment"
	@echo "make test-phoenix   spans in a real Phoenix, in a separate environment; five minutes"
	@echo "make test-webui     a real Open WebUI before the gateway, in a separate environment of 2 GB; three minutes"
	@echo "make test-lm-eval   lm-eval through the gateway and on a real vLLM, in a separate environment; five minutes"
	@echo "make test-providers other providers through litellm, in a separate environment"
	@echo "make test-engines   real vLLM, llama.cpp and mlx-lm on the CPU; the first run takes 5 GB and half an hour"
	@echo "make test-structured  valid answers under schemas and expressions on real engines; a few minutes (ARGS=--full: an hour)"
	@echo "make test-openapi   valid and invalid requests generated from the OpenAPI document; twenty minutes"
	@echo "make test-page      the web page in a headless Chromium; three minutes"
	@echo "make screenshots    screenshots of every view of the web page, in docs/images"
	@echo "make vendor         fetch the libraries of the web page from npm, as recorded"
	@echo "make test-crash     kill processes at every step of a background response; ten minutes"
	@echo "make test-leaks     twenty thousand streams, a quarter of them aborted; three minutes"
	@echo "make test-slow      all slow tests, which make test omits"
	@echo "make test-deep      property tests with many random examples"
	@echo "make test-parser    tokens and recoveries, read by openai-harmony's parser instead of the gateway's table; ten minutes"
	@echo "make test-restarts  restarts of replicas under load; a minute"
	@echo "make test-failover  62 failovers of Redis under Sentinel and in a cluster, under load; 40 minutes"
	@echo "make test-deploy    compose files and Helm chart against their schemas, and the build steps of the image"
	@echo "make test-dist      the files of make dist: their content, and a gateway from the wheel"
	@echo "make chaos          random faults for the given time (ARGS='--minutes 15', '--seed 7 --talk 3')"
	@echo "make soak           mixed traffic for hours, to find leaks of memory, descriptors and threads (ARGS='--minutes 120 --store redis')"
	@echo "make docs           generate the pages that are derived from the code"
	@echo "make dist           build wheel, source archive and bill of materials (CycloneDX) in dist/ (REPOSITORY=https://... for its links)"
	@echo "make bench          measure the performance of the gateway (ARGS for the benchmark)"
	@echo "make clean          remove everything that was installed and built"

serve: $(SYNCED)
	$(BIN)/unisono serve $(ARGS)

# Short jobs come last: they fill the cores while the parts wait.
test: $(SYNCED) .state-server
	@rm -f .cache/part-*.failed
	@$(MAKE) --no-print-directory -j $(JOBS) $(PARTS) test-sdk types lint imports
	@$(MAKE) --no-print-directory .failed-again

lint: $(SYNCED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.lint

types: $(SYNCED)
	$(BIN)/mypy

imports: $(SYNCED)
	$(BIN)/lint-imports

unit: $(SYNCED) .state-server
	@rm -f .cache/part-*.failed
	@$(MAKE) --no-print-directory -j $(JOBS) $(PARTS)
	@$(MAKE) --no-print-directory .failed-again

# Each part is a process that collects and runs its own modules. Workers of pytest-xdist would all collect all modules,
# half a minute of processor time for each worker.
# pytest rewrites assertions for detailed messages, which takes seven times as long as compiling the modules. The first
# run of all tests does not rewrite them, because failed tests are repeated with detailed messages.
UNIT = $(BIN)/pytest -m "not slow" -o cache_dir=.cache/part-$(1) --part $(1)/$(words $(PARTS))
.PHONY: $(PARTS)
$(PARTS): .part-%: $(SYNCED) .state-server
	@mkdir -p .cache
	@$(call UNIT,$*) $(or $(ARGS),--assert=plain) >.cache/part-$*.log 2>&1; code=$$?; \
		echo "tests, part $* of $(words $(PARTS)):"; cat .cache/part-$*.log; \
		if [ $$code = 1 ]; then touch .cache/part-$*.failed; else [ $$code = 0 ]; fi

# Some tests depend on time and fail on a busy machine. Failed tests are repeated once, alone and with verbose output. A
# test that fails twice has failed.
.PHONY: .failed-again
.failed-again:
	@$(foreach part,$(PARTS:.part-%=%),{ [ ! -e .cache/part-$(part).failed ] || \
		$(call UNIT,$(part)) --last-failed --last-failed-no-failures none -v $(ARGS); } &&) true

# OpenAI's client library, in a separate environment.
test-sdk: $(SYNCED)
	CLIENTS=openai-3 tests/e2e/run -m "not slow"

# All client libraries, each in a separate environment.
test-clients: $(SYNCED)
	tests/e2e/run $(ARGS)

# Real coding agents from npm with a scripted model, in a separate environment.
test-agents: $(SYNCED)
	tests/agents/run $(ARGS)

# Requests generated from the OpenAPI document, in a separate environment.
test-openapi: $(SYNCED)
	CLIENTS=openapi tests/e2e/run $(ARGS)

# The extra `litellm` pins versions of other packages, so it needs a separate environment.
test-providers: $(SYNCED)
	UV_PROJECT_ENVIRONMENT=.envs/providers $(UV) sync --quiet --locked --extra litellm
	.envs/providers/bin/python -m pytest tests/providers $(ARGS)

# Guardrails with a real Presidio, in a separate environment.
test-guardrails: $(SYNCED)
	tests/guardrails/run $(ARGS)

# Spans in a real Phoenix, in a separate environment.
test-phoenix: $(SYNCED)
	tests/phoenix/run $(ARGS)

# Retrieval and speech of a real Open WebUI.
test-webui: $(SYNCED)
	tests/webui/run $(ARGS)

# lm-eval in a separate environment, with the vLLM of `make test-engines`.
test-lm-eval: $(SYNCED)
	$(BIN)/python -m tests.engines_all.setup vllm
	tests/lm_eval/run $(ARGS)

# The web page in a browser. The package manager of the system installs the browser if it is missing.
test-page: $(SYNCED) .browser
	tests/web/browser/run $(ARGS)

# Libraries of the web page, in the versions that packages.json records.
vendor: $(SYNCED)
	$(BIN)/python -m tests.web.vendor

# Screenshots of every view of the web page, for README and docs.
screenshots: $(SYNCED) .browser
	tests/web/browser/run screenshots $(ARGS)

# If the installation of an engine fails, its tests fail, and those of the other engines still run.
test-engines: $(SYNCED)
	-$(BIN)/python -m tests.engines_all.setup
	$(BIN)/pytest tests/engines_all $(ARGS)

# Seeded JSON schemas and regular expressions on an engine that enforces them, and on one that does not.
test-structured: $(SYNCED)
	-$(BIN)/python -m tests.engines_all.setup
	$(BIN)/python -m tests.structured $(ARGS)

# A gateway is killed before and after every store command and every chunk of a background response.
test-crash: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/e2e/test_background_crashes.py tests/e2e/test_background_store_faults.py $(ARGS)

# A leak of this many streams exceeds the noise of the allocator.
test-leaks: $(SYNCED)
	$(BIN)/pytest -m slow tests/e2e/test_leaks.py -s $(ARGS)

# All slow tests, except those with real engines and coding agents.
test-slow: $(SYNCED) .state-server
	$(BIN)/pytest -m "slow and not alone" --ignore tests/engines_all --ignore tests/agents --ignore tests/lm_eval -n 2 --dist loadfile $(ARGS)
	$(BIN)/pytest -m "slow and alone" --ignore tests/engines_all --ignore tests/agents --ignore tests/lm_eval $(ARGS)
	tests/e2e/run
	$(MAKE) --no-print-directory test-page

# Property tests with many more examples than in make test, different ones in every run.
test-deep: $(SYNCED) .state-server
	TEST_DEPTH=5 $(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

# Both parsers give the same events for any output, so all tests of tokens pass with either.
test-parser: $(SYNCED)
	TEST_PARSER=library $(BIN)/pytest tests/harmony tests/engine tests/simulation -n $(WORKERS) --dist loadfile $(ARGS)
	TEST_PARSER=library $(BIN)/pytest tests/e2e/test_recoveries.py tests/e2e/test_unfinished_turns.py -n $(WORKERS) $(ARGS)

# Two replicas are restarted one after the other under 200 streams.
test-restarts: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/e2e/test_rolling.py $(ARGS)

# Two gateways under load while Redis fails over at seeded times (tests/failover can run a single seed).
test-failover: $(SYNCED) .state-server
	$(BIN)/pytest -m slow tests/failover -s $(ARGS)

# Files in docker/ against the schemas of compose and Kubernetes. The chart is rendered with Helm. As root and with
# debootstrap, the build steps of the image run.
test-deploy: $(SYNCED)
	$(BIN)/pytest tests/deployment $(ARGS)

# The wheel, installed outside of this repository.
test-dist: $(SYNCED)
	$(BIN)/pytest tests/deployment/test_release.py $(ARGS)

# Backends fail, stall, crash and return under requests to every API. A failure is reported with its seed.
chaos: $(SYNCED)
	$(BIN)/python -m tests.chaos $(ARGS)

# One gateway process under mixed traffic, measured between rounds, with a result at the end.
soak: $(SYNCED) .state-server
	$(BIN)/python -m tests.soak $(ARGS)

fmt: $(SYNCED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A page stays unchanged if its generator fails.
docs: $(SYNCED)
	$(BIN)/python -m tests.docs.capabilities >docs/.capabilities && mv docs/.capabilities docs/capabilities.md
	$(BIN)/python -m tests.docs.settings >docs/.configuration && mv docs/.configuration docs/configuration.md
	$(BIN)/python -m tests.docs.mended >docs/.recoveries && mv docs/.recoveries docs/recoveries.md
	$(BIN)/python -m tests.fields.table >docs/.fields && mv docs/.fields docs/fields.md

dist: $(UV)
	@rm -rf $(DIST)
	UNISONO_REPOSITORY="$(REPOSITORY)" $(UV) build --quiet --out-dir $(DIST)
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

# The tests of shared state start and stop a real Redis server. If it is missing, the package manager installs it, and the
# system service that some packages start is disabled.
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
			echo "redis-server is not installed, and its installation failed. Debian: apt install redis-server." >&2; \
			echo "macOS: brew install redis. Fedora: dnf install valkey. Log of the installation: .cache/state-server.log" >&2; \
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
			echo "chromium is not installed, and its installation failed. Debian: apt install chromium." >&2; \
			echo "Log of the installation: .cache/browser.log" >&2; \
			exit 1; }; }

# Without uv on PATH, install it from the Python package index.
$(OWN_UV):
	@rm -rf .cache/uv
	@$(PYTHON) -m venv .cache/uv || { \
		echo "$(PYTHON) cannot create a virtual environment. Debian: apt install python3-venv." >&2; \
		rm -rf .cache/uv; exit 1; }
	.cache/uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
