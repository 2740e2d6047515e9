"""The loss scale, the order of a step, O2's master weights, and what is refused on a CPU."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base.layer_helper import LayerHelper

from paddle_recompute.checkpoint import find_checkpoint, save_checkpoint
from paddle_recompute.errors import ConfigError, DivergenceError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import AmpConfigs
from paddle_recompute.train_step import StepResult, TrainStep, mixed_precision
from paddle_recompute.train_step.mixed_precision import LossScaler
from paddle_recompute.train_step.optimizer_state import set_state_of, state_of
from tests.bits import assert_same_bits, values_of
from tests.train_step.half_precision import pretended_gpu, rounded

FLOAT16 = AmpConfigs()
BFLOAT16 = AmpConfigs(dtype="bfloat16")
LARGEST_FLOAT16 = 65504.0


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended_gpu():
        yield


def linear(seed: int = 0) -> paddle.nn.Linear:
    paddle.seed(seed)
    return paddle.nn.Linear(8, 8)


def batch(seed: int = 0, rows: int = 8) -> paddle.Tensor:
    random = np.random.default_rng(seed)
    return paddle.to_tensor(random.standard_normal((rows, 8)).astype("float32"))


def loss_in_float16(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return rounded(model(x)).square().mean()


def step_of(
    model: paddle.nn.Layer, amp: AmpConfigs | None = FLOAT16, **options: Any
) -> tuple[TrainStep, paddle.optimizer.AdamW]:
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    options = {"loss_fn": loss_in_float16, **options}
    return TrainStep(model, optimizer, amp=amp, **options), optimizer


# ------------------------------------------------------------------------------- the loss scale


@pytest.mark.parametrize(
    "settings",
    [
        {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2},
        {"incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5},
        {"use_dynamic_loss_scaling": False},
    ],
)
def test_the_scale_moves_as_that_of_paddle(settings: dict[str, Any]) -> None:
    ours = LossScaler(AmpConfigs(**settings))
    theirs = paddle.amp.GradScaler(enable=False)  # it switches itself off on a CPU, so by hand:
    theirs._enable = True
    for name, value in vars(AmpConfigs(**settings)).items():
        setattr(theirs, f"_{name}", value)
    # Its own tensor has one axis, which NumPy from 2.4 on does not turn into the number it prints.
    theirs._scale = paddle.to_tensor(ours.scale)
    theirs._incr_count = theirs._decr_count = 0
    finite_steps = np.random.default_rng(0).random(60) > 0.4
    scales = []
    for finite in finite_steps:
        ours.update(bool(finite))
        theirs._cache_found_inf = theirs._cache_founf_inf = not finite  # the latter on 2.6
        if theirs._use_dynamic_loss_scaling:
            theirs._update()
        scales.append(ours.scale)
        # Theirs is a float32.
        assert ours.scale == pytest.approx(float(theirs._scale.item()), rel=1e-5)
    assert len(set(scales)) > 3 or not AmpConfigs(**settings).use_dynamic_loss_scaling
    assert ours.num_skipped == int((~finite_steps).sum())


def test_many_skips_in_a_row_are_a_divergence() -> None:
    scaler = LossScaler(AmpConfigs(use_dynamic_loss_scaling=False))
    for _ in range(mixed_precision.MAX_SKIPS_IN_A_ROW - 1):
        scaler.update(False)
    scaler.update(True)  # in a row only
    for _ in range(mixed_precision.MAX_SKIPS_IN_A_ROW - 1):
        scaler.update(False)
    with pytest.raises(
        DivergenceError, match=r"50 steps in a row .* loss scale of 32768.*bfloat16"
    ):
        scaler.update(False)


def test_a_scale_stays_between_one_and_the_largest_float32() -> None:
    amp = AmpConfigs(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    scaler = LossScaler(amp)
    scaler.update(False)
    scaler.update(False)
    assert scaler.scale == 1.0
    with pytest.raises(DivergenceError, match=r"even with a loss scale of 1, so a smaller one"):
        scaler.update(False)
    scaler = LossScaler(AmpConfigs(init_loss_scaling=2.0**126, incr_every_n_steps=1))
    for _ in range(5):
        scaler.update(True)
    assert np.isfinite(np.float32(scaler.scale))


# ----------------------------------------------------------------------------- the step's order


def test_a_power_of_two_changes_no_bit(gpu: None) -> None:
    """Nothing is rounded here, so only the order and the arithmetic of scaling are seen."""
    results = []
    for amp in (None, FLOAT16, BFLOAT16):
        model = linear()
        step, _ = step_of(
            model,
            amp,
            loss_fn=lambda model, x: model(x).square().mean(),
            accumulate_steps=3,
            clip_grad_norm=0.5,
        )
        results.append(
            (
                [step([batch(3 * i + k) for k in range(3)]).grad_norm for i in range(5)],
                values_of(model),
            )
        )
    (plain_norms, plain), *others = results
    assert min(plain_norms) > 0.5  # clipped in every step
    assert_same_bits(others, [(plain_norms, plain)] * 2)


def test_the_scale_saves_what_float16_would_lose(gpu: None) -> None:
    def tiny_loss(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        return loss_in_float16(model, x) * 1e-7

    norms = {}
    for scale in (1.0, 32768.0):
        step, _ = step_of(linear(), AmpConfigs(init_loss_scaling=scale), loss_fn=tiny_loss)
        norms[scale] = step([batch()]).grad_norm
    exact, _ = step_of(linear(), None, loss_fn=lambda m, x: m(x).square().mean() * 1e-7)
    # float16 has 11 bits, and Paddle 2.6 cuts off the rest instead of rounding.
    assert norms[32768.0] == pytest.approx(exact([batch()]).grad_norm, rel=2**-9)
    assert norms[1.0] == 0.0


class WatchedSync(GradientSync):
    """Notes the gradients as they are when they have been synchronized."""

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        with super().last_backward():
            yield
        self.seen = {name: p.grad.numpy() for name, p in zip(*self._source(), strict=True)}


def test_order_of_a_step(gpu: None) -> None:
    """Gradients are synchronized scaled, and unscaled, then clipped, when they are used."""
    clip, scale = 0.01, 1024.0
    true = linear()
    true(batch()).square().mean().backward()
    norm = math.sqrt(sum(float((p.grad.numpy() ** 2).sum()) for p in true.parameters()))
    model = linear()
    sync = WatchedSync(model)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    used: dict[str, np.ndarray] = {}

    def note_and_step() -> None:
        used.update({name: p.grad.numpy() for name, p in model.named_parameters()})
        assert step.state_dict()["loss_scaler"]["scale"] == scale  # moves after the update
        paddle.optimizer.SGD.step(optimizer)

    optimizer.step = note_and_step
    step = TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, x: model(x).square().mean(),
        sync=sync,
        clip_grad_norm=clip,
        amp=AmpConfigs(init_loss_scaling=scale, incr_every_n_steps=1),
    )
    result = step([batch()])
    assert norm > clip
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    assert result.loss_scale == scale
    assert step.state_dict()["loss_scaler"]["scale"] == 2 * scale
    for name, parameter in true.named_parameters():
        gradient = parameter.grad.numpy()
        np.testing.assert_array_equal(sync.seen[name], scale * gradient)
        np.testing.assert_allclose(used[name], gradient * (clip / norm), rtol=1e-6)


def test_an_overflow_skips_the_step_and_lowers_the_scale(gpu: None) -> None:
    model = linear()
    amp = AmpConfigs(init_loss_scaling=2.0**22, decr_every_n_nan_or_inf=1, decr_ratio=0.25)
    step, optimizer = step_of(model, amp, clip_grad_norm=1.0)
    before, results = values_of(model), []
    while not results or results[-1].skipped:
        assert_same_bits(values_of(model), before)
        assert not [name for name in optimizer.state_dict() if "moment" in name]
        results.append(step([batch()]))
        assert all(p.grad is None for p in model.parameters())
    assert len(results) > 2
    assert [r.loss_scale for r in results] == [2.0 ** (22 - 2 * i) for i in range(len(results))]
    assert step.num_skipped == len(results) - 1
    assert all(math.isfinite(result.loss) for result in results)  # the forward did not overflow
    assert not math.isfinite(results[0].grad_norm) and math.isfinite(results[-1].grad_norm)
    # What was skipped left no trace: the step is the first of an optimizer with that scale.
    fresh = linear()
    lower = replace(amp, init_loss_scaling=results[-1].loss_scale)
    step_of(fresh, lower, clip_grad_norm=1.0)[0]([batch()])
    assert_same_bits(values_of(model), values_of(fresh))


@pytest.mark.parametrize("amp", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_a_loss_that_overflows_is_skipped_with_a_scale_only(gpu: None, amp: AmpConfigs) -> None:
    model = linear()
    before = values_of(model)

    def loss_fn(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        return model(x).mean() + rounded(paddle.to_tensor(2 * LARGEST_FLOAT16))

    step, _ = step_of(model, amp, loss_fn=loss_fn)
    if amp is FLOAT16:
        result = step([batch()])
        assert result.skipped and math.isinf(result.loss) and math.isfinite(result.grad_norm)
    else:
        with pytest.raises(DivergenceError, match=r"the loss is inf.*parameters are as they were"):
            step([batch()])
    assert_same_bits(values_of(model), before)
    assert ("loss_scaler" in step.state_dict()) is (amp is FLOAT16)


def test_a_resumed_step_goes_on_with_the_same_scale(gpu: None) -> None:
    amp = AmpConfigs(init_loss_scaling=2.0**21, decr_every_n_nan_or_inf=2, incr_every_n_steps=3)
    whole = linear()
    step, _ = step_of(whole, amp)
    results = [step([batch(i)]) for i in range(24)]
    model = linear()
    first, optimizer = step_of(model, amp)
    for i in range(9):
        first([batch(i)])
    second = TrainStep(model, optimizer, loss_fn=loss_in_float16, amp=amp)
    scaler = first.state_dict()["loss_scaler"]
    second.set_state_dict({"loss_scaler": json.loads(json.dumps(scaler))})
    resumed = [second([batch(i)]) for i in range(9, 24)]

    def told(results: list[StepResult]) -> list[str]:  # as text: a NaN is not equal to itself
        return [f"{r.loss!r} {r.grad_norm!r} {r.skipped} {r.loss_scale!r}" for r in results]

    assert told(resumed) == told(results[9:])
    assert {r.skipped for r in results} == {True, False}
    assert second.num_skipped == step.num_skipped
    assert_same_bits(values_of(model), values_of(whole))


class OwingSync(GradientSync):
    """Owes something to each rounding, as with compression between ranks."""

    owed = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "residuals": {"weight": np.array([self.owed])}}

    def set_state_dict(self, state: Any) -> None:
        [self.owed] = state["residuals"]["weight"]


def test_what_rounding_owes_moves_with_the_scale(gpu: None) -> None:
    """It is a part of a scaled gradient, and goes into the next one."""
    model = linear()
    sync = OwingSync(model)
    amp = AmpConfigs(init_loss_scaling=64.0, incr_every_n_steps=2, incr_ratio=8.0)
    step, _ = step_of(model, amp, sync=sync)
    owed = []
    for _ in range(4):
        step([batch()])
        owed.append(sync.owed)
    assert owed == [1.0, 8.0, 8.0, 64.0]


def test_the_forward_alone_is_autocast(gpu: None) -> None:
    amp = AmpConfigs(dtype="bfloat16", custom_white_list=["tanh"], custom_black_list=["exp"])
    seen = []

    def loss_fn(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        seen.append(mixed_precision.amp_state())
        return model(x).square().mean()

    step, _ = step_of(linear(), amp, loss_fn=loss_fn)
    step([batch()])
    assert str(seen[0].level) == "AmpLevel.O1" and seen[0].dtype == "bfloat16"
    assert seen[0].lists == ({"tanh"}, {"exp"})
    assert str(mixed_precision.amp_state().level) == "AmpLevel.O0"
    with step.autocast():
        assert str(mixed_precision.amp_state().level) == "AmpLevel.O1"
    with step_of(linear(), None)[0].autocast():
        assert str(mixed_precision.amp_state().level) == "AmpLevel.O0"


# ------------------------------------------------------------------------------------- level O2


class Gate(paddle.nn.Layer):
    """Without a matrix product, which Paddle cannot do in half precision on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter(
            [8], default_initializer=paddle.nn.initializer.Constant(1.0)
        )
        self.norm = paddle.nn.LayerNorm(8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.astype(self.weight.dtype) * self.weight


class MasterAdamW(paddle.optimizer.AdamW):
    """Updates the master weights that Paddle makes, as its GPU kernels do, by plain SGD."""

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self._parameter_list:
            if parameter.grad is not None:
                assert parameter.grad.dtype == paddle.float32
                master = self._create_master_weight(parameter)
                paddle.assign(master - self.get_lr() * parameter.grad, master)
                parameter.set_value(master.astype(parameter.dtype))


def loss_of_gate(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).astype("float32").sum(axis=1).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_keep_what_half_precision_would_round_away(gpu: None, dtype: str) -> None:
    model, steps, rate = Gate(), 20, 1e-4
    optimizer = MasterAdamW(rate, parameters=model.parameters())
    amp = AmpConfigs(dtype=dtype, level="O2")
    step = TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, x: -loss_of_gate(model, x),
        amp=amp,
        accumulate_steps=2,
    )
    half = getattr(paddle, dtype)
    assert model.weight.dtype == half
    # Paddle keeps float16's LayerNorms in float32, not those of bfloat16.
    assert model.norm.weight.dtype == (paddle.float32 if dtype == "float16" else half)
    for _ in range(steps):
        assert not step([paddle.ones([4, 8]), paddle.ones([4, 8])]).skipped
    [master] = optimizer._master_weights.values()
    np.testing.assert_allclose(master.numpy(), 1.0 + steps * rate, rtol=1e-6)
    one_update = paddle.to_tensor(1.0 + rate).astype(dtype).astype("float32")
    assert float(one_update) == 1.0  # in half precision it would not have moved at all
    # 1e-8 is nothing in float16; in float32, after the division by the loss scale, it is there.
    # bfloat16 has 8 bits, and Paddle 2.6 cuts off the rest instead of rounding.
    small = TrainStep(
        model, optimizer, loss_fn=lambda model, x: loss_of_gate(model, x) * 1e-8, amp=amp
    )
    norm = small([paddle.ones([4, 8])]).grad_norm
    assert norm == pytest.approx(1e-8 * math.sqrt(8), rel=2**-7)


def test_o2_states_survive_a_checkpoint(gpu: None, tmp_path: Path) -> None:
    """Paddle's AdamW has no half-precision kernel for CPUs: its own states, by its own methods."""

    def prepared() -> tuple[Gate, paddle.optimizer.AdamW, TrainStep]:
        model = Gate()
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        amp = AmpConfigs(dtype="bfloat16", level="O2")
        return model, optimizer, TrainStep(model, optimizer, loss_fn=loss_of_gate, amp=amp)

    def tensors_of(optimizer: paddle.optimizer.AdamW) -> dict[str, list[np.ndarray]]:
        block = paddle.static.Program().global_block()  # asked for, and not used in dygraph
        optimizer.helper = LayerHelper("AdamW")  # 2.6
        optimizer._create_accumulators(block, optimizer._parameter_list)
        masters = [optimizer._master_weights[p.name] for p in optimizer._parameter_list]
        values = {
            kind: [by_name[master.name].numpy() for master in masters]
            for kind, by_name in optimizer._accumulators.items()
        }
        return {**values, "master": [master.numpy() for master in masters]}

    model, optimizer, _ = prepared()
    tensors_of(optimizer)
    random = np.random.default_rng(0)
    for tensor in [
        *optimizer._master_weights.values(),
        *optimizer._accumulators["moment1"].values(),
        *optimizer._accumulators["moment2"].values(),
    ]:
        tensor.set_value(random.random(tensor.shape).astype("float32"))
    for parameter in model.parameters():
        master = optimizer._master_weights[parameter.name]
        parameter.set_value(master.astype("bfloat16"))
    save_checkpoint(
        tmp_path,
        model=model,
        optimizer_state=state_of(optimizer, dict(model.named_parameters())),
        save_tokenizer=lambda path: path.write_text("{}"),
        state={"step": 1},
    )
    other, fresh, _ = prepared()
    checkpoint = find_checkpoint(tmp_path)
    checkpoint.load_into(other)
    set_state_of(fresh, dict(other.named_parameters()), checkpoint.optimizer_state())
    assert_same_bits(values_of(other), values_of(model))
    saved, restored = tensors_of(optimizer), tensors_of(fresh)
    assert_same_bits(saved, restored)
    # Resumed without O2: the float32 parameters are the master weights, not what was rounded.
    plain = Gate()
    adamw = paddle.optimizer.AdamW(0.1, parameters=plain.parameters())
    checkpoint.load_into(plain)
    set_state_of(adamw, dict(plain.named_parameters()), checkpoint.optimizer_state())
    assert_same_bits([*values_of(plain).values()], saved["master"])


def test_what_o2_does_not_go_with_is_refused(gpu: None) -> None:
    model = linear()
    wrapped = copy.copy(model)
    wrapped.__class__ = type("Wrapped", (paddle.DataParallel,), {})
    with pytest.raises(ConfigError, match="give TrainStep the bare model"):
        step_of(wrapped, AmpConfigs(use_pure_bf16=True))
    optimizer = paddle.optimizer.Momentum(parameters=model.parameters())
    with pytest.raises(ConfigError, match=r"does not go with Momentum; only Adam and AdamW"):
        TrainStep(model, optimizer, loss_fn=loss_in_float16, amp=AmpConfigs(use_pure_fp16=True))
    assert model.weight.dtype == paddle.float32


@pytest.mark.skipif(paddle.get_device().startswith("gpu"), reason="a CPU is meant")
@pytest.mark.parametrize(("dtype", "level"), [("float16", "O1"), ("bfloat16", "O2")])
def test_on_a_cpu_it_is_refused_in_plain_words(dtype: str, level: str) -> None:
    model = linear()
    said = rf"in {dtype} .*silently compute in float32 on this device, 'cpu'.*strategy.amp: false"
    with pytest.raises(ConfigError, match=said):
        step_of(model, AmpConfigs(dtype=dtype, level=level))
    assert model.weight.dtype == paddle.float32
