"""GradientSync on two real ranks: every mode gives the same bits, whatever differs is seen."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.fleet.utils import recompute as fleet_recompute

from paddle_recompute.distributed import broadcast_from_rank0
from paddle_recompute.errors import ConfigError, SyncError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.recompute import recompute
from tests.distributed.mortal_ranks import results_of
from tests.ranks import each_on_ranks, run_ranks

STEPS, WIDTH, SMALL = 4, 8, {"bucket_bytes": 200, "first_bucket_bytes": 200}


class Towers(paddle.nn.Layer):
    """One or two towers over the same blocks; the head's weight is tied to the first block's."""

    def __init__(self, form: str, num_towers: int) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(
                    paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Tanh(), paddle.nn.Dropout(0.2)
                )
                for _ in range(3)
            ]
        )
        self.tied = self.blocks[0][0].weight
        self._form = form
        self._num_towers = num_towers

    def tower(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            if self._form == "none":
                x = block(x)
            elif self._form == "fleet" and not x.stop_gradient:  # else it loses gradients
                x = fleet_recompute(block, x)
            else:
                x = recompute(block, x)
        return paddle.matmul(x, self.tied)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return sum(self.tower(x + i) for i in range(self._num_towers))


def make(form: str, num_towers: int) -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    paddle.seed(5)
    model = Towers(form, num_towers)
    paddle.seed(100 + dist.get_rank())
    return model, paddle.optimizer.AdamW(1e-2, parameters=model.parameters())


def batch(step: int, micro: int) -> paddle.Tensor:
    rng = np.random.default_rng([dist.get_rank(), step, micro])
    return paddle.to_tensor(rng.standard_normal((4, WIDTH), "float32"))


def train(
    sync: GradientSync, model: Any, optimizer: paddle.optimizer.Optimizer, num_micro: int
) -> list[np.ndarray]:
    for step in range(STEPS):
        for micro in range(num_micro - 1):
            with sync.no_sync():
                model(batch(step, micro)).square().mean().backward()
        with sync.last_backward():
            model(batch(step, num_micro - 1)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert sync.num_synchronized == STEPS
    return [p.numpy() for p in model.parameters()]


def check_every_combination() -> None:
    """One tower and one micro-batch, and several of both."""
    for form, num_towers, num_micro in (("none", 1, 1), ("hooks", 2, 3), ("fleet", 2, 3)):
        parameters = {}
        for mode in ("fused", "fleet", "overlap"):
            model, optimizer = make(form, num_towers)
            sync = GradientSync(model, mode=mode, **({} if mode == "fleet" else SMALL))
            parameters[mode] = train(sync, model, optimizer, num_micro)
        case = form, num_towers, num_micro
        assert same(parameters["fused"], parameters["fleet"]), case
        assert same(parameters["fused"], parameters["overlap"]), case
        assert sync.num_early_buckets >= 2, case


def train_in_another_order(mode: str) -> tuple[list[np.ndarray], list[int]]:
    """The gradients of all steps, whose Layers run forwards and backwards by turns, and the early
    buckets of each step.
    """
    paddle.seed(5)
    layers = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    sync = GradientSync(layers, mode=mode, **SMALL)
    gradients, early = [], []
    for step, is_reversed in enumerate([False, False, True, True, False, False]):
        with sync.last_backward():
            x = batch(step, 0)
            for layer in reversed(list(layers)) if is_reversed else layers:
                x = paddle.tanh(layer(x))
            x.sum().backward()
        gradients += [p.grad.numpy() for p in layers.parameters()]
        early.append(sync.num_early_buckets)
        for parameter in layers.parameters():
            parameter.clear_gradient(False)
    return gradients, early


def check_another_order_is_learnt_in_one_step() -> None:
    (fused, _), (overlap, early) = map(train_in_another_order, ("fused", "overlap"))
    assert same(fused, overlap)
    first, second, _, fourth, _, sixth = early
    assert first == 0 and min(second, fourth, sixth) >= 4, early


def check_backwards_of_another_thread_do_not_end_the_overlap() -> None:
    paddle.seed(5)
    layers = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    sync = GradientSync(layers, mode="overlap", **SMALL)
    other, has_ended = paddle.create_parameter([2], "float32"), threading.Event()

    def run() -> None:
        while not has_ended.is_set():
            other.sum().backward()
            other.clear_gradient(False)

    thread, early = threading.Thread(target=run), []
    thread.start()
    try:
        for step in range(STEPS):
            with sync.last_backward():
                paddle.add_n([layer(batch(step, 0)).sum() for layer in layers]).backward()
            early.append(sync.num_early_buckets)
    finally:
        has_ended.set()
        thread.join()
    assert early[0] == 0 and min(early[1:]) >= len(sync.timeline.buckets) - 1 > 1, early


def check_data_parallel_without_recompute_gives_the_same_bits() -> None:
    model, optimizer = make("none", 2)
    ours = train(GradientSync(model, mode="overlap", **SMALL), model, optimizer, 1)
    model, optimizer = make("none", 2)
    parallel = paddle.DataParallel(model)
    for step in range(STEPS):
        parallel(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert same(ours, [p.numpy() for p in model.parameters()])


def check_a_wrapped_model_and_a_hybrid_group() -> None:
    from paddle.distributed import fleet

    model, optimizer = make("fleet", 2)
    expected = train(GradientSync(model, **SMALL), model, optimizer, 3)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 1, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    group = fleet.get_hybrid_communicate_group().get_data_parallel_group()
    for mode in ("overlap", "fleet"):
        model, optimizer = make("fleet", 2)
        wrapped = paddle.DataParallel(model)
        assert same(expected, train(GradientSync(wrapped, mode=mode), wrapped, optimizer, 3)), mode
        model, optimizer = make("fleet", 2)
        broadcast_from_rank0(model, group)
        sync = GradientSync(model, mode=mode, group=group)
        assert same(expected, train(sync, model, optimizer, 3)), mode
    alone = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    assert GradientSync(model, group=alone).mode == "none"


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    assert len(one) == len(other) > 0
    return all(map(np.array_equal, one, other))


def check_every_gradient_travels_once_per_optimizer_step() -> None:
    """Gradients are float32; what the ranks agree on is float64."""
    all_reduce, sent = dist.all_reduce, []

    def counting(tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == paddle.float32:
            sent.append(tensor.size)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        for mode, (form, num_micro) in itertools.product(
            ("fused", "overlap"), (("hooks", 1), ("fleet", 3))
        ):
            model, optimizer = make(form, 2)
            sent.clear()
            train(GradientSync(model, mode=mode, **SMALL), model, optimizer, num_micro)
            wanted = STEPS * sum(p.size for p in model.parameters())
            assert sum(sent) == wanted, (mode, form, num_micro)


def check_the_timeline() -> None:
    for mode in ("fused", "overlap"):
        model, optimizer = make("hooks", 2)
        sync = GradientSync(model, mode=mode, compression="bf16", **SMALL)
        assert sync.timeline is None
        train(sync, model, optimizer, 1)
        timeline, buckets = sync.timeline, sync.timeline.buckets
        assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
        num_elements = sum(p.size for p in model.parameters())
        assert sum(bucket.num_bytes for bucket in buckets) == 2 * num_elements  # bfloat16
        for bucket in buckets:
            assert bucket.queued <= bucket.started < bucket.ended < timeline.ended
        for before, after in itertools.pairwise(buckets):
            assert before.ended <= after.started
        early = [bucket.queued < timeline.backward_ended for bucket in buckets]
        assert early.count(True) == sync.num_early_buckets
        assert (sync.num_early_buckets > 0) is (mode == "overlap")
        assert timeline.began < timeline.first_gradient < timeline.backward_ended


# bfloat16 keeps 8 bits of mantissa: half a unit in the last place is 2**-9 of each rank's share,
# and their sum is rounded once more.
BF16_MEAN = 2**-7


def bf16_error(error_feedback: bool) -> tuple[float, float]:
    """Largest relative error of one mean gradient; root mean square error of 20 steps' mean."""
    values = np.random.default_rng(dist.get_rank()).standard_normal(2000).astype("float32")
    both = [np.random.default_rng(rank).standard_normal(2000) for rank in range(2)]
    exact = np.mean(both, axis=0)
    parameter = paddle.create_parameter([2000], "float32")
    sync = GradientSync([parameter], compression="bf16", error_feedback=error_feedback)
    total, errors, steps = np.zeros(2000), [], 20
    for _ in range(steps):
        with sync.last_backward():
            (parameter * paddle.to_tensor(values)).sum().backward()
        received = parameter.grad.numpy()
        total += received
        errors.append(float(np.abs(received - exact).max() / np.abs(exact).max()))
        parameter.clear_gradient()
    return max(errors), float(np.sqrt(np.mean((total / steps - exact) ** 2)))


def check_bf16_errors_do_not_add_up() -> None:
    (single, accumulated), (_, without) = bf16_error(True), bf16_error(False)
    assert 0 < single < BF16_MEAN
    # What remains is the rounding of the sum itself, which no rank can carry over.
    assert 0.4 * without < accumulated < 0.7 * without, accumulated / without


def check_a_resumed_run_with_bf16_repeats_the_bits() -> None:
    def some_steps(model: Any, sync: GradientSync, steps: range) -> list[np.ndarray]:
        optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
        for step in steps:
            paddle.seed(step)
            with sync.last_backward():
                model(batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return [p.numpy() for p in model.parameters()]

    def resumed(*, as_list: bool = False, drop: bool = False, **options: Any) -> list[np.ndarray]:
        model, _ = make("hooks", 2)
        sync = GradientSync(model.parameters() if as_list else model, **bf16)
        weights = some_steps(model, sync, range(2))
        file = pickle.dumps([weights, sync.state_dict()])

        weights, state = pickle.loads(file)
        model, _ = make("hooks", 2)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.set_value(weight)
        sync = GradientSync(model.parameters() if as_list else model, **{**bf16, **options})
        if not drop:
            sync.set_state_dict(state)
            assert sync.num_synchronized == 2
        return some_steps(model, sync, range(2, 4))

    bf16 = {"compression": "bf16", **SMALL}
    model, _ = make("hooks", 2)
    whole = some_steps(model, GradientSync(model, **bf16), range(4))
    assert same(whole, resumed())
    assert same(whole, resumed(as_list=True))
    assert same(whole, resumed(bucket_bytes=100))
    assert not same(whole, resumed(drop=True))  # or the others would show nothing


test_on_two_ranks = each_on_ranks(
    check_every_combination,
    check_another_order_is_learnt_in_one_step,
    check_backwards_of_another_thread_do_not_end_the_overlap,
    check_data_parallel_without_recompute_gives_the_same_bits,
    check_every_gradient_travels_once_per_optimizer_step,
    check_the_timeline,
    check_bf16_errors_do_not_add_up,
    check_a_resumed_run_with_bf16_repeats_the_bits,
)


def test_a_wrapped_model_and_a_hybrid_group_give_the_same_bits() -> None:
    run_ranks(check_a_wrapped_model_and_a_hybrid_group, 2, fresh=True)


def corrupt_one() -> dict[str, str]:
    """What is said, with and without check_every, of a weight that changes on rank 1 alone."""
    messages = {}
    for check_every in (None, 2):
        model, optimizer = make("none", 1)
        sync = GradientSync(model, check_every=check_every)
        try:
            for step in range(1, 5):
                with sync.last_backward():
                    model(batch(step, 0)).square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()
                if step == 2 and dist.get_rank() == 1:
                    weight = model.blocks[1][0].weight
                    weight.set_value(weight + 2.0**-20)
        except SyncError as error:
            messages[f"check_every={check_every}"] = str(error)
    return messages


def test_check_every_names_the_first_parameter_that_differs() -> None:
    for messages in results_of(corrupt_one):
        (message,) = messages.values()
        assert list(messages) == ["check_every=2"]
        assert message.startswith("'blocks.1.0.weight' differs between the ranks")
        assert "before the update of step 4 it differs on rank 1" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "magic"}, "sync mode 'magic' does not exist; it is one of 'auto', 'fused'"),
        ({"compression": "fp16"}, "compression 'fp16' is not offered"),
        ({"compression": "zip"}, "compression 'zip' does not exist"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"peer_timeout": 0}, "peer_timeout is 0"),
        ({"peer_timeout": 60, "stall_timeout": 30}, "the first at most the second"),
        ({"check_every": 0}, "check_every is 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSync(paddle.nn.Linear(2, 2), **options)


@pytest.mark.parametrize("mode", ["auto", "fleet"])
def test_one_process_does_not_communicate(mode: Any) -> None:
    model = paddle.nn.Linear(2, 2)
    sync = GradientSync(model, mode=mode)
    assert sync.mode == "none"
    with sync.last_backward():
        model(paddle.ones([1, 2])).sum().backward()
        with pytest.raises(SyncError, match="entered inside of itself"):
            sync.last_backward().__enter__()
    assert np.array_equal(model.weight.grad.numpy(), np.ones((2, 2)))


# ------------------------------------------------------------------------- batches that fail


def test_a_batch_that_fails_in_a_single_process() -> None:
    """The next one goes on, and nothing of it is left."""
    model = paddle.nn.Linear(4, 4)
    sync = GradientSync(model)
    for fails in (True, False, True, False):
        with contextlib.suppress(MemoryError), sync.last_backward():
            loss = model(paddle.ones([2, 4])).sum()
            if fails:
                raise MemoryError("out of memory")
            loss.backward()
    assert model.bias.grad.tolist() == [4.0] * 4


def skip_a_batch() -> list[float]:
    """The loop of the documentation; in step 1 the forward of rank 1 runs out of memory."""
    paddle.seed(3)
    model = paddle.nn.Linear(4, 1)
    sync, done = GradientSync(model), []
    for step in range(3):
        failed, loss = paddle.zeros([1], "int32"), None
        try:
            loss = model(paddle.full([2, 4], float(dist.get_rank() + 1))).sum()
            if step == 1 and dist.get_rank() == 1:
                raise MemoryError("out of memory")
        except MemoryError:
            failed += 1
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            continue
        with sync.last_backward():
            loss.backward()
        done.append(float(model.weight.grad.numpy().flat[0]))
    return done


def test_a_batch_whose_forward_fails_is_skipped_on_all_ranks() -> None:
    # The mean of 2 and 4 in step 0; in step 2, each rank adds its own to that mean.
    assert results_of(skip_a_batch) == [[3.0, 6.0], [3.0, 6.0]]
