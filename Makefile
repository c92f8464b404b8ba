# Every target sets up .venv by itself when it is missing or older than requirements.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

CUDA   := .venv-cuda/bin
CUDA_READY := .venv-cuda/.ready

.PHONY: help setup demo test sanitize lint notebooks cuda-build gpu bench clean
help:            ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv from requirements.txt

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "minillm needs Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: $(READY)   ## the main job: every step on the real model, one table
	$(BIN)/minillm ladder

test: $(READY)   ## the tests, the lessons' doctests and the grader's own checks
	$(BIN)/python -m pytest

sanitize: $(READY)  ## the kernels' tests in the simulator under AddressSanitizer, UBSan and ThreadSanitizer
	$(BIN)/python tests/sanitized.py address
	$(BIN)/python tests/sanitized.py thread

lint: $(READY)   ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

notebooks: $(READY)  ## run every notebook top to bottom
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=300 notebooks

# A CUDA build of torch, in an environment of its own: 7 GB, two minutes.
$(CUDA_READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-cuda
	$(CUDA)/python -m pip install --disable-pip-version-check torch==2.14.1
	sed '/^torch==/d' requirements.txt > .venv-cuda/requirements.txt
	$(CUDA)/python -m pip install --disable-pip-version-check -r .venv-cuda/requirements.txt
	$(CUDA)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

cuda-build: $(CUDA_READY)  ## compile, link and load the kernels for real GPUs (needs nvcc 13, no GPU)
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-8.0 9.0}" $(CUDA)/python -m minillm.kernels.build cuda

gpu: $(CUDA_READY)  ## the kernels' tests and benchmark on a GPU, under compute-sanitizer where there is one
	@$(CUDA)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no GPU here: torch.cuda.is_available() is False")'
	$(CUDA)/python -m pytest tests/test_kernels.py tests/test_kernels_llama.py tests/test_engine.py tests/test_kernels_build.py
	@if command -v compute-sanitizer >/dev/null; then \
	  compute-sanitizer --error-exitcode 1 $(CUDA)/python -m pytest tests/test_kernels.py -k "cuda and not 4100 and not distribution"; \
	else echo "no compute-sanitizer here: skipped"; fi
	$(CUDA)/python benchmarks/kernels.py --save benchmarks/results/kernels_gpu.json

bench: $(READY)  ## every benchmark, with its checks
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:           ## remove .venv and caches (not the downloaded model)
	rm -rf $(VENV) .venv-cuda .pytest_cache .ruff_cache .hypothesis
