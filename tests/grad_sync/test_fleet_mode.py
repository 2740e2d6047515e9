"""``GradientSync(mode="fleet")``: what Paddle's own synchronization is given, and what is refused.

That it gives the bits of the other modes is in their tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import results_of
from tests.grad_sync.test_what_takes_part import backward, message_of, weight
from tests.ranks import run_ranks

IS_26 = paddle.__version__.startswith("2.6")


def calls_of_paddle() -> list[Any]:
    """What ``fused_allreduce_gradients`` gets in two steps, and what the `GradientSync` says."""
    from paddle.distributed.fleet.utils import hybrid_parallel_util

    calls = []
    original = hybrid_parallel_util.fused_allreduce_gradients
    hybrid_parallel_util.fused_allreduce_gradients = lambda parameters, hcg: (
        calls.append([list(one.shape) for one in parameters]) or original(parameters, hcg)
    )
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 2))
    sync = GradientSync(model, mode="fleet")
    for _ in range(2):
        with sync.last_backward():
            model(paddle.ones([2, 3])).sum().backward()
    hybrid_parallel_util.fused_allreduce_gradients = original
    timeline = sync.timeline
    assert timeline is not None
    ordered = timeline.began < timeline.backward_ended < timeline.ended
    state = sync.state_dict()
    sync.set_state_dict(state)
    return [calls, sync.mode, sync.reason, state, sync.num_early_buckets, timeline.buckets, ordered]


def views() -> dict[str, list[Any]]:
    """Gradients that are not contiguous: those of a transposed use."""
    result = {}
    for mode in ("fused", "fleet"):
        w = paddle.create_parameter([3, 2], "float32")
        sync = GradientSync([w], mode=mode)
        factors = np.arange(6, dtype="float32").reshape(2, 3) * (dist.get_rank() + 1)
        with sync.last_backward():
            (w.t() * paddle.to_tensor(factors)).sum().backward()
        result[mode] = w.grad.numpy().tolist()
    return result


def other_shapes_and_dtypes() -> list[Any]:
    scalar = paddle.base.framework.EagerParamBase.from_tensor(paddle.to_tensor(1.0))
    scalar.stop_gradient = False
    weights = [scalar, weight(2, "bfloat16"), weight(3)]
    if not IS_26:
        weights.append(paddle.create_parameter([0], "float32"))
    sync = GradientSync(weights, mode="fleet")
    with sync.last_backward():
        backward(*weights)
    return [one.grad.astype("float32").numpy().tolist() for one in weights[:3]]


def one_step(sync: GradientSync, *weights: paddle.Tensor) -> None:
    with sync.last_backward():
        backward(*weights)


def frozen_with_a_gradient() -> str:
    a, b = weight(), weight()
    sync = GradientSync([a, b], mode="fleet")
    backward(a, b)
    b.stop_gradient = True
    # The rank that fails first tells the other, and its number in the name is another one.
    return re.sub(r"'[^']*_\d+'", "'b'", message_of(lambda: one_step(sync, a)), count=1)


def a_gradient_of_another_dtype() -> str:
    a, b = weight(), weight()
    sync = GradientSync([a, b], mode="fleet")
    b.grad = paddle.ones([2], "float64")
    return message_of(lambda: one_step(sync, a))


def summing() -> str:
    flag = "FLAGS_enable_auto_parallel_align_mode"
    a = weight()
    sync = GradientSync([a], mode="fleet")
    paddle.set_flags({flag: True})
    try:
        return message_of(lambda: one_step(sync, a))
    finally:
        paddle.set_flags({flag: False})


def half_precision() -> str:
    return message_of(lambda: GradientSync([weight(dtype="float16")], mode="fleet"))


def no_parameter() -> str:
    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    return message_of(lambda: GradientSync([tensor], mode="fleet"))


FAILURES: dict[Callable[[], str], str] = {
    frozen_with_a_gradient: "'b' has stop_gradient=True and a gradient",
    a_gradient_of_another_dtype: "is paddle.float64, and the parameter paddle.float32",
}
"""In a step: they end the run."""
if not IS_26:  # 2.6 has no such flag
    FAILURES[summing] = "would sum the gradients of the ranks"
REFUSALS: dict[Callable[[], str], str] = {
    half_precision: "is float16: gloo's sum of float16 is wrong",
    no_parameter: "is a Tensor and not a Parameter",
}


def every_case() -> dict[str, Any]:
    return {
        "calls": calls_of_paddle(),
        "views": views(),
        "kinds": other_shapes_and_dtypes(),
        "refused": {case.__name__: case() for case in REFUSALS},
    }


def test_it_calls_paddles_own_function_and_refuses_what_that_gets_wrong() -> None:
    transposed = [[0.0, 4.5], [1.5, 6.0], [3.0, 7.5]]
    for one in run_ranks(every_case, 2):
        calls, mode, reason, state, num_early, buckets, ordered = one["calls"]
        assert calls == [[[3, 4], [4], [4, 2], [2]]] * 2  # in the order of the model
        assert (mode, reason) == ("fleet", "as configured")
        assert state == {"num_synchronized": 2, "residuals": {}}
        assert (num_early, buckets, ordered) == (0, (), True)
        assert one["views"] == {"fused": transposed, "fleet": transposed}
        assert one["kinds"] == [1.5, [1.5, 1.5], [1.5, 1.5, 1.5]]
        for case, message in REFUSALS.items():
            assert message in one["refused"][case.__name__]


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.__name__)
def test_what_paddle_would_get_wrong_in_a_step_ends_the_run(case: Callable[[], str]) -> None:
    for message in results_of(case):
        assert FAILURES[case] in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "bf16"}, "compression 'bf16' is not supported by sync mode 'fleet'"),
        ({"bucket_bytes": 2**20}, "bucket_bytes is 1048576, .*buffers of Paddle's own size"),
    ],
)
def test_options_of_our_own_buckets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSync(paddle.nn.Linear(2, 2), mode="fleet", **options)
