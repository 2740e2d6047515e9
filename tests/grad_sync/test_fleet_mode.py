"""``GradientSync(mode="fleet")``, Paddle's own synchronization, on two ranks: right or refused.

Two ranks: a sum of two numbers has one rounding, whatever the buffers, so all modes give the same
bits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.app.config import Config, sync_arguments
from paddle_recompute.errors import ConfigError, PaddleRecomputeError, PeerError, SyncError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.train_step import TrainStep
from tests.distributed.mortal_ranks import results_of
from tests.grad_sync.test_gradient_sync import make, same, train
from tests.grad_sync.test_what_takes_part import (
    WANTED,
    backward,
    gradients_of,
    message_of,
    unscale,
    weight,
)
from tests.ranks import run_ranks

IS_26 = paddle.__version__.startswith("2.6")


def fleet_module() -> Any:
    from paddle.distributed.fleet.utils import hybrid_parallel_util

    return hybrid_parallel_util


# ------------------------------------------------------------------------------------- right


def train_every_way() -> dict[str, bool]:
    """Whether `fleet` gives the bits of `fused`."""
    equal = {}
    for form, num_towers, num_micro in itertools.product(
        ("none", "hooks", "fleet"), (1, 2), (1, 3)
    ):
        parameters = []
        for mode in ("fused", "fleet"):
            model, optimizer = make(form, num_towers)
            parameters.append(train(GradientSync(model, mode=mode), model, optimizer, num_micro))
        equal[f"{form}, {num_towers} towers, K={num_micro}"] = same(*parameters)
    return equal


def wrapped_and_grouped() -> dict[str, bool]:
    """A model in ``paddle.DataParallel``, and a group that is named."""
    model, optimizer = make("none", 2)
    wanted = train(GradientSync(model, mode="fused"), model, optimizer, 3)
    model, optimizer = make("none", 2)
    wrapped = paddle.DataParallel(model)
    sync = GradientSync(wrapped, mode="fleet")
    result = {"DataParallel": same(wanted, train(sync, wrapped, optimizer, 3))}
    with sync.last_backward():
        wrapped(paddle.ones([1, 8]) * (dist.get_rank() + 1.0)).sum().backward()
        before = model.tied.grad.numpy()
    theirs: list[Any] = []
    dist.all_gather_object(theirs, before)
    result["DataParallel is in no_sync"] = not np.array_equal(*theirs)
    group = dist.get_group()  # of all ranks; making another one fails now and then
    model, optimizer = make("none", 2)
    sync = GradientSync(model, mode="fleet", group=group)
    result["group"] = same(wanted, train(sync, model, optimizer, 3))
    return result


def calls_of_paddle() -> list[Any]:
    """What ``fused_allreduce_gradients`` gets in two steps, and what the `GradientSync` says."""
    module, calls = fleet_module(), []
    original = module.fused_allreduce_gradients
    module.fused_allreduce_gradients = lambda parameters, hcg: (
        calls.append([list(one.shape) for one in parameters]) or original(parameters, hcg)
    )
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 2))
    sync = GradientSync(model, mode="fleet")
    for _ in range(2):
        with sync.last_backward():
            model(paddle.ones([2, 3])).sum().backward()
    module.fused_allreduce_gradients = original
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


def other_shapes_and_dtypes() -> dict[str, Any]:
    scalar = paddle.base.framework.EagerParamBase.from_tensor(paddle.to_tensor(1.0))
    scalar.stop_gradient = False
    vector = weight(3)
    half = weight(2, "bfloat16")
    sync = GradientSync([scalar, half, vector], mode="fleet")
    with sync.last_backward():
        backward(scalar, half, vector)
    found = {
        "means": [one.grad.astype("float32").numpy().tolist() for one in (scalar, half, vector)]
    }
    if not IS_26:
        empty = paddle.create_parameter([0], "float32")
        sync = GradientSync([empty, vector], mode="fleet")
        vector.clear_gradient(False)
        with sync.last_backward():
            backward(empty, vector)
        found["beside an empty one"] = vector.grad.numpy().tolist()
    return found


def changed_inside() -> list[list[float | None]]:
    a, steps = weight(), []
    sync = GradientSync([a], mode="fleet")
    for _ in range(2):
        with sync.last_backward():
            backward(a)
            unscale(a)
        steps.append(gradients_of(a))
    return steps


def train_step() -> dict[str, Any]:
    """`TrainStep` of two micro-batches: losses, and where the seconds went."""
    found = {}
    for mode in ("fused", "fleet"):
        paddle.seed(3)
        model = paddle.nn.Linear(3, 1)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        step = TrainStep(
            model,
            optimizer,
            loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
            sync=mode,
            accumulate_steps=2,
            clip_grad_norm=0.5,
        )
        x = np.random.default_rng(dist.get_rank()).standard_normal((2, 2, 4, 3)).astype("float32")
        results = [step([{"x": paddle.to_tensor(one)} for one in batch]) for batch in x]
        found[mode] = [(one.loss, one.grad_norm) for one in results]
        found[f"{mode}, seconds"] = results[-1].seconds["sync"] > 0
    return found


# ----------------------------------------------------------------------------------- refused


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


def sparse() -> str:
    model = paddle.nn.Embedding(5, 2, sparse=True)
    sync = GradientSync(model, mode="fleet")

    def step() -> None:
        with sync.last_backward():
            model(paddle.to_tensor([1, 2])).sum().backward()

    return message_of(step)


def a_shape_that_differs() -> str:
    return message_of(lambda: GradientSync([weight(2 + dist.get_rank())], mode="fleet"))


def an_order_that_differs() -> str:
    model = paddle.nn.Layer()
    for name in ("ab", "ba")[dist.get_rank()]:
        model.add_parameter(name, weight())
    return message_of(lambda: GradientSync(model, mode="fleet"))


def a_dtype_that_differs() -> str:
    """Of a gradient alone: the parameter has the same on both ranks."""
    a = weight()
    sync = GradientSync([a], mode="fleet")

    def step() -> None:
        with sync.last_backward():
            backward(a)
            sync._roll.read = lambda: setattr(sync._roll, "gradients", [kind])

    kind = paddle.ones([2], ("float32", "float64")[dist.get_rank()])
    return message_of(step)


def unfrozen_on_one_rank() -> str:
    a, b = weight(), weight(3)
    b.stop_gradient = True
    sync = GradientSync([a, b], mode="fleet")
    one_step(sync, a)
    b.stop_gradient = dist.get_rank() == 0
    return message_of(lambda: one_step(sync, a))


def half_precision() -> str:
    return message_of(lambda: GradientSync([weight(dtype="float16")], mode="fleet"))


def main_grad() -> str:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    model = MixPrecisionLayer(paddle.nn.Linear(2, 2), dtype="bfloat16")
    return message_of(lambda: GradientSync(model, mode="fleet"))


def no_parameter() -> str:
    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    return message_of(lambda: GradientSync([tensor], mode="fleet"))


def summing() -> str:
    flag = "FLAGS_enable_auto_parallel_align_mode"
    a = weight()
    sync = GradientSync([a], mode="fleet")
    paddle.set_flags({flag: True})
    try:
        return message_of(lambda: one_step(sync, a))
    finally:
        paddle.set_flags({flag: False})


def another_mode() -> str:
    mode = ("fleet", "fused")[dist.get_rank()]
    return message_of(lambda: GradientSync([weight()], mode=mode))


def failed_on_one_rank() -> list[str]:
    """Rank 1 fails in its backward: rank 0 does not wait for it."""
    a = weight()
    sync = GradientSync([a], mode="fleet")

    def step() -> None:
        with sync.last_backward():
            backward(a)
            if dist.get_rank() == 1:
                raise SyncError("on purpose")

    with pytest.raises(PaddleRecomputeError) as caught:
        step()
    return [type(caught.value).__name__, message_of(lambda: one_step(sync, a))]


FAILURES: dict[Callable[[], str], str] = {
    frozen_with_a_gradient: "'b' has stop_gradient=True and a gradient",
    sparse: "the gradient of 'weight' is sparse",
    a_dtype_that_differs: "has not the same dtype on all ranks: float32, float64",
    unfrozen_on_one_rank: "do not synchronize the same parameters: number 1",
}
"""In a step: they end the run."""
REFUSALS: dict[Callable[[], str], str] = {
    a_shape_that_differs: "do not synchronize the same parameters: number 0",
    an_order_that_differs: "do not synchronize the same parameters: number 0",
    half_precision: "is float16: gloo's sum of float16 is wrong",
    main_grad: "keeps its gradient in main_grad (fleet's MixPrecisionLayer)",
    no_parameter: "is a Tensor and not a Parameter",
    another_mode: "different options: mode is 'fleet' on rank 0, 'fused' on rank 1",
}
if not IS_26:  # 2.6 has no such flag
    FAILURES[summing] = "would sum the gradients of the ranks"


def check_every() -> str:
    a = weight()
    sync = GradientSync([a], mode="fleet", check_every=1)
    one_step(sync, a)
    a.set_value(paddle.ones([2]) * (dist.get_rank() + 1.0))
    return message_of(lambda: one_step(sync, a)).replace(a.name, "a")


def every_case() -> dict[str, Any]:
    return {
        "every way": train_every_way(),
        "wrapped": wrapped_and_grouped(),
        "takes part": {
            (case.__name__, found): case("fleet", found)
            for case in WANTED
            for found in (False, True)
        },
        "calls": calls_of_paddle(),
        "views": views(),
        "kinds": other_shapes_and_dtypes(),
        "changed": changed_inside(),
        "train step": train_step(),
        "refused": {case.__name__: case() for case in REFUSALS},
    }


Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return run_ranks(every_case, 2, timeout=150)


def test_it_gives_the_bits_of_fused_in_every_combination(seen: Seen) -> None:
    for one in seen:
        assert len(one["every way"]) == 12
        assert all(one["every way"].values()), one["every way"]


def test_a_wrapped_model_and_a_group_give_the_same_bits(seen: Seen) -> None:
    for one in seen:
        assert one["wrapped"] == {
            "DataParallel": True,
            "DataParallel is in no_sync": True,
            "group": True,
        }


@pytest.mark.parametrize("case", WANTED, ids=lambda case: case.__name__)
def test_a_gradient_that_is_missing_on_one_rank_is_zero_there(
    seen: Seen, case: Callable[[Any, bool], Any]
) -> None:
    for one in seen:
        for found in (False, True):
            assert one["takes part"][case.__name__, found] == WANTED[case]


def test_paddles_own_function_is_what_runs(seen: Seen) -> None:
    for one in seen:
        calls, mode, reason, state, num_early, buckets, ordered = one["calls"]
        assert calls == [[[3, 4], [4], [4, 2], [2]]] * 2  # in the order of the model
        assert (mode, reason) == ("fleet", "as configured")
        assert state == {"num_synchronized": 2, "residuals": {}}
        assert (num_early, buckets, ordered) == (0, (), True)


def test_a_gradient_that_is_not_contiguous_is_averaged_in_its_place(seen: Seen) -> None:
    wanted = [[0.0, 4.5], [1.5, 6.0], [3.0, 7.5]]
    for one in seen:
        assert one["views"] == {"fused": wanted, "fleet": wanted}


def test_scalars_and_mixed_dtypes_are_averaged(seen: Seen) -> None:
    for one in seen:
        assert one["kinds"].pop("means") == [1.5, [1.5, 1.5], [1.5, 1.5, 1.5]]
        assert all(mean == [1.5, 1.5, 1.5] for mean in one["kinds"].values())


def test_a_change_inside_of_last_backward_is_kept(seen: Seen) -> None:
    for one in seen:
        assert one["changed"] == [[0.75]] * 2


def test_train_step_takes_it(seen: Seen) -> None:
    for one in seen:
        found = one["train step"]
        assert found["fleet"] == found["fused"]
        assert found["fleet, seconds"] and found["fused, seconds"]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.__name__)
def test_what_paddle_would_get_wrong_is_refused(seen: Seen, case: Callable[[], str]) -> None:
    for one in seen:
        assert REFUSALS[case] in one["refused"][case.__name__]


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.__name__)
def test_what_paddle_would_get_wrong_in_a_step_ends_the_run(case: Callable[[], str]) -> None:
    for message in results_of(case):
        assert FAILURES[case] in message


def test_check_every_compares_the_parameters() -> None:
    for message in results_of(check_every):
        assert "'a' differs between the ranks" in re.sub(r"'[^']*_\d+'", "'a'", message)


def test_a_rank_that_fails_is_not_waited_for() -> None:
    seen = results_of(failed_on_one_rank)
    assert [kind for kind, _ in seen] == [PeerError.__name__, SyncError.__name__]
    for _, message in seen:
        assert message.startswith("rank 1 failed in step 1: SyncError: on purpose")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "bf16"}, "compression 'bf16' is not supported by sync mode 'fleet'"),
        ({"bucket_bytes": 2**20}, "bucket_bytes is 1048576, .*buffers of Paddle's own size"),
        ({"first_bucket_bytes": 1}, "first_bucket_bytes 1; .*buffers of Paddle's own size"),
    ],
)
def test_options_of_our_own_buckets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSync(paddle.nn.Linear(2, 2), mode="fleet", **options)


def test_a_configuration_asks_for_it() -> None:
    config = Config.model_validate(
        {
            "model": {"preset": "tiny"},
            "contrastive": {"global_batch": 8},
            "train": {"max_steps": 1, "learning_rate": 0.1},
            "sync": {
                "mode": "fleet"
            },  # strategy.fuse_grad_size_in_MB has another default than ours
        }
    )
    assert (
        GradientSync(paddle.nn.Linear(2, 2), **sync_arguments(config)).mode == "none"
    )  # one process


def test_one_process_does_not_communicate() -> None:
    model = paddle.nn.Linear(2, 2)
    sync = GradientSync(model, mode="fleet")
    assert sync.mode == "none"
    with sync.last_backward():
        model(paddle.ones([1, 2])).sum().backward()
    assert np.array_equal(model.weight.grad.numpy(), np.ones((2, 2)))
