"""Rows of all ranks, and what every rank's loss owes to them; two real gloo ranks."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import all_gather_with_grad
from paddle_recompute.contrastive import gather
from paddle_recompute.errors import DataError, StaticGraphError, SyncError
from tests.contrastive.loss_reference import Array
from tests.ranks import run_ranks

# Of rank 0 and rank 1: even, uneven either way, and a rank without any.
SHAPES = [
    ((3, 4), (3, 4)),
    ((2, 4), (5, 4)),
    ((5, 4), (1, 4)),
    ((0, 4), (3, 4)),
    ((3, 4), (0, 4)),
    ((4,), (2,)),
    ((1, 2, 3), (2, 2, 3)),
]
DTYPES = ["float32", "float64", "bfloat16", "float16"]


def rows_of(case: int, rank: int) -> Array:
    """Multiples of 1/8 up to 2: exact in every type, and so are their sums and products."""
    random = np.random.default_rng([case, rank])
    return random.integers(-16, 17, SHAPES[case][rank]).astype(np.float64) / 8


def gathered_and_differentiated() -> None:
    """What arrives, and the gradient of (rank + 1) * sum(rows ** 2)."""
    rank = dist.get_rank()
    for case in range(len(SHAPES)):
        both = np.concatenate([rows_of(case, 0), rows_of(case, 1)])
        for dtype in DTYPES:
            tensor = paddle.to_tensor(rows_of(case, rank)).astype(dtype).detach()
            tensor.stop_gradient = False
            joined = all_gather_with_grad(tensor)
            assert joined.dtype == tensor.dtype
            wide = joined.astype("float64")  # a CPU cannot multiply float16
            ((rank + 1) * wide * wide).sum().backward()
            np.testing.assert_array_equal(wide.numpy(), both)
            gradient = tensor.grad
            if gradient is None and not tensor.shape[0]:  # Paddle 2.6 keeps none of no rows
                continue
            assert gradient.dtype == tensor.dtype
            expected = (1 + 2) * 2 * rows_of(case, rank)
            np.testing.assert_array_equal(gradient.astype("float64").numpy(), expected)


def test_rows_come_in_the_order_of_ranks_and_gradients_are_the_sum_over_them() -> None:
    run_ranks(gathered_and_differentiated, 2)


def trained(*shape: int, value: float = 1.0) -> paddle.Tensor:
    tensor = paddle.full(shape, value)
    tensor.stop_gradient = False
    return tensor


def everything_else() -> None:
    """What else two ranks can tell, in one launch."""
    rank = dist.get_rank()

    # The engine gives one gradient to both operands of a sum: summing in place would spoil it.
    own, other = trained(2, 3), trained(4, 3)
    ((all_gather_with_grad(own) + other) * (rank + 1.0)).sum().backward()
    np.testing.assert_array_equal(other.grad.numpy(), np.full((4, 3), rank + 1.0))
    np.testing.assert_array_equal(own.grad.numpy(), np.full((2, 3), 3.0))

    # Twice in one graph, through a group: twice as much, summed over 2 ranks by the outer gathering
    # and again by the inner one.
    group = dist.new_group([0, 1])
    own = trained(1 + rank, 2, value=3.0)
    twice = all_gather_with_grad(all_gather_with_grad(own, group) * 2, group)
    twice.sum().backward()
    assert twice.shape == [6, 2]
    np.testing.assert_array_equal(own.grad.numpy(), np.full((1 + rank, 2), 2.0 * 2 * 2))

    # No gradient is asked for.
    assert all_gather_with_grad(paddle.ones([2, 2])).stop_gradient
    with paddle.no_grad():
        assert all_gather_with_grad(own).stop_gradient

    with pytest.raises(SyncError, match=rf"rank {rank} has \[rows, {3 + rank}\]"):
        all_gather_with_grad(paddle.ones([2, 3 + rank]))
    with pytest.raises(SyncError, match="only the number of rows may differ"):
        all_gather_with_grad(paddle.ones([2, 3], "float32" if rank else "float64"))
    with pytest.raises(SyncError) as frozen:
        all_gather_with_grad(paddle.ones([2, 3]) if rank else trained(2, 3))
    assert ("with gradient" in str(frozen.value)) == (rank == 0)
    joined = all_gather_with_grad(trained(2, 3)).sum()
    joined.backward(retain_graph=True)
    with pytest.raises(SyncError, match="can run once only"):
        joined.backward()
    assert all_gather_with_grad(paddle.full([1], float(rank))).tolist() == [0.0, 1.0]


def test_two_ranks_agree_or_are_told() -> None:
    run_ranks(everything_else, 2)


# ------------------------------------------------------------------------- a single process


def test_one_process_gets_its_tensor_back() -> None:
    tensor = paddle.ones([2, 3])
    assert all_gather_with_grad(tensor) is tensor


@pytest.mark.parametrize("tensor", [paddle.ones([]), paddle.ones([2], "int64")])
def test_rows_of_a_floating_type_are_required(tensor: paddle.Tensor) -> None:
    with pytest.raises(DataError, match=r"allowed is \[rows, ...\] of a floating dtype"):
        all_gather_with_grad(tensor)


def test_rank_that_has_not_joined_the_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SyncError, match=r"one of 2 ranks .*init_parallel_env\(\) first"):
        all_gather_with_grad(paddle.ones([2, 3]))


def test_program_with_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "has_other_ranks", lambda _: True)
    paddle.enable_static()
    try:
        with (
            paddle.static.program_guard(paddle.static.Program()),
            pytest.raises(StaticGraphError, match=r"in dygraph only, .*ContrastiveLoss"),
        ):
            all_gather_with_grad(paddle.static.data("x", [2, 3]))
    finally:
        paddle.disable_static()
