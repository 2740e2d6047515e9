# `make train` and `make test` set up what they need. Every target is cheap the second time.
#
#   PYTHON=...  the interpreter to make the environments with (3.10, 3.11 or 3.12)
#   ARGS=...    more arguments: key=value for train, pytest's own for test and test26

SHELL := /bin/bash
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

# $(call install,FOLDER,REQUIREMENTS): keeps an environment that works, makes one otherwise.
define install
$(FIND_PYTHON); \
$(1)/bin/python -c '$(PROBE)' >/dev/null 2>&1 || "$$found" -m venv --clear $(1)
@echo "$(1): installing $(2), which takes a minute or two the first time"
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -r $(2) -e .
@touch $@
endef

PACKAGE := $(shell find paddle_recompute -name '*.py')

.PHONY: venv venv26 venv-torch venv-nlp venv-formers venv-etcd test-nlp test-formers train parity parity26 test test26 test-device test-device26 fuzz fuzz26 fuzz-readers
.PHONY: lint bench wheel-test clean

venv: .venv/.installed
venv26: .venv26/.installed

.venv/.installed: setup.py requirements/paddle33.txt requirements/common.txt
	@$(call install,.venv,requirements/paddle33.txt)

.venv26/.installed: setup.py requirements/paddle26.txt requirements/common.txt
	@$(call install,.venv26,requirements/paddle26.txt)

# A benchmark's alone; it has nothing of the library in it.
venv-torch: .venv-torch/.installed
.venv-torch/.installed: requirements/torch.txt
	@$(FIND_PYTHON); \
	.venv-torch/bin/python -c '$(PROBE)' >/dev/null 2>&1 || "$$found" -m venv --clear .venv-torch
	@echo ".venv-torch: installing $<, which takes some minutes the first time"
	@.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# PaddleNLP (Paddle 2.6.2) and PaddleFormers (Paddle 3.3.1), for benchmarks/third_party.py and for
# the tests of the mixins and the weights, which are skipped elsewhere.
venv-nlp: .venv-nlp/.installed
venv-formers: .venv-formers/.installed

.venv-nlp/.installed: setup.py requirements/nlp.txt requirements/common.txt
	@$(call install,.venv-nlp,requirements/nlp.txt)

.venv-formers/.installed: setup.py requirements/formers.txt requirements/common.txt
	@$(call install,.venv-formers,requirements/formers.txt)

# An etcd server and its client, with which Paddle's launcher restarts ranks.
venv-etcd: .venv-etcd/.installed
.venv-etcd/.installed: setup.py requirements/etcd.txt requirements/paddle33.txt requirements/common.txt
	@$(call install,.venv-etcd,requirements/etcd.txt)

THIRD_PARTY_TESTS := tests/integrations tests/weights/test_init_from.py tests/doctor/test_other_libraries.py \
    tests/examples/test_trainer.py

test-nlp: venv-nlp
	.venv-nlp/bin/python -m pytest $(THIRD_PARTY_TESTS) $(ARGS)

test-formers: venv-formers
	.venv-formers/bin/python -m pytest $(THIRD_PARTY_TESTS) $(ARGS)

train: venv
	@.venv/bin/python -m paddle_recompute train --config $(CONFIG) $(ARGS)

# Do dygraph and the static graph train the same? With Paddle 2.6: make parity26
parity: venv
	@.venv/bin/python -m paddle_recompute parity --config $(CONFIG) $(ARGS)

parity26: venv26
	@.venv26/bin/python -m paddle_recompute parity --config $(CONFIG) $(ARGS)

# Two processes: most tests need one core. make test PARALLEL= runs them one after the other.
PARALLEL ?= -n 2 --dist worksteal

test: venv wheel-test
	.venv/bin/python -m pytest $(PARALLEL) $(ARGS)

test26: venv26
	.venv26/bin/python -m pytest $(PARALLEL) $(ARGS)

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
        $(1)/bin/python -m pytest -q -s $(or $(ARGS),tests/fuzz) || exit 1; \
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
	READER_EXAMPLES=$(READER_EXAMPLES) .venv/bin/python -m pytest -q --timeout=0 tests/fuzz/test_readers.py

# On a simulated device, which g++ builds (tests/fake_device): the tests whose subject a device
# changes, with collectives and copies that are late.
DEVICE_TESTS := tests/fake_device \
    $(addprefix tests/recompute/test_,engine.py inputs.py nesting.py lifetime.py offload.py) \
    $(addprefix tests/recompute/test_,randomness.py amp.py) \
    $(addprefix tests/contrastive/test_,grad_cache.py grad_cache_replay.py gather.py) \
    tests/contrastive/test_grad_cache_memory.py \
    tests/grad_sync/test_gradient_sync.py \
    tests/offload \
    $(addprefix tests/train_step/test_,train_step.py mixed_precision.py host_reads.py) \
    tests/test_checkpoint.py
ON_DEVICE := PADDLE_RECOMPUTE_TEST_DEVICE=fake_device FAKE_COLLECTIVE_US=2000 FAKE_COPY_US=200

test-device: venv
	$(ON_DEVICE) .venv/bin/python -m pytest $(PARALLEL) $(DEVICE_TESTS) $(ARGS)

test-device26: venv26
	$(ON_DEVICE) .venv26/bin/python -m pytest $(PARALLEL) $(DEVICE_TESTS) $(ARGS)

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Each prints a table and writes it to benchmarks/results. sync and sync_scaling make networks of
# slow links, for which they need root and iproute2; sync_cost_model is a library of the latter.
# batch_size_study takes an hour and a half, and goes on where it stopped: make bench-batch_size_study
# contrastive_vs_sentence_transformers makes an environment with torch, .venv-torch.
bench: venv
	@for script in benchmarks/[a-z]*.py; do \
	    module=benchmarks.$$(basename $$script .py); \
	    case $$module in \
	        *.sync_cost_model|*.batch_size_study) continue;; \
	        *.contrastive_vs_sentence_transformers|*.third_party|*.peers|*.paddle_restart) $(MAKE) bench-$${module#*.} || exit 1; continue;; \
	        *.sync|*.sync_scaling) [ $$(id -u) = 0 ] || { echo "=== $$module: left out, needs root"; continue; };; \
	    esac; \
	    echo "=== python -m $$module"; \
	    .venv/bin/python -m $$module || exit 1; \
	done

# One of them: make bench-contrastive (peak memory and time per pair of large batches),
# bench-control_plane, bench-failures,
# bench-batch_size_study, bench-compile, bench-peers_that_die, bench-static_graph, bench26-static_graph,
# bench-contrastive_loss, bench-contrastive_matrix, bench-correctness, bench-host, bench26-host, bench-offload,
# bench-paddle_restart,
# bench-real_models, bench-recompute_cost, bench-sync, bench-sync_matrix, bench-sync_scaling, bench-third_party, bench-peers; with Paddle 2.6:
# make bench26-sync_matrix
bench-%: venv
	.venv/bin/python -m benchmarks.$*

bench-paddle_restart: venv-etcd
	.venv-etcd/bin/python -m benchmarks.paddle_restart $(ARGS)

# Some seconds for each of 19 models.
bench-third_party: venv-nlp venv-formers
	.venv-nlp/bin/python -m benchmarks.third_party --library paddlenlp $(ARGS)
	.venv-formers/bin/python -m benchmarks.third_party --library paddleformers $(ARGS)

# FairScale, torch's own and sentence-transformers beside fleet's and ours.
bench-peers: venv venv-torch
	.venv/bin/python -m benchmarks.peers $(ARGS)

# Needs the environment of the other library too.
bench-contrastive_vs_sentence_transformers: venv venv-torch
	.venv/bin/python -m benchmarks.contrastive_vs_sentence_transformers $(ARGS)

bench26-%: venv26
	.venv26/bin/python -m benchmarks.$*

# The wheel, not the work tree: is every module in it, does it work anywhere else?
wheel-test: build/.wheel-tested
build/.wheel-tested: .venv/.installed setup.py pyproject.toml tests/wheel_check.py $(PACKAGE) $(wildcard fleet_configs/*)
	@rm -rf build/lib build/bdist.* build/site dist
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/site dist/*.whl
	cd / && PYTHONPATH=$(CURDIR)/build/site $(CURDIR)/.venv/bin/python $(CURDIR)/tests/wheel_check.py $(CURDIR)
	@touch $@

# The environments stay: they are dear, and `make venv` keeps them right. rm -rf .venv* ends them.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
