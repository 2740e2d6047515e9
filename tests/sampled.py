"""Long tables of which Paddle 2.6.2 runs a part in ``make test26``, the rest in ``bench26-matrix``.

On Paddle 3.3.1 they are run whole. Each kind of case stays on both.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

import pytest

_TRAINED = "tests/app/trainer/test_same_training.py::"
_PARITY = "tests/app/parity/test_command.py::"
_STATIC = "tests/static_graph/"

EVERY = {
    # Each n-th case. The loss of a Program is compiled for each of them.
    "tests/contrastive/test_matryoshka.py::test_every_combination_is_that_of_the_reference": 5,
    "tests/contrastive/test_loss_static.py::"
    "test_program_has_the_loss_and_gradients_of_the_reference": 3,
    _STATIC + "test_recompute.py::test_odd_graph": 2,
    _STATIC + "test_recompute.py::test_a_batch_norm_leaves_its_running_statistics": 2,
    _STATIC + "test_train_step.py::test_branches_with_dropout_repeat_their_bits_at_every_start": 2,
    _STATIC + "test_comparison.py::test_a_right_program_trains_as_if_it_were_not_compared": 2,
    _STATIC + "test_detached.py::test_what_was_detached_keeps_its_numbers": 2,
    _STATIC + "test_contrastive_ranks.py::test_negatives_of_all_ranks": 2,
    # Runs of the application, whose steps are compared in the rooms of the library.
    _TRAINED + "test_a_program_trains_what_dygraph_trains": 3,
    _TRAINED + "test_a_resumed_run_repeats_the_bits": 3,
    _TRAINED + "test_a_run_is_resumed_in_the_other_mode": 2,
    "tests/app/encoder/test_own.py::test_it_is_trained_evaluated_and_encodes": 2,
    "tests/app/trainer/test_trainer.py::test_a_finished_run_without_a_record_is_evaluated": 2,
    "tests/offload/test_named.py::test_the_yaml_alone_turns_it_on": 2,
    "tests/offload/test_sequential.py::test_five_steps_give_the_bits_of_the_plain_chain": 2,
    "tests/examples/test_examples.py::test_train_contrastive_finds_what_it_learned": 2,
}
LEFT_OUT = {
    # Commands with another test that runs them on both.
    _PARITY + "test_a_model_that_fleets_recompute_refuses_is_compared_without_it",
    _PARITY + "test_a_model_of_ones_own_with_the_gradient_cache_starts_from_the_same_weights",
    "tests/doctor/test_command.py::test_two_ranks_with_a_warning_are_sound_and_the_exit_code_is_0",
}


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark what `make test26` leaves out as ``matrix``."""
    if not version("paddlepaddle").startswith("2.6"):
        return
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in LEFT_OUT or seen[name] % EVERY.get(name, 1):
            item.add_marker(pytest.mark.matrix)
        seen[name] += 1
