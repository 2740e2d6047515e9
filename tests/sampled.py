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
    "tests/contrastive/test_loss.py::test_starts_of_vectors_have_the_loss_of_the_reference": 3,
    "tests/contrastive/test_loss_static.py::"
    "test_program_has_the_loss_and_gradients_of_the_reference": 7,
    "tests/machines/test_several_machines.py::test_typo_in_an_override_on_one_machine": 2,
    "tests/offload/test_ranks.py::test_two_ranks_have_the_bits_of_the_plain_chain": 2,
    "tests/offload/test_sequential.py::test_steps_give_the_bits_of_the_plain_chain": 2,
    "tests/recompute/test_side_effects.py::test_filled_state": 7,
    "tests/sharding/test_state.py::test_a_run_goes_on_with_another_number_of_ranks": 2,
    "tests/app/trainer/test_offloaded_runs.py::test_a_run_of_which_a_rank_was_killed_resumes": 3,
}
EVERY_ON_26 = {
    _STATIC + "recompute.py::test_a_batch_norm_leaves_its_running_statistics": 2,
    _STATIC + "comparison.py::test_a_right_program_trains_as_if_it_were_not_compared": 2,
    _STATIC + "grad_cache.py::test_every_bit_is_that_of_dygraph_with": 2,
    _STATIC + "comparison.py::test_a_program_that_is_wrong_is_refused_and_nothing_trained": 3,
    _STATIC + "ranks.py::test_the_other_rank_ends_in_error_and_names_the_rank": 2,
    _STATIC + "recompute.py::test_odd_graph": 3,
    _STATIC + "train_step.py::test_recompute_changes_no_bit": 2,
    _STATIC + "train_step.py::test_two_ranks_are_one_process_with_the_joined_batch": 2,
    _STATIC + "minimize.py::test_bfloat16": 2,
    _STATIC + "minimize.py::test_segments_are_the_calls_of_wrapped_layers": 2,
    _STATIC + "minimize.py::test_with_recompute_it_trains_as_paddles_own_minimize": 2,
    _STATIC + "minimize.py::test_merging_two_equal_runs_is_one_run": 2,
    "tests/contrastive/test_loss_static.py::"
    "test_program_has_the_loss_and_gradients_of_the_reference": 13,
    # Runs of the application, whose steps are compared in the rooms of the library.
    _TRAINED + "test_a_program_trains_what_dygraph_trains": 6,
    "tests/app/encoder/test_attention.py::test_it_computes_the_bits_of_paddle": 2,
    "tests/app/encoder/test_own.py::test_it_is_trained_evaluated_and_encodes": 2,
    "tests/docs/test_code.py::test_python_runs": 2,
    "tests/examples/test_examples.py::test_it_learns": 3,
    "tests/fake_device/test_faults.py::test_a_step_fits_into_memory_in_which_another_fails": 2,
    "tests/fake_device/test_offload_sequential.py::"
    "test_mixed_precision_gives_the_bits_of_the_plain_chain": 2,
    "tests/grad_sync/test_gradient_sync.py::test_on_two_ranks": 2,
    "tests/grad_sync/test_start_values.py::test_on_two_ranks": 3,
    "tests/grad_sync/test_what_takes_part.py::test_on_two_ranks": 3,
    "tests/offload/test_ranks.py::test_the_bytes_of_a_rank_follow_the_formula": 2,
    "tests/recompute/test_doors.py::test_cases_of_the_contract": 3,
    "tests/recompute/test_doors.py::test_the_second_forward_has_the_state_of_the_first": 3,
    "tests/sharding/test_state.py::test_a_run_goes_on_with_another_number_of_ranks": 3,
}
LEFT_OUT_ON_26 = {
    # The command runs in another test; what differs is told by the comparison, which runs on both.
    _PARITY + "test_a_model_that_fleets_recompute_refuses_is_compared_without_it",
    _PARITY + "test_recompute_that_keeps_parts_is_compared_without_fleet",
    _PARITY + "test_a_model_of_ones_own_with_the_gradient_cache_starts_from_the_same_weights",
    "tests/doctor/test_command.py::test_a_fault_on_one_of_two_ranks_is_named",
    "tests/examples/test_trainer.py::test_clip_learns_on_two_ranks",
    "tests/sharding/test_trainer.py::"
    "test_the_trainer_has_the_bits_of_the_replicated_run_and_resumes",
    # Runs that end, resume or change their ranks: the application has the same code for both.
    _TRAINED + "test_a_resumed_run_repeats_the_bits",
    _TRAINED + "test_another_number_of_ranks_goes_on",
    _TRAINED + "test_the_temperature_is_trained_without_weight_decay",
    _TRAINED + "test_two_ranks_train_what_one_trains",
    "tests/app/trainer/test_offloaded_runs.py::test_a_run_of_which_a_rank_was_killed_resumes",
    "tests/app/trainer/test_statistics_of_ranks.py::"
    "test_check_every_tells_of_buffers_once_and_all_get_those_of_rank_0",
    "tests/app/trainer/test_statistics_of_ranks.py::"
    "test_evaluated_resumed_and_evaluated_again_is_one_number",
    "tests/app/retrieval/test_pretrained.py::test_init_writes_a_configuration_that_trains",
    "tests/docs/test_code.py::test_the_changed_scripts_have_the_losses_of_the_unchanged_ones",
    "tests/examples/test_examples.py::test_large_batch_learns_in_chunks_of_the_size_it_says",
    "tests/examples/test_examples.py::test_offload_sequential_learns",
    "tests/examples/test_examples.py::test_train_contrastive_finds_what_it_learned",
    # Answers and deaths of ranks, and the size of a chain, as with 3.3 on the same device.
    "tests/fake_device/test_answers_of_ranks.py::test_ranks_encode_together_and_notice_what_differs",
    "tests/fake_device/test_answers_of_ranks.py::test_the_doctor_knows_the_mean_of_the_ranks",
    "tests/fake_device/test_dead_peer.py::"
    "test_the_other_rank_does_not_wait_for_ever_inside_the_device",
    "tests/fake_device/test_offload_sequential.py::"
    "test_a_stack_that_the_device_cannot_hold_trains_on_it",
    # Refusals and limits of time that no operator of Paddle has a part in.
    "tests/distributed/test_failed_steps.py::test_a_rank_that_hangs_ends_too",
    "tests/distributed/test_ranks_that_differ.py::test_a_rank_that_comes_after_the_limit_ends_too",
    "tests/offload/test_ranks.py::test_three_ranks_have_the_bits_of_a_chain_on_the_host",
    "tests/patch/test_patch.py::test_the_command_runs_a_script_unchanged",
    "tests/recompute/test_debug.py::test_the_environment_debugs_every_call",
    "tests/test_faults.py::test_nothing_of_paddles_runs_after_a_fault",
    "tests/sharding/test_step.py::"
    "test_a_rank_that_stops_before_the_new_values_is_given_up_after_peer_timeout",
    _STATIC + "grad_cache.py::test_masks_that_are_not_replayed_are_an_error_and_no_update",
    _STATIC + "grad_cache.py::test_parameters_of_the_loss_are_not_decayed",
    _STATIC + "grad_cache.py::test_what_does_not_fit_together_is_refused",
    _STATIC + "ranks.py::test_numbers_of_rows_that_differ_are_refused",
}
EVERY_ON_DEVICE = {
    # Each copy, collective and operator of these is in each of their cases.
    _CACHE + ".py::test_embeddings_in_half_precision": 2,
    _CACHE + ".py::test_same_bits_as_one_loss_over_the_same_chunks": 7,
    _CACHE + ".py::test_with_recompute_inside": 3,
    _CACHE + "_replay.py::test_each_chunk_is_encoded_without_a_graph_and_once_more_with_one": 2,
    _CACHE + "_replay.py::test_what_a_chunk_changes_for_the_next_is_seen": 8,
    # Buckets of each mode, and how often they are sent.
    "tests/grad_sync/test_gradient_sync.py::test_on_two_ranks": 4,
    "tests/offload/test_away.py::test_threads_may_train_in_turns": 4,
    "tests/offload/test_named.py::test_steps_give_the_bits_of_the_plain_model": 3,
    "tests/offload/test_ranks.py::test_two_ranks_have_the_bits_of_the_plain_chain": 8,
    "tests/offload/test_sequential.py::test_steps_give_the_bits_of_the_plain_chain": 7,
    "tests/offload/test_sequential.py::test_two_ranks_give_the_bits_of_the_plain_chain": 2,
    "tests/recompute/test_lifetime.py::"
    "test_a_block_that_stores_a_tensor_holds_what_it_holds_without_recompute": 5,
    _STEP + "host_reads.py::test_a_step_reads_nothing": 7,
    _STEP + "host_reads.py::test_a_step_that_is_not_finite_leaves_the_parameters_alone": 5,
    _STEP + "host_reads.py::test_what_is_read_does_not_change_the_numbers": 5,
    _STEP + "operators.py::test_a_step_has_few_operators_more_than_a_bare_loop": 4,
    _STEP + "operators.py::test_recompute_adds_the_second_forward_and_nothing_else": 2,
}
LEFT_OUT_ON_DEVICE = {
    # Threads of Python, and a flag of views in host memory.
    _CACHE + ".py::test_hooks_of_another_thread_s_step_are_its_own",
    "tests/offload/test_ranks.py::test_the_bits_do_not_depend_on_whether_slices_are_views",
    # Which function of Python is called when: no copy and no stream has a part in it.
    *(
        f"{_CACHE}.py::test_{name}"
        for name in (
            "a_step_in_a_step_adds_to_the_sum",
            "evaluate_is_the_loss_alone",
            "hooks_can_be_removed_and_come_back_after_an_error",
            "hooks_on_the_embeddings_change_their_gradient",
            "methods_of_one_layer_are_encoders",
            "more_heads_than_one",
            "more_inputs_go_through_the_second_encoder_and_arguments_to_the_loss",
        )
    ),
    _CACHE + "_replay.py::test_a_tower_that_is_not_trained_is_run_once",
    _CACHE + "_replay.py::test_an_encoder_that_writes_into_its_input_is_told",
    _CACHE + "_replay.py::test_streams_of_numpy_and_python",
    "tests/grad_sync/test_gradient_sync.py::"
    "test_a_wrapped_model_and_a_hybrid_group_give_the_same_bits",
    "tests/grad_sync/test_gradient_sync.py::"
    "test_check_every_names_the_first_parameter_that_differs",
    "tests/offload/test_sequential.py::test_micro_batches_inside_a_shard_give_the_same_sum",
    "tests/offload/test_sequential.py::test_state_travels_between_plain_and_offloaded",
    _STEP + "train_step.py::test_micro_batches_are_one_batch",
    # Devices that are full: tests/fake_device/test_faults.py.
    _CACHE + "_memory.py::test_the_peak_is_that_of_one_chunk",
}


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark what the check leaves out with this Paddle, on this device, as ``matrix``."""
    every, left_out = EVERY, set[str]()
    if (_installed._installed_version() or "").startswith("2.6"):
        every, left_out = every | EVERY_ON_26, left_out | LEFT_OUT_ON_26
    if selected.is_selected():
        every, left_out = every | EVERY_ON_DEVICE, left_out | LEFT_OUT_ON_DEVICE
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in left_out or seen[name] % every.get(name, 1):
            item.add_marker(pytest.mark.matrix)
        seen[name] += 1
