"""Whatever has a gradient when the step ends is synchronized, on two real ranks."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.errors import PaddleRecomputeError, SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import results_of
from tests.ranks import run_ranks

IS_26 = paddle.__version__.startswith("2.6")
STEPS = 4
EACH_ITS_BUCKET = {"bucket_bytes": 1, "first_bucket_bytes": 1}
SETTINGS = list(itertools.product(("fused", "overlap"), (False, True)))


def each_its_bucket(weights: list[paddle.Tensor], mode: Any, find_unused: bool) -> GradientSync:
    sizes = {} if mode == "fleet" else EACH_ITS_BUCKET  # Paddle's own are not to be chosen
    return GradientSync(weights, mode=mode, find_unused_parameters=find_unused, **sizes)


def weight(size: int = 2, dtype: str = "float32") -> paddle.Tensor:
    made = paddle.base.framework.EagerParamBase.from_tensor(paddle.ones([size]).astype(dtype))
    made.stop_gradient = False
    return made


def backward(*weights: paddle.Tensor) -> None:
    """The gradient of each becomes 1 on rank 0 and 2 on rank 1: their mean is 1.5."""
    rank = dist.get_rank()
    paddle.add_n([(one.astype("float32") * (rank + 1)).sum() for one in weights]).backward()


def gradients_of(*weights: paddle.Tensor) -> list[float | None]:
    """Their first elements; clears them."""
    found = [None if w.grad is None else w.grad.astype("float32")[0].item() for w in weights]
    for one in weights:
        one.clear_gradient(False)
    return found


Steps = list[list[float | None]]


def an_earlier_backward(mode: Any, find_unused: bool) -> Steps:
    a, b = weight(), weight()
    sync = GradientSync([a, b], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for _ in range(STEPS):
        with sync.no_sync():
            backward(a)
        with sync.last_backward():
            backward(b)
        steps.append(gradients_of(a, b))
    return steps


def an_empty_last_backward(mode: Any, find_unused: bool) -> Steps:
    a, b = weight(), weight()
    sync = GradientSync([a, b], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for _ in range(STEPS):
        backward(a)
        with sync.last_backward():
            pass
        steps.append(gradients_of(a, b))
    return steps


def heads_in_turn(mode: Any, find_unused: bool) -> Steps:
    """A trunk, and a head for each step; the head of rank 1 is another one in step 2."""
    trunk, *heads = (weight() for _ in range(3))
    sync = GradientSync([trunk, *heads], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for step in range(STEPS):
        head = heads[(step + (dist.get_rank() if step == 2 else 0)) % 2]
        with sync.last_backward():
            backward(trunk, head)
        steps.append(gradients_of(trunk, *heads))
    return steps


def used_on_one_rank(mode: Any, find_unused: bool) -> Steps:
    """Each in a bucket of its own: one rank sends several before the end, the other none."""
    weights = [weight() for _ in range(3)]
    sync = each_its_bucket(weights, mode, find_unused)
    steps = []
    for step in range(STEPS):
        used = weights if step % 2 == 0 or dist.get_rank() == 1 else weights[step : step + 1]
        with sync.last_backward():
            if used:
                backward(*used)
        steps.append(gradients_of(*weights))
    return steps


def unfrozen_and_frozen(mode: Any, find_unused: bool) -> Steps:
    a, b, c = weight(), weight(), weight()
    b.stop_gradient = True
    sync = GradientSync([a, b, c], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for step in range(6):
        b.stop_gradient = step == 0
        c.stop_gradient = 1 < step < 5
        with sync.last_backward():
            backward(*(one for one in (a, b, c) if not one.stop_gradient))
        steps.append(gradients_of(a, b, c))
    return steps


def added(mode: Any, find_unused: bool) -> Steps:
    """A Layer that grows, and an optimizer's list that does."""
    steps = []
    for grows_as_list in (False, True):
        model = paddle.nn.LayerList([paddle.nn.Linear(1, 1, bias_attr=False)])
        listed = [*model.parameters()]
        source = (lambda listed=listed: listed) if grows_as_list else model
        sync = GradientSync(source, mode=mode, find_unused_parameters=find_unused)
        for step in range(3):
            if step == 1:
                model.append(paddle.nn.Linear(1, 1, bias_attr=False))
                listed.append(model[1].weight)
            weights = [layer.weight for layer in model]
            with sync.last_backward():
                paddle.add_n([w.sum() * (dist.get_rank() + 1) for w in weights]).backward()
            steps.append([w.grad.item() for w in weights])
            for one in weights:
                one.clear_gradient(False)
    return steps


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(PaddleRecomputeError) as caught:
        call()
    return str(caught.value)


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


def unfrozen_and_different() -> str:
    """`check_every` looks at what was unfrozen."""
    a, b = weight(), weight()
    b.stop_gradient = True
    sync = GradientSync([a, b], check_every=1)
    with sync.last_backward():
        backward(a)
    b.stop_gradient = False
    b.set_value(paddle.ones([2]) * (dist.get_rank() + 1.0))

    def step() -> None:
        with sync.last_backward():
            backward(a, b)

    return message_of(step)


def frozen_with_a_gradient(mode: Any, find_unused: bool) -> Steps:
    """Frozen between an earlier backward of the step and the last one, and later unfrozen."""
    a, b = weight(), weight()
    b.stop_gradient = True
    sync = GradientSync([a, b], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for step in range(5):
        b.stop_gradient = step != 2
        if step in (1, 3):
            b.stop_gradient = False
            backward(b)
            b.stop_gradient = True
        with sync.last_backward():
            backward(*(one for one in (a, b) if not one.stop_gradient))
        steps.append(gradients_of(a, b))
    return steps


def frozen_behind_each_backward(mode: Any, find_unused: bool) -> Steps:
    """Trained inside of the backward alone, as models that take turns are."""
    weights = [weight() for _ in range(3)]
    sync = each_its_bucket(weights, mode, find_unused)
    steps = []
    for step in range(STEPS):
        with sync.last_backward():
            for one in weights:
                one.stop_gradient = False
            backward(*weights)
            for one in weights:
                one.stop_gradient = True
        assert (sync.num_early_buckets > 0) is (mode == "overlap" and step > 0)
        steps.append(gradients_of(*weights))
    return steps


def frozen_before_it_is_made(mode: Any, find_unused: bool) -> Steps:
    """Frozen when the synchronization is made, with a gradient."""
    a, b = weight(), weight()
    backward(b)
    b.stop_gradient = True
    sync = GradientSync([a, b], mode=mode, find_unused_parameters=find_unused)
    with sync.last_backward():
        backward(a)
    return [gradients_of(a, b)]


def given_by_hand(mode: Any, find_unused: bool) -> Steps:
    """No backward reaches b. Its gradient is cleared to zero, so its memory stays the same."""
    a, b = weight(), weight()
    sync = GradientSync([a, b], mode=mode, find_unused_parameters=find_unused)
    steps = []
    for _ in range(STEPS):
        with sync.last_backward():
            backward(a)
            b.grad = paddle.full([2], dist.get_rank() + 1.0)
        steps.append([one.grad[0].item() for one in (a, b)])
        for one in (a, b):
            one.clear_gradient(True)
    return steps


WANTED: dict[Callable[[Any, bool], Steps], Steps] = {
    an_earlier_backward: [[1.5, 1.5]] * STEPS,
    an_empty_last_backward: [[1.5, None]] * STEPS,
    given_by_hand: [[1.5, 1.5]] * STEPS,
    heads_in_turn: [[1.5, 1.5, None], [1.5, None, 1.5], [1.5, 0.5, 1.0], [1.5, None, 1.5]],
    used_on_one_rank: [[1.5] * 3, [1.0, 1.5, 1.0], [1.5] * 3, [1.0] * 3],
    unfrozen_and_frozen: [
        [1.5, None, 1.5],
        [1.5, 1.5, 1.5],
        *[[1.5, 1.5, None]] * 3,
        [1.5, 1.5, 1.5],
    ],
    added: [[1.5], [1.5, 1.5], [1.5, 1.5]] * 2,
}
WANTED_OF_FROZEN: dict[Callable[[Any, bool], Steps], Steps] = {
    frozen_with_a_gradient: [[1.5, None], *[[1.5, 1.5]] * 3, [1.5, None]],
    frozen_behind_each_backward: [[1.5] * 3] * STEPS,
    frozen_before_it_is_made: [[1.5, 1.5]],
}
ALL_WANTED = {**WANTED, **WANTED_OF_FROZEN}


def dropped_after_a_while() -> list[int]:
    """How many numbers travel in each step, before and after a freeze that lasts."""
    a, b = weight(1), weight(10)
    sync, sent = GradientSync([a, b]), []
    for step in range(8):
        b.stop_gradient = step > 1
        with sync.last_backward():
            backward(a, *([] if b.stop_gradient else [b]))
        sent.append(sum(bucket.num_bytes for bucket in sync.timeline.buckets) // 4)
        gradients_of(a, b)
    return sent


def changed_inside(mode: Any, change: Callable[[paddle.Tensor], None]) -> tuple[Steps, int, bool]:
    """Gradients, buckets that were sent early in the end, and whether a warning was given."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("paddle_recompute").addHandler(handler)
    weights = [weight() for _ in range(3)]
    sync, steps = GradientSync(weights, mode=mode, **EACH_ITS_BUCKET), []
    for _ in range(STEPS):
        with sync.last_backward():
            backward(*weights)
            with paddle.no_grad():
                for one in weights:
                    change(one)
        steps.append(gradients_of(*weights))
    logging.getLogger("paddle_recompute").removeHandler(handler)
    return steps, sync.num_early_buckets, any("changed by hand" in r.msg for r in records)


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
CHANGES: dict[str, tuple[Callable[[], Callable[[paddle.Tensor], None]], Steps]] = {
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


def half_precision() -> dict[tuple[str, str], Any]:
    result = {}
    for dtype, compression in itertools.product(("bfloat16", "float16"), ("none", "bf16")):
        both = [weight(dtype=dtype), weight(3, dtype=dtype)]
        sync, steps = GradientSync(both, compression=compression), []
        for _ in range(2):
            with sync.last_backward():
                backward(*both)
            assert all(str(one.grad.dtype).endswith(dtype) for one in both)
            steps.append(gradients_of(*both))
        result[dtype, compression] = steps
    return result


def no_elements() -> list[Any]:
    """A parameter without elements beside another one, and alone."""
    result: list[Any] = []
    for others in ([weight()], []):
        empty = paddle.create_parameter([0], "float32")
        for mode in ("fused", "overlap"):
            sync = GradientSync([empty, *others], mode=mode, **EACH_ITS_BUCKET)
            for _ in range(2):
                with sync.last_backward():
                    paddle.add_n(
                        [(w * (dist.get_rank() + 1)).sum() for w in [empty, *others]]
                    ).backward() if others else empty.sum().backward()
                result.append(gradients_of(*others))
                empty.clear_gradient(False)
    return result


def residual_of_an_unused_parameter() -> list[Any]:
    """What is owed to b before and after a step in which only a is used."""
    a, b = weight(), weight()
    sync, owed = GradientSync([a, b], compression="bf16"), []
    for used in ([a, b], [a], [a], []):
        with sync.last_backward():
            if used:
                paddle.add_n([(one * 1.00390625 * 1.1).sum() for one in used]).backward()
        gradients_of(a, b)
        owed.append(sync.state_dict()["residuals"]["1"].tolist())
    return owed


def mean_errors() -> dict[tuple[bool, bool], list[float]]:
    """Root mean square error of the mean of the gradients after 10, 100 and 300 steps."""
    result = {}
    for feedback, varies in itertools.product((False, True), repeat=2):
        streams = [np.random.default_rng(rank) for rank in range(2)]
        lasting = [stream.standard_normal(1000) for stream in streams]
        parameter = paddle.create_parameter([1000], "float32")
        sync = GradientSync([parameter], compression="bf16", error_feedback=feedback)
        error, found = np.zeros(1000), []
        for step in range(1, 301):
            both = [
                (base + (stream.standard_normal(1000) if varies else 0)).astype("float32")
                for base, stream in zip(lasting, streams, strict=True)
            ]
            with sync.last_backward():
                (parameter * paddle.to_tensor(both[dist.get_rank()])).sum().backward()
            error += parameter.grad.numpy() - np.mean(both, 0, "float64")
            parameter.clear_gradient(False)
            if step in (10, 100, 300):
                found.append(float(np.sqrt(np.mean((error / step) ** 2))))
        result[feedback, varies] = found
    return result


def inside_itself() -> list[Any]:
    a = weight()
    sync = GradientSync([a])
    with sync.last_backward():
        backward(a)
        message = message_of(lambda: sync.last_backward().__enter__())
    return [message, *gradients_of(a)]


def main_grad() -> list[str]:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    model = MixPrecisionLayer(paddle.nn.Linear(2, 2), dtype="bfloat16")
    return [message_of(lambda: GradientSync(model))]


def every_case() -> dict[str, Any]:
    return {
        "takes part": {
            (case.__name__, *setting): case(*setting) for case in ALL_WANTED for setting in SETTINGS
        },
        "changed": {
            (name, mode): changed_inside(mode, change())
            for name, (change, _) in CHANGES.items()
            for mode in ("fused", "overlap")
        },
        "dropped": dropped_after_a_while(),
        "half": half_precision(),
        "empty": [] if IS_26 else no_elements(),
        "owed": residual_of_an_unused_parameter(),
        "errors": mean_errors(),
        "inside": inside_itself(),
        "main_grad": main_grad(),
    }


Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return run_ranks(every_case, 2, timeout=110)


@pytest.mark.parametrize("case", ALL_WANTED, ids=lambda case: case.__name__)
def test_what_has_a_gradient_is_part_of_it(seen: Seen, case: Callable[[Any, bool], Steps]) -> None:
    for one in seen:
        for setting in SETTINGS:
            assert one["takes part"][(case.__name__, *setting)] == ALL_WANTED[case], setting


def test_ranks_that_unfreeze_differently_are_told() -> None:
    for message in results_of(unfrozen_on_one_rank):
        assert "the ranks do not synchronize the same parameters: number 2" in message
        assert "missing on rank 0, '1.weight' [1, 1] paddle.float32 on rank 1" in message


def test_check_every_looks_at_what_was_unfrozen() -> None:
    for message in results_of(unfrozen_and_different):
        assert re.search("'[^']*' differs between the ranks", message)


def test_what_stays_frozen_does_not_travel_for_ever(seen: Seen) -> None:
    for one in seen:
        assert one["dropped"] == [11, 11, 11, 11, 1, 1, 1, 1]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_of_last_backward_is_kept(seen: Seen, name: str) -> None:
    for one in seen:
        for mode in ("fused", "overlap"):
            steps, num_early, _ = one["changed"][name, mode]
            assert steps == CHANGES[name][1], mode
            assert num_early == 0


def test_a_change_that_ends_the_overlap_is_said(seen: Seen) -> None:
    for one in seen:
        warned = {mode: one["changed"]["unscale", mode][2] for mode in ("fused", "overlap")}
        assert warned == {"fused": False, "overlap": True}


def test_parameters_in_half_precision_are_averaged(seen: Seen) -> None:
    for one in seen:
        assert len(one["half"]) == 4
        for kind, steps in one["half"].items():
            assert steps == [[1.5, 1.5]] * 2, kind


@pytest.mark.skipif(IS_26, reason="Paddle 2.6 makes no parameter without elements")
def test_a_parameter_without_elements_does_no_harm(seen: Seen) -> None:
    for one in seen:
        assert one["empty"] == [[1.5]] * 4 + [[]] * 4


def test_a_step_without_a_gradient_leaves_its_residual(seen: Seen) -> None:
    for one in seen:
        first, *later = one["owed"]
        assert np.abs(first).min() > 0
        assert later == [first] * 3


# What rounding to 8 bits of mantissa leaves is random: these are the ratios seen, and room. The
# cast of Paddle 2.6.2 cuts off, so varying gradients keep a bias, as lasting ones do.
LASTING = (0.4, 0.6)
VARYING = (0.35, 0.6) if IS_26 else (0.65, 0.85)


def test_error_feedback_does_what_is_said_of_it(seen: Seen) -> None:
    for one in seen:
        errors = one["errors"]
        for varies, (low, high) in ((False, LASTING), (True, VARYING)):
            for with_feedback, without in zip(
                errors[True, varies], errors[False, varies], strict=True
            ):
                assert low < with_feedback / without < high
        after_10, _, after_300 = errors[True, False]
        assert 0.85 < after_300 / after_10 < 1.0  # it does not fall with time


def test_last_backward_inside_of_itself_is_refused(seen: Seen) -> None:
    for one in seen:
        message, gradient = one["inside"]
        assert "last_backward() was entered inside of itself" in message
        assert gradient == 1.5


def test_gradients_in_main_grad_are_refused(seen: Seen) -> None:
    for one in seen:
        assert "keeps its gradient in main_grad (fleet's MixPrecisionLayer)" in one["main_grad"][0]


def test_in_one_process_it_is_refused_too() -> None:
    sync = GradientSync(paddle.nn.Linear(1, 1))
    with sync.last_backward(), pytest.raises(SyncError, match="inside of itself"):
        sync.last_backward().__enter__()
