# Everything happens in .venv and build/, whichever virtual environment is active.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The tests wait for about as long as they compute: two more of them run at a time than there are processors, each with one thread
# of torch. Tests that need more threads set their number themselves.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal -n $(shell expr $$(nproc) + 2)

unexport PYTHONPATH
unexport PYTHONHOME
unexport PYTHONSTARTUP
# The tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_USER := 0
export PIP_REQUIRE_VIRTUALENV := 0

CXX_SOURCES := $(wildcard native/*/*.cpp native/*/*.hpp native/*/*/*.cpp native/*/*/*.hpp)
NATIVE := pyproject.toml CMakeLists.txt native/ccache.cmake $(CXX_SOURCES)
# Packages of their own that farpool finds by entry points.
PLUGINS := plugins/farpool-nixl benchmarks
# Empty files that say what the environment holds; make compares their times.
BASE   := $(VENV)/.stamp-base
DEMO   := $(VENV)/.stamp-demo
DEV    := $(VENV)/.stamp-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-upgrade test-native test-sanitized test-kv kv-envs lint stub docs format clean dev
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO) ## Embed a text collection with a model that has a quarter of its bytes resident (ARGS="--budget 10%")
	@$(BIN)/farpool demo $(ARGS)

test: $(DEV) test-native ## Run the tests that are quick (ARGS="-k budget")
	@$(PYTEST) -m "not slow and not upgrade" $(ARGS)

test-long: $(DEV) ## Run the tests that take their time (ARGS="-k history")
	@$(PYTEST) -m "slow and not upgrade" $(ARGS)

test-upgrade: $(DEV) ## Build the previous release and run it together with this one (tests/upgrade)
	@scripts/previous-release >/dev/null || [ $$? -eq 3 ]
	@$(PYTEST) -m upgrade tests/upgrade $(ARGS)

# $(call native_tests,SANITIZERS,FOLDER): build and run the unit tests of the native core in build/FOLDER.
comma := ,
define native_tests
	@$(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -S native/tests -B build/$(2) -DCMAKE_BUILD_TYPE=None \
		-DFARPOOL_SANITIZE='$(1)' >/dev/null
	@$(BIN)/cmake --build build/$(2) -- --quiet
	@$(BIN)/ctest --test-dir build/$(2) --parallel $$(nproc) --output-on-failure --no-tests=error
endef

test-native: $(BASE) ## Run the native core's own unit tests
	$(call native_tests,,native-tests)

test-sanitized: $(BASE) ## Run them under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	$(call native_tests,address$(comma)undefined,native-tests-address)
	$(call native_tests,thread,native-tests-thread)

kv-envs: $(DEV) ## Build the environments with vLLM, LMCache and SGLang, against which their connectors are tested
	@scripts/kv-envs $(if $(NEWEST),--newest) $(ENGINES)

test-kv: $(DEV) ## Test against the engines (skipped, with the reason, where one cannot be installed; NEWEST=1: their newest releases)
	@scripts/kv-envs $(if $(NEWEST),--newest) $(ENGINES) || echo "the tests of the engines named above are skipped" >&2
	@FARPOOL_KV_NEWEST=$(NEWEST) $(BIN)/python -m pytest tests/kv/connectors tests/kv/test_farpool_cache.py tests/kv/test_accelerate.py $(ARGS)

lint: $(DEV) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	@scripts/native-stub --check
	$(BIN)/mypy
	$(BIN)/lint-imports

stub: $(DEV) ## Write the types of the native core, src/farpool/_native.pyi, from its bindings
	@scripts/native-stub

docs: $(DEV) ## Build the documentation site in build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "Open build/docs/index.html"

format: $(DEV) ## Put the sources into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

dev: $(DEV) ## Set up .venv for development

clean: ## Remove everything that the other targets made
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache farpool-timeline.png
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(BASE): requirements/torch.txt requirements/build.txt scripts/check-system
	@scripts/check-system "$(PYTHON)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Creating $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing PyTorch and the build tools into $(VENV) (the first time takes a few minutes)"
	@$(PIP) install -r requirements/torch.txt
	@$(PIP) install -r requirements/build.txt
	@touch $@

$(DEMO): $(BASE) $(NATIVE)
	@echo "Building farpool"
	@$(PIP) install -c requirements/torch.txt --no-build-isolation -e '.[demo]'
	@touch $@

$(DEV): $(BASE) $(NATIVE) $(PLUGINS:=/pyproject.toml)
	@echo "Building farpool, with what development needs"
	@$(PIP) install -c requirements/torch.txt --no-build-isolation -C cmake.define.FARPOOL_WERROR=ON -e '.[dev]'
	@$(PIP) install --no-build-isolation --no-deps $(PLUGINS:%=-e ./%)
	@touch $(DEMO) $@
