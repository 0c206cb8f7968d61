# One command for each thing a person wants. `make help` lists them.
# The virtual environment is .venv; every target makes what it needs.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
UV     := $(BIN)/uv
UV_PIP := VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install --quiet
NATIVE := $(shell find cpp protos -type f 2>/dev/null) pyproject.toml

.PHONY: help demo up test bench lint format cpp-test lock clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMPS)/install  ## Set up, compile the default model, serve it with example adapters, stop
	@$(BIN)/lorafleet demo

up: $(STAMPS)/install  ## Set up and start the fleet; it goes on until `.venv/bin/lorafleet down`
	@$(BIN)/lorafleet up --detach

test: $(STAMPS)/test $(STAMPS)/protos cpp-test  ## Set up and run every test
	@$(BIN)/python -m pytest

bench: $(STAMPS)/test  ## Measure every figure; writes benchmarks/out/latest.json
	@$(BIN)/lorafleet bench all

lint: $(STAMPS)/test $(STAMPS)/protos  ## Formatters, linters, types, import layers, proto rules, spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@cd protos && ../$(BIN)/buf lint
	@find cpp -name '*.h' -o -name '*.cc' | xargs $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/codespell

format: $(STAMPS)/test  ## Reformat Python and C++
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@find cpp -name '*.h' -o -name '*.cc' | xargs $(BIN)/clang-format -i

cpp-test: $(STAMPS)/test  ## Build and run the native library's GoogleTests
	@if echo '#include <gtest/gtest.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1; then \
	  $(BIN)/cmake -S cpp -B build/cpp-test -G Ninja -DCMAKE_BUILD_TYPE=Release \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	    -DLORAFLEET_BUILD_TESTS=ON >/dev/null \
	  && $(BIN)/cmake --build build/cpp-test --target lorafleet_tests >/dev/null \
	  && $(BIN)/ctest --test-dir build/cpp-test --output-on-failure --progress; \
	else echo "cpp-test: GoogleTest headers not found (Debian: libgtest-dev); skipped"; fi

lock:  ## Resolve the newest allowed versions and write them down
	@$(UV) lock --upgrade --quiet
	@$(UV) export --quiet --no-header --no-emit-project --no-hashes --no-annotate --group model -o requirements/run.lock
	@$(UV) export --quiet --no-header --no-emit-project --no-hashes --no-annotate --all-groups -o requirements/dev.lock
	@sed -i "s/ ; sys_platform == 'linux'//" requirements/*.lock

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/uv:
	@echo "==> making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: requirements/run.lock | $(STAMPS)/uv
	@echo "==> installing the locked dependencies"
	@$(UV_PIP) --no-deps -r requirements/run.lock
	@touch $@

$(STAMPS)/install: $(NATIVE) $(STAMPS)/run
	@echo "==> building and installing lorafleet (native parts take about a minute)"
	@$(UV_PIP) --no-deps --editable .
	@touch $@

# torch comes by pip: it takes a CPU build from where pip is configured to look, else PyPI's.
$(STAMPS)/test: requirements/dev.lock $(STAMPS)/install
	@echo "==> installing the test tools and the oracle (torch, transformers, peft)"
	@$(UV_PIP) --no-deps -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

# The build makes the protos' Python code where it is installed; tools that read the source tree
# (mypy, import-linter) want it there as well.
$(STAMPS)/protos: protos/lorafleet/v1/*.proto $(STAMPS)/test
	@mkdir -p cluster/lorafleet/v1
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=cluster --pyi_out=cluster \
	  --grpc_python_out=cluster protos/lorafleet/v1/*.proto
	@touch cluster/lorafleet/v1/__init__.py $@
