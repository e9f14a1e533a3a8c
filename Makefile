# Works with GNU make 3.81, the one that macOS has. Everything lands in .venv; which Python makes it: .ci/venv.sh.
# PYTHON=... chooses the Python, ARGS=... is added to the command or to pytest.

SHELL = /bin/sh
VENV = .venv
PY = $(VENV)/bin/python
INSTALL = @sh .ci/venv.sh install $(VENV)
ARGS =

export PYTHONNOUSERSITE = 1
.NOTPARALLEL:
.PHONY: help demo test check lint bench clean

help:
	@echo 'make demo    prefill once, decode elsewhere: installs what it needs and runs "kvferry demo" on a real model'
	@echo 'make test    the tests (no model, no network, no system tool)'
	@echo 'make check   make lint, then make test'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   every benchmark; results in benchmarks/results/'
	@echo 'make clean   remove .venv, caches and build products; cached model bundles stay'

demo:
	@echo 'The demo also writes a model bundle of about 0.7 GB into the user cache, once.'
	$(INSTALL) demo
	@$(VENV)/bin/kvferry demo $(ARGS)

test:
	$(INSTALL) test
	@$(PY) -m pytest -n 2 --dist loadscope -m 'not real_model and not reference and not macos' $(ARGS)

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
	@for name in restore save growth; do \
	  result="benchmarks/results/$$name.json"; \
	  echo "== benchmarks/$$name.py"; \
	  $(PY) "benchmarks/$$name.py" --json $(ARGS) > "$$result.part" || { rm -f "$$result.part"; exit 1; }; \
	  mv "$$result.part" "$$result"; cat "$$result"; \
	done

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvstore runtime sync tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
