# Two commands need nothing but Python >= 3.10 (with venv) and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
DEMO_VENV := .venv-demo
# This machine's arithmetic is compared with itself; more threads than cores only add noise.
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-all quality style bench clean

demo: $(DEMO_VENV)/.done
	$(DEMO_VENV)/bin/margingate demo $(ARGS)

test: $(VENV)/.done
	$(VENV)/bin/python -m pytest -m "not long" $(ARGS)

test-all: $(VENV)/.done
	$(VENV)/bin/python -m pytest $(ARGS)

quality: $(VENV)/.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

style: $(VENV)/.done
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.done
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m evals cost --systems off,exact $(ARGS)

clean:
	rm -rf $(VENV) $(DEMO_VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.done: requirements/test.txt requirements/demo.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(DEMO_VENV)/.done: requirements/demo.txt pyproject.toml
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
