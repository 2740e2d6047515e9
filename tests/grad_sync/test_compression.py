"""bfloat16 on the wire: nothing that rounding takes is lost, whatever happens to the buckets."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import CheckpointError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.grad_sync._buckets import Bucket
from paddle_recompute.grad_sync._compression import GradientCompression
from tests.ranks import each_on_ranks

TWO_AND_ONE = [Bucket((2, 0), (3, 2)), Bucket((1,), (4,))]
ONE_AND_NONE = [Bucket((0, 1), (2, 4))]
SIZES = {0: 2, 1: 4, 2: 3}


def numbers(size: int, seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(size).astype("float32"))


def step(wire: GradientCompression, buckets: list[Bucket], seed: int = 0) -> dict[int, np.ndarray]:
    """Send the same gradients as ever in `buckets`; returns what was sent of each parameter."""
    wire.begin()
    sent = {}
    for bucket in buckets:
        flat = paddle.concat([numbers(SIZES[index], seed + index) for index in bucket.members])
        pieces = np.split(
            wire.encode(flat, bucket).astype("float32").numpy(), np.cumsum(bucket.sizes)[:-1]
        )
        sent.update(zip(bucket.members, pieces, strict=True))
    wire.commit()
    return sent


def residuals(wire: GradientCompression) -> dict[int, list[float]]:
    return {index: flat.tolist() for index, flat in sorted(wire.residuals.items())}


def made() -> GradientCompression:
    return GradientCompression("bf16", error_feedback=True, is_gloo=True)


def test_new_buckets_keep_what_is_owed_also_of_parameters_that_are_in_none() -> None:
    wire = made()
    step(wire, TWO_AND_ONE)
    before = residuals(wire)
    assert sorted(before) == [0, 1, 2]
    other = made()
    step(other, TWO_AND_ONE)
    # The residuals count in the new bucket as they would have in the old ones.
    assert np.array_equal(step(wire, ONE_AND_NONE)[1], step(other, TWO_AND_ONE)[1])
    assert residuals(wire)[2] == before[2]


def test_a_step_that_is_sent_again_counts_once() -> None:
    once, twice = made(), made()
    for wire in (once, twice):
        step(wire, TWO_AND_ONE)
    twice.begin()
    for bucket in TWO_AND_ONE:
        twice.encode(numbers(sum(bucket.sizes), 7), bucket)
    sent = [step(wire, TWO_AND_ONE, seed=3) for wire in (once, twice)]
    assert all(np.array_equal(sent[0][index], sent[1][index]) for index in SIZES)
    assert residuals(once) == residuals(twice)


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("weight", np.zeros([3, 2], "float32"), r"'weight' .* \[3, 2\]; the parameter here has"),
        ("head.weight", np.zeros([2, 3], "float32"), "'head.weight' .* does not exist"),
    ],
)
def test_residuals_of_another_model_are_refused(key: str, array: np.ndarray, message: str) -> None:
    sync = GradientSync(paddle.nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=message):
        sync.set_state_dict({"num_synchronized": 3, "residuals": {key: array}})


def check_the_residuals_of_a_parameter_that_was_frozen_later_are_loaded() -> None:
    """Saved with b frozen, loaded into a model in which b is frozen from the start, saved again."""

    def made(as_list: bool) -> tuple[paddle.nn.LayerDict, GradientSync]:
        model = paddle.nn.LayerDict({name: paddle.nn.Linear(3, 3) for name in "abc"})
        source = model.parameters() if as_list else model
        return model, GradientSync(source, compression="bf16")

    def residuals_of(sync: GradientSync) -> dict[str, list[float]]:
        found = sync.state_dict()["residuals"]
        return {name: owed.flatten().tolist() for name, owed in found.items()}

    for as_list in (False, True):
        model, sync = made(as_list)
        for step in range(2):
            for parameter in model["b"].parameters():
                parameter.stop_gradient = step == 1
            with sync.last_backward():
                x = paddle.arange(3, dtype="float32").reshape([1, 3]) + 1.1
                paddle.add_n([layer(x).square().sum() for layer in model.values()]).backward()
            model.clear_gradients()
        saved = residuals_of(sync)
        assert any(saved["2" if as_list else "b.weight"]) and len(saved) == 6
        again, resumed = made(as_list)
        for parameter in again["b"].parameters():
            parameter.stop_gradient = True
        resumed.set_state_dict(sync.state_dict())
        assert residuals_of(resumed) == saved


test_on_two_ranks = each_on_ranks(
    check_the_residuals_of_a_parameter_that_was_frozen_later_are_loaded
)
