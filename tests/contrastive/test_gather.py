"""Rows of all ranks, and what every rank's loss owes to them; two real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import all_gather_with_grad
from paddle_recompute.contrastive import gather
from paddle_recompute.errors import DataError, StaticGraphError, SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.contrastive.loss_reference import Array, unit_rows
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


def gathered_and_differentiated() -> list[tuple[Array, Array]]:
    """Of each case and dtype: what arrives, and the gradient of (rank + 1) * sum(rows ** 2)."""
    rank, found = dist.get_rank(), []
    for case in range(len(SHAPES)):
        for dtype in DTYPES:
            tensor = paddle.to_tensor(rows_of(case, rank)).astype(dtype).detach()
            tensor.stop_gradient = False
            joined = all_gather_with_grad(tensor)
            assert joined.dtype == tensor.dtype
            wide = joined.astype("float64")  # a CPU cannot multiply float16
            ((rank + 1) * wide * wide).sum().backward()
            gradient = tensor.grad
            if gradient is None and not tensor.shape[0]:  # Paddle 2.6 keeps none of no rows
                gradient = tensor
            assert gradient.dtype == tensor.dtype
            found.append((wide.numpy(), gradient.astype("float64").numpy()))
    return found


def test_rows_come_in_the_order_of_ranks_and_gradients_are_the_sum_over_them() -> None:
    for rank, found in enumerate(run_ranks(gathered_and_differentiated, 2)):
        cases = [case for case in range(len(SHAPES)) for _ in DTYPES]
        assert len(found) == len(cases)
        for case, (joined, gradient) in zip(cases, found, strict=True):
            both = np.concatenate([rows_of(case, 0), rows_of(case, 1)])
            np.testing.assert_array_equal(joined, both)
            np.testing.assert_array_equal(gradient, (1 + 2) * 2 * rows_of(case, rank))


def everything_else() -> dict[str, Any]:
    """What else two ranks can tell, in one launch."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    # A view that is not contiguous.
    square = paddle.to_tensor(unit_rows((3, 3), rank), stop_gradient=False)
    found["transposed"] = all_gather_with_grad(square.t()).numpy()

    # The engine gives one gradient to both operands of a sum: summing in place would spoil it.
    own = paddle.ones([2, 3])
    other = paddle.zeros([4, 3])
    own.stop_gradient = other.stop_gradient = False
    ((all_gather_with_grad(own) + other) * (rank + 1.0)).sum().backward()
    found["other"], found["own"] = other.grad.numpy(), own.grad.numpy()

    # Twice in one graph, through a group.
    group = dist.new_group([0, 1])
    own = paddle.full([1 + rank, 2], 3.0)
    own.stop_gradient = False
    once = all_gather_with_grad(own, group)
    twice = all_gather_with_grad(once * 2, group)
    twice.sum().backward()
    found["twice"] = (list(twice.shape), own.grad.numpy())

    # No gradient is asked for.
    plain = all_gather_with_grad(paddle.ones([2, 2]))
    with paddle.no_grad():
        evaluated = all_gather_with_grad(own)
    found["stopped"] = (plain.stop_gradient, evaluated.stop_gradient)

    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(SyncError) as caught:
            call()
        return str(caught.value)

    found["dim"] = refused(lambda: all_gather_with_grad(paddle.ones([2, 3 + rank])))
    found["dtype"] = refused(
        lambda: all_gather_with_grad(paddle.ones([2, 3], "float32" if rank else "float64"))
    )
    frozen = paddle.ones([2, 3])
    frozen.stop_gradient = rank == 1
    found["frozen"] = refused(lambda: all_gather_with_grad(frozen))

    again = paddle.ones([2, 3])
    again.stop_gradient = False
    joined = all_gather_with_grad(again).sum()
    joined.backward(retain_graph=True)
    found["again"] = refused(joined.backward)
    found["after"] = all_gather_with_grad(paddle.full([1], float(rank))).tolist()
    return found


def test_two_ranks_agree_or_are_told() -> None:
    results = run_ranks(everything_else, 2)
    for rank, found in enumerate(results):
        both = np.concatenate([unit_rows((3, 3), 0).T, unit_rows((3, 3), 1).T])
        np.testing.assert_array_equal(found["transposed"], both)
        np.testing.assert_array_equal(found["other"], np.full((4, 3), rank + 1.0))
        np.testing.assert_array_equal(found["own"], np.full((2, 3), 3.0))
        shape, gradient = found["twice"]
        assert shape == [6, 2]
        # Twice as much, summed over 2 ranks by the outer gathering and again by the inner one.
        np.testing.assert_array_equal(gradient, np.full((1 + rank, 2), 2.0 * 2 * 2))
        assert found["stopped"] == (True, True)
        assert f"rank {rank} has [rows, {3 + rank}]" in found["dim"]
        assert "only the number of rows may differ" in found["dtype"]
        assert ("with gradient" in found["frozen"]) == (rank == 0)
        assert "can run once only" in found["again"]
        assert found["after"] == [0.0, 1.0]


class Below(paddle.nn.Layer):
    """Parameters below and above a gathering: the upper ones are being sent while it goes back."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(3)
        self.below = paddle.nn.Sequential(*[paddle.nn.Linear(16, 16) for _ in range(3)])
        self.above = paddle.nn.Sequential(*[paddle.nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.above(all_gather_with_grad(self.below(x)))


STEPS = 12


def batch(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([step, rank]).normal(size=(3 + 2 * rank, 16)))


def train(mode: str) -> tuple[list[Array], int]:
    """The gradients of all steps, and how many buckets were sent early in the last one."""
    paddle.set_default_dtype("float64")
    model, rank = Below(), dist.get_rank()
    sync = GradientSync(model, mode=mode, bucket_bytes=1000, first_bucket_bytes=1000)
    gradients: list[Array] = []
    for step in range(STEPS):
        with sync.last_backward():
            ((rank + 1) * model(batch(step, rank)).square().mean()).backward()
        gradients.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters()]))
        model.clear_gradients()
    return gradients, sync.num_early_buckets


def test_gathering_and_overlapped_synchronization_share_a_backward() -> None:
    """Their collectives run at once, in groups of their own: right, and nobody waits forever."""
    results = run_ranks(train, 2, mode="overlap")
    paddle.set_default_dtype("float64")
    try:
        model = Below()
        for step in range(STEPS):
            rows = paddle.concat([batch(step, 0), batch(step, 1)])
            ((1 + 2) / 2 * model(rows).square().mean()).backward()
            expected = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
            model.clear_gradients()
            for gradients, num_early in results:
                np.testing.assert_allclose(gradients[step], expected, rtol=0, atol=1e-13)
                assert num_early > 3  # more than the layers above the gathering
    finally:
        paddle.set_default_dtype("float32")


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
