"""OffloadSequential trains what the plain chain trains, to the bit."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, OffloadSequential, TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.gradients import watch_hooks
from paddle_recompute._paddle.released_memory import has_memory
from paddle_recompute.errors import ConfigError, OffloadError, RecomputeError
from paddle_recompute.options import AmpConfigs
from paddle_recompute.recompute import recompute
from tests.bits import assert_same_bits, values_of
from tests.offload.chains import (
    BATCH,
    WIDTH,
    adamw,
    batch,
    cross_entropy,
    encoder_layers,
    offloaded,
    optimizer_of,
    plain,
    train,
)
from tests.ranks import run_ranks
from tests.sharding.runs import CLIPPING
from tests.train_step.half_precision import pretended_gpu

# A batch in parts is summed up in another order; Momentum passes that on without magnifying it.
SUM_IN_ANOTHER_ORDER = 1e-6


def _lars(parameters: Any) -> Any:
    from paddle.incubate.optimizer import LarsMomentumOptimizer

    return LarsMomentumOptimizer(learning_rate=0.1, momentum=0.9, parameter_list=parameters)


trained_plain = functools.cache(lambda make: train(plain(), make=make))
OPTIMIZERS = {
    "SGD": lambda parameters: paddle.optimizer.SGD(0.1, parameters=parameters),
    "Momentum": lambda parameters: paddle.optimizer.Momentum(0.1, parameters=parameters),
    "Lamb": lambda parameters: paddle.optimizer.Lamb(1e-2, parameters=parameters),
    "Lars": _lars,
}


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, adamw),
        ({"offload": "host"}, adamw),
        ({"prefetch": 0}, adamw),
        ({"num_shards": 5, "prefetch": 2}, adamw),
        ({"num_shards": 1}, adamw),
        ({"checkpoint_activations": False}, adamw),
        *[({}, make) for make in OPTIMIZERS.values()],
    ],
    ids=["default", "host", "no prefetch", "5 shards", "1 shard", "activations kept", *OPTIMIZERS],
)
def test_steps_give_the_bits_of_the_plain_chain(options: dict[str, Any], make: Any) -> None:
    assert_same_bits(trained_plain(make), train(offloaded(**options), make=make))


def _rank(accumulate: int, mode: str) -> Any:
    """What the plain chain and the offloaded one give on this rank."""
    return [train(model(), accumulate=accumulate, sync=mode) for model in (plain, offloaded)]


@pytest.mark.parametrize(
    ("mode", "accumulate"),
    [("overlap", 2), ("fused", 1)],
)
def test_two_ranks_give_the_bits_of_the_plain_chain(mode: str, accumulate: int) -> None:
    for expected, actual in run_ranks(_rank, 2, accumulate=accumulate, mode=mode):
        assert_same_bits(expected, actual)


def test_the_device_holds_the_shards_in_use_only() -> None:
    model = offloaded(num_shards=5, prefetch=1)
    counts: list[int] = []
    layer = model[2]
    layer.register_forward_post_hook(
        lambda *_: counts.append(sum(bool(has_memory(p)) for p in model.parameters()))
    )
    per_block = len(layer.parameters())
    train(model, steps=2)
    # It and the next in the forward; in its second forward, it and the one before.
    assert set(counts) <= {per_block, 2 * per_block, per_block + 1}
    assert sum(bool(has_memory(p)) for p in model.parameters()) < 3 * per_block


class _Two(paddle.nn.Layer):
    """Two tensors in, three out: one is passed on as it is, one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.drop = paddle.nn.Dropout(0.1)

    def forward(self, x: Any, y: Any, mask: Any) -> Any:
        return self.drop(self.a(x) * mask), self.b(y) + x, mask


class _Chain(paddle.nn.LayerList):
    def forward(self, *inputs: Any) -> Any:
        for layer in self:
            inputs = layer(*inputs)
        return inputs


def test_several_inputs_and_outputs_have_the_gradients_of_the_plain_chain() -> None:
    found = []
    for make in (_Chain, lambda layers: OffloadSequential(layers, num_shards=2, offload="disk")):
        paddle.seed(3)
        model = make([_Two() for _ in range(4)])
        optimizer = optimizer_of(model)
        x, y, mask = paddle.randn([BATCH, WIDTH]), paddle.randn([BATCH, WIDTH]), paddle.ones([1])
        x.stop_gradient = y.stop_gradient = False
        a, b, out_mask = model(x, y, mask)
        assert out_mask is mask
        (a.sum() + (b * b).sum()).backward()  # a loop of one's own
        optimizer.step()
        optimizer.clear_grad()
        model.eval()
        with paddle.no_grad():
            c, d, _ = model(x, y, mask)
        tensors = [a, b, c, d, x.grad, y.grad, *model.parameters()]
        found.append([one.numpy() for one in tensors])
    assert_same_bits(*found)


def test_micro_batches_inside_a_shard_give_the_same_sum() -> None:
    def momentum(parameters: Any) -> Any:
        return paddle.optimizer.Momentum(0.1, parameters=parameters)

    def eval_mode(model: paddle.nn.Layer) -> paddle.nn.Layer:
        model.eval()  # parts draw other dropout masks than the whole
        return model

    expected, losses = train(eval_mode(plain()), make=momentum)
    actual, same_losses = train(eval_mode(offloaded(num_microbatches=3)), make=momentum)
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=SUM_IN_ANOTHER_ORDER)
    np.testing.assert_allclose(same_losses, losses, atol=SUM_IN_ANOTHER_ORDER)

    class Mean(paddle.nn.Layer):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return x.mean()

    layers = [paddle.nn.Linear(4, 4), Mean()]
    chain = OffloadSequential(layers, num_shards=1, offload="disk", num_microbatches=2)
    with pytest.raises(OffloadError, match="first axis is not the batch"):
        chain(paddle.ones([4, 4]))


def test_state_travels_between_plain_and_offloaded(tmp_path: Path) -> None:
    """A checkpoint after two steps; either continues that of the other."""

    def start(model: paddle.nn.Layer) -> TrainStep:
        return TrainStep(model, optimizer_of(model), loss_fn=cross_entropy)

    def two_steps(step: TrainStep, first: int) -> None:
        paddle.seed(first)
        for number in (first, first + 1):
            step([batch(number, 0)])

    models = {"plain": plain(), "offloaded": offloaded()}
    ends = {}
    for name, model in models.items():
        step = start(model)
        two_steps(step, 0)
        paddle.save(model.state_dict(), str(tmp_path / f"{name}.pdparams"))
        paddle.save(step.state_dict()["optimizer"], str(tmp_path / f"{name}.pdopt"))
        two_steps(step, 2)
        ends[name] = values_of(model)
    assert_same_bits(ends["plain"], ends["offloaded"])
    for source, make in (("plain", offloaded), ("offloaded", plain), ("offloaded", offloaded)):
        model = make()
        for parameter in model.parameters():
            parameter.set_value(paddle.zeros(parameter.shape))
        model.set_state_dict(paddle.load(str(tmp_path / f"{source}.pdparams")))
        step = start(model)
        step.set_state_dict({"optimizer": paddle.load(str(tmp_path / f"{source}.pdopt"))})
        two_steps(step, 2)
        assert_same_bits(ends["plain"], values_of(model))


def test_a_loop_of_ones_own_goes_on_after_steps_with_a_loss_scale() -> None:
    def run(model: paddle.nn.Layer) -> list[np.ndarray]:
        optimizer = optimizer_of(model, OPTIMIZERS["SGD"])
        amp = AmpConfigs(dtype="float16", custom_black_list=["matmul", "matmul_v2", "linear"])
        with pretended_gpu():
            TrainStep(model, optimizer, loss_fn=cross_entropy, amp=amp)([batch(0, 0)])
        for number in range(2):
            cross_entropy(model, batch(1, number)).backward()
        optimizer.step()
        return [p.numpy() for p in model.parameters()]

    assert_same_bits(run(plain()), run(offloaded()))


def test_a_tied_parameter_stays_on_the_device() -> None:
    class Tied(paddle.nn.Layer):
        def __init__(self, weight: paddle.Tensor) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.matmul(x.mean(1), self.weight, transpose_y=True)

    def layers() -> list[paddle.nn.Layer]:
        *body, _ = encoder_layers()
        return [*body, Tied(body[0].weight)]

    # Of several micro-batches, the sum over both places has another order than in the plain chain.
    expected = train(paddle.nn.Sequential(*layers()), accumulate=1)
    model = OffloadSequential(layers(), num_shards=3, offload="disk")
    assert_same_bits(expected, train(model, accumulate=1))
    assert has_memory(model[0].weight)


def test_layers_may_be_made_one_after_the_other() -> None:
    def block() -> paddle.nn.Layer:
        return paddle.nn.Linear(64, 64)

    if not memory.can_reset_peak() or not memory.is_counted():
        pytest.skip("this Paddle cannot measure a peak here")
    before = memory.current_bytes()
    memory.reset_peak()
    chain = OffloadSequential([block] * 20, num_shards=10, offload="disk")
    one = 64 * 65 * 4
    assert memory.peak_bytes() - before < 3 * one
    assert len(chain) == 20


def test_optimizers_that_are_refused() -> None:
    """A plain one, and what cannot be done shard by shard."""
    model = offloaded()
    for parameters in (model.parameters(), model.parameters()[:1]):
        with pytest.raises(ConfigError, match=r"model\.optimizer"):
            TrainStep(model, adamw(parameters), loss_fn=cross_entropy)
    for make in CLIPPING.values():
        with pytest.raises(ConfigError, match="clip_grad_norm"):
            model.optimizer(make)
    with pytest.raises(ConfigError, match="LBFGS"):
        model.optimizer(lambda parameters: paddle.optimizer.LBFGS(parameters=parameters))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 9}, "a shard has at least one"),
        ({"num_shards": 0}, "num_shards is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"offload": "tape"}, "'tape' does not exist"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offloaded(**options)


def test_a_hook_on_an_output_changes_its_gradient() -> None:
    def run(model: paddle.nn.Layer) -> list[np.ndarray]:
        optimizer = optimizer_of(model, OPTIMIZERS["SGD"])
        output = model(batch(0, 0)[0])
        output.register_hook(lambda gradient: gradient * 3)
        output.square().mean().backward()
        optimizer.step()
        return [p.numpy() for p in model.parameters()]

    assert_same_bits(run(plain()), run(offloaded()))


def test_a_layer_that_is_added_or_removed_later_is_refused() -> None:
    """An added one was in no shard, so it was not called."""
    for change in (
        lambda model: model.add_sublayer("5", paddle.nn.ReLU()),
        lambda model: delattr(model, "4"),
    ):
        model = offloaded()
        change(model)
        with pytest.raises(OffloadError, match="was cut with the Layers"):
            model(batch(0, 0)[0])


class WithHead(OffloadSequential):
    def __init__(self) -> None:
        super().__init__([paddle.nn.Linear(4, 4) for _ in range(2)], num_shards=2)
        self.head = paddle.nn.Linear(4, 2)

    def forward(self, *inputs: Any) -> Any:
        return self.head(super().forward(*inputs))


def test_a_subclass_may_have_layers_beside_the_chain() -> None:
    model, x = WithHead(), paddle.randn([3, 4])
    found = model(x).numpy()
    with model.resident():
        assert np.array_equal(found, model.head(model[1](model[0](x))).numpy())


def test_what_cannot_be_repeated_is_refused() -> None:
    x = paddle.randn([4, 4])
    x.stop_gradient = False
    chain = OffloadSequential([paddle.nn.Linear(4, 4)], num_shards=1, offload="disk")
    with pytest.raises(OffloadError, match=r"state_dict\(\)"):
        copy.deepcopy(chain)
    bare = OffloadSequential([paddle.nn.ReLU(), paddle.nn.GELU()], num_shards=2, offload="disk")
    with pytest.raises(OffloadError, match=r"state_dict\(\)"):
        copy.deepcopy(bare)
    with pytest.raises(RecomputeError, match=r"paddle\.grad"):
        paddle.grad(chain(x).sum(), [x])
    with pytest.raises(OffloadError, match="inside of a recomputed"):
        recompute(chain, x)
    loss = chain(x).sum()
    chain[0].weight.set_value(paddle.zeros([4, 4]))
    with pytest.raises(RecomputeError, match="was changed"):
        loss.backward()


def test_a_disk_that_is_full_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OffloadError, match="no file can be made"):
        offloaded(offload_folder=str(tmp_path / "nowhere"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"is full.*are free.*offload_folder"):
        offloaded(offload_folder=str(tmp_path))


def test_the_gradient_cache_leaves_hooks_of_an_offloaded_model_alone() -> None:
    """Their sum over the chunks is with the shard, so it refuses to train such a model."""
    watch_hooks()
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers[0].weight.register_hook(lambda gradient: None)
    chain = OffloadSequential(layers, num_shards=2, offload="disk")
    chain.optimizer(adamw)
    tower, x = paddle.nn.Linear(WIDTH, WIDTH), paddle.rand([4, WIDTH])
    GradCache(tower, ContrastiveLoss(), chunk_size=2).backward(x, x)
    assert tower.weight.grad is not None
    with pytest.raises(OSError, match="a hook on an offloaded parameter"):  # Paddle's own type
        GradCache(chain, ContrastiveLoss(), chunk_size=2).backward(x, x)


def test_copies_of_a_state_dict_go_with_it() -> None:
    model = offloaded()
    gc.collect()
    before = memory.current_bytes()
    state = model.state_dict()
    held = memory.current_bytes()
    name, value = next(iter(state.items()))
    value.set_value(np.full(value.shape, 3, "float32"))
    assert (value.numpy() == 3).all() and (model.state_dict()[name].numpy() == 3).all()
    assert memory.current_bytes() == held > before
    del state, value
    assert memory.current_bytes() == before
