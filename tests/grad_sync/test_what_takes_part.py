"""Whatever has a gradient when the step ends is synchronized, on two real ranks."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import results_of
from tests.ranks import each_on_ranks

IS_26 = paddle.__version__.startswith("2.6")
STEPS = 4
EACH_ITS_BUCKET = {"bucket_bytes": 1, "first_bucket_bytes": 1}
MODES = ("fused", "overlap", "fleet")


def weight(size: int = 2, dtype: str = "float32") -> paddle.Tensor:
    made = paddle.base.framework.EagerParamBase.from_tensor(paddle.ones([size]).astype(dtype))
    made.stop_gradient = False
    return made


def backward(*weights: paddle.Tensor) -> None:
    """The gradient of each becomes 1 on rank 0 and 2 on rank 1: their mean is 1.5."""
    rank = dist.get_rank()
    paddle.add_n([(one.astype("float32") * (rank + 1)).sum() for one in weights]).backward()


Gradients = list[float | None]


def gradients_of(*weights: paddle.Tensor) -> Gradients:
    """Their first elements; clears them."""
    found = [None if w.grad is None else w.grad.astype("float32")[0].item() for w in weights]
    for one in weights:
        one.clear_gradient(False)
    return found


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(PaddleRecomputeError) as caught:
        call()
    return str(caught.value)


class Step(NamedTuple):
    """What is done with the parameters a, b, c and d in one step, and the mean gradients.

    Attributes:
        means: Of each; that of a is 1 on rank 0 and 2 on rank 1, of b ten times as much, and so on.
        last: What has a backward in `last_backward`, one after the other; on each rank.
        before: What has one before it.
        frozen: What has ``stop_gradient`` from then on.
    """

    means: Gradients
    last: tuple[str, str] = ("", "")
    before: str = ""
    frozen: str = ""


BOTH = ("ab", "ab")
WANTED = {
    "other parts on each rank": [
        Step([1.5, 15.0, 150.0, None], ("abc", "cba")),  # learnt here; nobody uses d
        Step([1.5, 5.0, 100.0, None], ("ab", "ac")),  # fewer than expected
        Step([1.5, None, None, None], ("a", "a")),
        Step([2.0, 15.0, 150.0, None], ("abca", "abc")),  # a twice on one rank only
        Step([1.5, 10.0, None, 500.0], ("da", "ab")),  # one that had none so far
        Step([None, None, 100.0, None], ("", "c")),  # nothing at all on one rank
    ],
    "unfrozen and frozen": [
        Step([1.5, None, 150.0, None], ("ac", "ac"), frozen="b"),
        Step([1.5, 15.0, 150.0, None], ("abc", "abc")),
        *[Step([1.5, 15.0, None, None], BOTH, frozen="c")] * 3,
        Step([1.5, 15.0, 150.0, None], ("abc", "abc")),
    ],
}
WANTED_OF_FROZEN = {
    "frozen with a gradient": [
        Step([1.5, None, None, None], ("a", "a"), frozen="b"),
        Step([1.5, 15.0, None, None], ("a", "a"), "b", "b"),
        Step([1.5, 15.0, None, None], BOTH),
        Step([1.5, 15.0, None, None], ("a", "a"), "b", "b"),
        Step([1.5, None, None, None], ("a", "a"), frozen="b"),
    ],
}
"""Paddle's own leaves a frozen parameter out, so `fleet` refuses its gradient."""


def check_steps(case: str, mode: str, sizes: dict[str, int]) -> None:
    parts = {name: weight() for name in "abcd"}
    rank, sync = dist.get_rank(), None

    def use(name: str) -> None:
        (parts[name] * (rank + 1) * 10.0 ** "abcd".index(name)).sum().backward()

    for number, step in enumerate({**WANTED, **WANTED_OF_FROZEN}[case]):
        with sync.no_sync() if sync is not None else contextlib.nullcontext():
            for name in step.before:
                parts[name].stop_gradient = False
                use(name)
        for name, part in parts.items():
            part.stop_gradient = name in step.frozen
        sync = sync or GradientSync([*parts.values()], mode=mode, **sizes)
        with sync.last_backward():
            for name in step.last[rank]:
                use(name)
        found = gradients_of(*parts.values())
        assert found == step.means, (case, mode, sizes, number, found)


def check_all_steps() -> None:
    for mode in MODES:
        for case in WANTED if mode == "fleet" else {**WANTED, **WANTED_OF_FROZEN}:
            for sizes in ({},) if mode == "fleet" else ({}, EACH_ITS_BUCKET):
                check_steps(case, mode, sizes)


def each_its_bucket(weights: list[paddle.Tensor], mode: Any) -> GradientSync:
    sizes = {} if mode == "fleet" else EACH_ITS_BUCKET  # Paddle's own are not to be chosen
    return GradientSync(weights, mode=mode, **sizes)


def check_what_is_added_later() -> None:
    """To a Layer that grows, and to a list."""
    for mode, grows_as_list in itertools.product(MODES, (False, True)):
        model = paddle.nn.LayerList([paddle.nn.Linear(1, 1, bias_attr=False)])
        listed = [*model.parameters()]
        source = (lambda listed=listed: listed) if grows_as_list else model
        sync = GradientSync(source, mode=mode)
        for step in range(3):
            if step == 1:
                model.append(paddle.nn.Linear(1, 1, bias_attr=False))
                listed.append(model[1].weight)
            weights = [layer.weight for layer in model]
            with sync.last_backward():
                paddle.add_n([w.sum() * (dist.get_rank() + 1) for w in weights]).backward()
            assert [w.grad.item() for w in weights] == [1.5] * len(weights), (mode, step)
            for one in weights:
                one.clear_gradient(False)


def check_what_is_trained_inside_of_the_backward_alone() -> None:
    """As models that take turns are."""
    for mode in ("fused", "overlap"):
        weights = [weight() for _ in range(3)]
        sync = each_its_bucket(weights, mode)
        for step in range(STEPS):
            with sync.last_backward():
                for one in weights:
                    one.stop_gradient = False
                backward(*weights)
                for one in weights:
                    one.stop_gradient = True
            assert (sync.num_early_buckets > 0) is (mode == "overlap" and step > 0)
            assert gradients_of(*weights) == [1.5] * 3, (mode, step)


def check_a_gradient_given_by_hand() -> None:
    """No backward reaches b. Its gradient is cleared to zero, so its memory stays the same."""
    for mode in MODES:
        a, b = weight(), weight()
        sync = GradientSync([a, b], mode=mode)
        for step in range(STEPS):
            with sync.last_backward():
                backward(a)
                b.grad = paddle.full([2], dist.get_rank() + 1.0)
            assert [one.grad[0].item() for one in (a, b)] == [1.5, 1.5], (mode, step)
            for one in (a, b):
                one.clear_gradient(True)


def check_what_stays_frozen_does_not_travel_for_ever() -> None:
    """How many numbers travel in each step, before and after a freeze that lasts."""
    a, b = weight(1), weight(10)
    sync, sent = GradientSync([a, b]), []
    for step in range(8):
        b.stop_gradient = step > 1
        with sync.last_backward():
            backward(a, *([] if b.stop_gradient else [b]))
        sent.append(sum(bucket.num_bytes for bucket in sync.timeline.buckets) // 4)
        gradients_of(a, b)
    assert sent == [11, 11, 11, 11, 1, 1, 1, 1]


def unscale(one: paddle.Tensor) -> None:
    """As `paddle.amp.GradScaler`, which is off on a CPU."""
    scale, found = paddle.to_tensor([2.0]), paddle.to_tensor([False])
    paddle._legacy_C_ops.check_finite_and_unscale([one.grad], scale, [one.grad], found)


def unscale_later() -> Callable[[paddle.Tensor], None]:
    calls = itertools.count()
    return lambda one: unscale(one) if next(calls) >= 6 else None


def on_rank_1(one: paddle.Tensor) -> None:
    if dist.get_rank() == 1:
        one.grad.scale_(0.5)


HALVED = [[0.75] * 3] * STEPS
CHANGES: dict[str, tuple[Callable[[], Callable[[paddle.Tensor], None]], list[Gradients]]] = {
    "scale_": (lambda: lambda one: one.grad.scale_(0.5), HALVED),
    "unscale": (lambda: unscale, HALVED),
    "unscale from step 2 on": (unscale_later, [*[[1.5] * 3] * 2, *HALVED[2:]]),
    "set_value": (lambda: lambda one: one.grad.set_value(one.grad * 0.5), HALVED),
    "assignment": (lambda: lambda one: setattr(one, "grad", one.grad * 0.5), HALVED),
    "clip_grad_value_": (
        lambda: lambda one: paddle.nn.utils.clip_grad_value_([one], 0.5),
        [[0.5] * 3] * STEPS,
    ),
    "on one rank": (lambda: on_rank_1, [[1.0] * 3] * STEPS),
    "cleared": (lambda: lambda one: one.clear_gradient(False), [[None] * 3] * STEPS),
}


def check_a_change_inside_is_kept() -> None:
    for (name, (make, wanted)), mode in itertools.product(CHANGES.items(), MODES):
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("paddle_recompute").addHandler(handler)
        weights, change = [weight() for _ in range(3)], make()
        sync = each_its_bucket(weights, mode)
        for step in range(STEPS):
            with sync.last_backward():
                backward(*weights)
                with paddle.no_grad():
                    for one in weights:
                        change(one)
            assert gradients_of(*weights) == wanted[step], (name, mode, step)
        logging.getLogger("paddle_recompute").removeHandler(handler)
        assert sync.num_early_buckets == 0
        has_warned = any("changed by hand" in record.msg for record in records)
        assert has_warned is (mode == "overlap"), (name, mode)


def check_half_precision() -> None:
    for dtype, compression in itertools.product(("bfloat16", "float16"), ("none", "bf16")):
        both = [weight(dtype=dtype), weight(3, dtype=dtype)]
        sync = GradientSync(both, compression=compression)
        for _ in range(2):
            with sync.last_backward():
                backward(*both)
            assert all(str(one.grad.dtype).endswith(dtype) for one in both)
            assert gradients_of(*both) == [1.5, 1.5], (dtype, compression)


def check_a_step_without_a_gradient_leaves_its_residual() -> None:
    a, b = weight(), weight()
    sync, owed = GradientSync([a, b], compression="bf16"), []
    for used in ([a, b], [a], [a], []):
        with sync.last_backward():
            if used:
                paddle.add_n([(one * 1.00390625 * 1.1).sum() for one in used]).backward()
        gradients_of(a, b)
        owed.append(sync.state_dict()["residuals"]["1"].tolist())
    assert np.abs(owed[0]).min() > 0
    assert owed[1:] == owed[:1] * 3


test_on_two_ranks = each_on_ranks(
    check_all_steps,
    check_what_is_added_later,
    check_what_is_trained_inside_of_the_backward_alone,
    check_a_gradient_given_by_hand,
    check_what_stays_frozen_does_not_travel_for_ever,
    check_a_change_inside_is_kept,
    check_half_precision,
    check_a_step_without_a_gradient_leaves_its_residual,
)


def unfrozen_on_one_rank() -> str:
    model = paddle.nn.LayerList([paddle.nn.Linear(1, 1) for _ in range(2)])
    for parameter in model[1].parameters():
        parameter.stop_gradient = True
    sync = GradientSync(model)

    def step() -> None:
        with sync.last_backward():
            paddle.add_n([w.sum() for w in model.parameters() if not w.stop_gradient]).backward()

    step()
    if dist.get_rank() == 1:
        model[1].weight.stop_gradient = False
    return message_of(step)


def test_ranks_that_unfreeze_differently_are_told() -> None:
    for message in results_of(unfrozen_on_one_rank):
        assert "the ranks do not synchronize the same parameters: number 2" in message
        assert "missing on rank 0, '1.weight' [1, 1] paddle.float32 on rank 1" in message
