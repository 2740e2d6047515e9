"""Long tables of which the check runs a sample, above all where it runs them a second time.

The rest is of the matrix: ``make bench-matrix``, ``make bench26-matrix``, and on the simulated
device ``make test-device ARGS="-m matrix"``, the same with ``test-device26``. The first case of
each table always runs.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paddle_recompute import _installed
from tests.fake_device import selected

_CACHE = "tests/contrastive/test_grad_cache"
_PARITY = "tests/app/parity/test_command.py::"
_STATIC = "tests/static_graph/test_"
_STEP = "tests/train_step/test_"
_TRAINED = "tests/app/trainer/test_same_training.py::"

EVERY = {
    # Of each n cases one: n fits no period of the table. The fuzzers draw such cases, too.
    "tests/contrastive/test_loss.py::test_every_combination_is_that_of_the_reference": 5,
    "tests/contrastive/test_loss.py::test_loss_and_gradients_are_those_of_the_reference": 5,
    "tests/contrastive/test_loss_static.py::"
    "test_program_has_the_loss_and_gradients_of_the_reference": 7,
    "tests/recompute/test_side_effects.py::test_filled_state": 7,
}
EVERY_ON_26 = {
    _STATIC + "recompute.py::test_a_batch_norm_leaves_its_running_statistics": 2,
    _STATIC + "comparison.py::test_a_right_program_trains_as_if_it_were_not_compared": 2,
    # Runs of the application, whose steps are compared in the rooms of the library.
    _TRAINED + "test_a_program_trains_what_dygraph_trains": 3,
    _TRAINED + "test_a_resumed_run_repeats_the_bits": 3,
    "tests/app/encoder/test_own.py::test_it_is_trained_evaluated_and_encodes": 2,
    "tests/offload/test_ranks.py::test_two_ranks_have_the_bits_of_the_plain_chain": 2,
    "tests/recompute/test_doors.py::test_the_second_forward_has_the_state_of_the_first": 3,
    "tests/offload/test_sequential.py::test_steps_give_the_bits_of_the_plain_chain": 2,
    "tests/examples/test_examples.py::test_train_contrastive_finds_what_it_learned": 2,
}
LEFT_OUT_ON_26 = {
    # The command runs in another test; what differs is told by the comparison, which runs on both.
    _PARITY + "test_a_model_that_fleets_recompute_refuses_is_compared_without_it",
    _PARITY + "test_a_model_of_ones_own_with_the_gradient_cache_starts_from_the_same_weights",
    "tests/doctor/test_command.py::test_a_fault_on_one_of_two_ranks_is_named",
    "tests/examples/test_trainer.py::test_clip_learns_on_two_ranks",
    "tests/sharding/test_trainer.py::"
    "test_the_trainer_has_the_bits_of_the_replicated_run_and_resumes",
}
EVERY_ON_DEVICE = {
    # Each copy, collective and operator of these is in each of their cases.
    _CACHE + ".py::test_same_bits_as_one_loss_over_the_same_chunks": 3,
    _CACHE + "_memory.py::test_the_peak_is_that_of_one_chunk": 2,
    _CACHE + "_replay.py::test_what_is_changed_between_the_forwards_is_seen": 7,
    "tests/offload/test_named.py::test_steps_give_the_bits_of_the_plain_model": 2,
    "tests/offload/test_ranks.py::test_two_ranks_have_the_bits_of_the_plain_chain": 3,
    "tests/offload/test_sequential.py::test_steps_give_the_bits_of_the_plain_chain": 5,
    _STEP + "host_reads.py::test_a_step_reads_nothing": 7,
}


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark what the check leaves out with this Paddle, on this device, as ``matrix``."""
    every = EVERY
    left_out: set[str] = set()
    if (_installed._installed_version() or "").startswith("2.6"):
        every, left_out = every | EVERY_ON_26, left_out | LEFT_OUT_ON_26
    if selected.is_selected():
        every = every | EVERY_ON_DEVICE
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in left_out or seen[name] % every.get(name, 1):
            item.add_marker(pytest.mark.matrix)
        seen[name] += 1
