"""Tests that cannot pass on the simulated device, each with the reason.

A key is the node id of a test, with or without its parameters, or a folder or module of tests.
Whatever is not named here has to pass on the simulated device as it does on the CPU.
"""

from __future__ import annotations

from paddle_recompute import _installed

_NO_ROWS = "where Paddle runs an operator on the CPU instead, a result of no rows stays there"
_ON_A_CPU = "what it says is about the CPU"
_UNSEEN = "the host cannot know when a collective on a stream begins"
_OWN = "a collective of the user's own, which a device waits for inside its driver"
_NOT_COUNTED = "Paddle 2.6 does not count the memory of devices other than GPUs"
_NO_BFLOAT16 = "Paddle 2.6 has no bfloat16 in collectives of devices other than GPUs"
_FORKED = "a forked child has none of the threads that are the device"
_NO_KERNEL = "RMSProp has no kernel there, and that of the CPU refuses its parameters"
_MORTAL = "tests/distributed/test_mortal_ranks.py::"
_MIXED = "tests/train_step/test_mixed_precision.py::"

_ON_BOTH = {
    "tests/contrastive/test_grad_cache_replay.py::"
    "test_a_compiled_batch_norm_has_the_bits_of_eager_execution": (
        "a Program's batch_norm leaves the running statistics there; comparing it refuses it"
    ),
    "tests/contrastive/test_gather.py::"
    "test_rows_come_in_the_order_of_ranks_and_gradients_are_the_sum_over_them": _NO_ROWS,
    "tests/grad_sync/test_gradient_sync.py::test_on_two_ranks[the_timeline]": _UNSEEN,
    "tests/train_step/test_host_reads.py::"
    "test_a_step_with_another_optimizer_reads_once": _NO_KERNEL,
    "tests/train_step/test_host_reads.py::"
    "test_after_a_divergence_the_next_step_is_finite[RMSProp]": _NO_KERNEL,
    "tests/test_checkpoint.py::"
    "test_a_kill_at_any_moment_of_saving_a_step_again_loses_nothing": _FORKED,
    "tests/offload/test_sequential.py::test_copies_of_a_state_dict_go_with_it": (
        "the copies are in host memory, which is not counted there"
    ),
    _MIXED + "test_on_a_cpu_it_is_refused_in_plain_words": _ON_A_CPU,
    _MORTAL + "test_the_other_rank_ends_in_error_and_names_the_rank_and_the_step"
    "[rank 0 killed]": _OWN,
}
_ON_26 = {
    "tests/recompute/test_lifetime.py": _NOT_COUNTED,
    "tests/recompute/test_offload.py::test_disk_holds_no_input_in_memory": _NOT_COUNTED,
    "tests/contrastive/test_grad_cache_memory.py": _NOT_COUNTED,
    "tests/grad_sync/test_gradient_sync.py": _NO_BFLOAT16,
    "tests/train_step/test_train_step.py::"
    "test_an_overflow_on_one_rank_skips_the_step_on_all": _NO_BFLOAT16,
}

_IS_26 = (_installed._installed_version() or "").startswith("2.6")
KNOWN: dict[str, str] = _ON_BOTH | (_ON_26 if _IS_26 else {})
