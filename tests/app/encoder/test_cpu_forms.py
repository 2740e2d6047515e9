"""Forms for CPUs: bit for bit what Paddle's own Layers give, or Paddle's own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.nn.quant.qat import QuantedLinear
from paddle.quantization import QAT, QuantConfig
from paddle.quantization.quanters import FakeQuanterWithAbsMaxObserver

from paddle_recompute import RecomputeConfig, apply_recompute, recompute_wrapper
from paddle_recompute._paddle.amp import OFF, amp_state_of
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.app.encoder import cpu_forms
from paddle_recompute.app.encoder.cpu_forms import (
    Dropout,
    Linear,
    dropout,
    has_forms,
    use_cpu_forms,
)
from tests.app.encoder.test_attention import ids_of, made, trained
from tests.bits import assert_same_bits
from tests.fake_device import selected

on_cpu = pytest.mark.skipif(selected.is_selected(), reason="it is for CPUs")
RATES = [0.1, 0.3, 0.5, 0.75, 1 / 3, 1 - 2**-24, 1e-9, 0.0, 1.0]


def bytes_of(tensor: paddle.Tensor) -> np.ndarray:
    """So that zeros of both signs differ."""
    return np.asarray(tensor.numpy().view(np.int32))


def random(*shape: int) -> paddle.Tensor:
    x = paddle.randn(list(shape))
    x.stop_gradient = False
    return x


def dropped(call: Callable[..., Any], p: float, shape: list[int], training: bool) -> list[Any]:
    """The bytes of output and gradient, and what the generator draws next."""
    paddle.seed(5)
    x, dy = random(*shape), paddle.randn(shape)
    y = call(x, p, training=training)
    following = paddle.rand([2])
    (dx,) = paddle.grad(y, x, dy)
    return [*map(bytes_of, (y, dx, following))]


@on_cpu
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("p", RATES)
def test_dropout_and_the_generator_have_paddles_bits(p: float, training: bool) -> None:
    for shape in ([cpu_forms.SMALLEST + 1], [70, 4, 19, 19]):
        given = (p, shape, training)
        assert_same_bits(dropped(dropout, *given), dropped(F.dropout, *given))


@pytest.mark.skipif(paddle_version() < (3, 3), reason="an older Paddle keeps its own dropout")
@on_cpu
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_shows_where_dropout_drops_it_too(value: float) -> None:
    found = []
    for call in (F.dropout, dropout):
        paddle.seed(5)
        found.append(call(paddle.full([cpu_forms.SMALLEST], value), 0.5, training=True).numpy())
    kept = found[0] != 0
    np.testing.assert_array_equal(found[0][kept], found[1][kept])
    assert 0.4 < kept.mean() < 0.6 and np.isnan(found[1][~kept]).all()


@on_cpu
@pytest.mark.parametrize(
    "millions", [1, pytest.param(100, marks=pytest.mark.matrix)], ids=lambda one: f"{one}M"
)
def test_many_masks_are_paddles(millions: int) -> None:
    """At a rate at which a limit that is half a unit off keeps another element in 2**25."""
    x, found = paddle.ones([10**6]), []
    for call in (F.dropout, dropout):
        paddle.seed(11)
        masks = [np.packbits(call(x, 0.75, training=True).numpy() != 0) for _ in range(millions)]
        found.append([masks, paddle.rand([2])])
    assert_same_bits(*found)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.1 + 2**-27, 1 / 3, 0.0625, 0.9])
def test_the_smallest_draw_that_keeps(p: float) -> None:
    """On both sides of it; float32 rounds an integer of 64 bits as the kernel does."""
    bits, smallest = cpu_forms._kept_draws(p)
    middle = smallest << (64 - bits)
    around = [middle + d for d in (-(2**40), -(2**33), -1, 1, 2**33, 2**40)]
    kept = [np.float32(np.uint64(u)) / np.float32(2**64) >= np.float32(p) for u in around]
    assert kept == [u >= middle for u in around] == [False] * 3 + [True] * 3


@on_cpu
@pytest.mark.parametrize("shape", [[128, 128], [43, 13, 40], [5, 3, 7, 300], [1, 20000]])
def test_linear_has_paddles_bits(shape: list[int]) -> None:
    layer, x, found = Linear(shape[-1], 31), random(*shape), []
    layer.bias.set_value(paddle.randn([31]))
    assert has_forms(x)
    dy = paddle.randn([*shape[:-1], 31])
    for call in (layer, lambda x: paddle.nn.Linear.forward(layer, x)):
        y = call(x)
        found.append([bytes_of(y), *paddle.grad(y, [x, layer.weight, layer.bias], dy)])
    assert_same_bits(*found)


@on_cpu
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_a_frozen_bias_costs_nothing(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    form = paddle.gather_nd
    monkeypatch.setattr(paddle, "gather_nd", lambda *given: calls.append(1) or form(*given))
    layer = Linear(128, 8)
    layer.bias.stop_gradient = not trains
    layer(random(128, 128))
    assert len(calls) == trains


@pytest.mark.skipif(paddle_version() < (3, 0), reason="gather_nd has none on 2.6, nor has softmax")
@on_cpu
def test_second_derivatives_are_paddles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_forms, "SMALLEST", 1)
    found = []
    for forms in (True, False):
        paddle.seed(6)
        x, linear = random(4, 6), Linear(6, 5)
        linear.bias.set_value(paddle.randn([5]))
        paddle.seed(7)
        if forms:
            y = dropout(linear(x) ** 3, 0.5, True)
        else:  # F.dropout has no second derivative
            kept = F.dropout(paddle.ones([4, 5]), 0.5)
            y = paddle.nn.Linear.forward(linear, x) ** 3 * kept
        of = [x, linear.weight, linear.bias]
        first = paddle.grad(y.sum(), of, create_graph=True)
        sum((one**2).sum() for one in first).backward()
        found.append([one.numpy() for one in first] + [one.grad.numpy() for one in of])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # another order of products


@on_cpu
@pytest.mark.filterwarnings("ignore:Tensor do not have 'place':UserWarning")  # Paddle 3's own
@pytest.mark.parametrize(
    ("kind", "way"),
    [("bert", "plain"), ("bert", "recomputed"), ("bert", "compiled"), ("qwen2", "recomputed")],
)
def test_an_encoder_trains_the_bits(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Paddle's own Layers, and of the Program of a compiled encoder, which has these."""
    found = []
    for smallest in (1, 2**40):  # elements: with the forms, and without
        monkeypatch.setattr(cpu_forms, "SMALLEST", smallest)
        model = made(kind)
        replaced = {type(one) for one in model.sublayers() if "forward" in vars(one)}
        assert (paddle.nn.Linear in replaced) == (paddle_version() >= (3, 0))
        if way == "recomputed":
            apply_recompute(model, RecomputeConfig(checkpoints=["encoder.layers.*"]))
        if way == "compiled" and smallest > 1:
            model = paddle.jit.to_static(model, full_graph=True)
        found.append(trained(model, kind))
    assert found[0] == found[1]


def test_libraries_that_go_by_the_class_find_paddles(capsys: pytest.CaptureFixture[str]) -> None:
    """Paddle's quantization by type, and its count of operations."""
    model = made("bert")
    config = QuantConfig(activation=None, weight=None)
    config.add_type_config(paddle.nn.Linear, weight=FakeQuanterWithAbsMaxObserver())
    quantized = QAT(config).quantize(model)
    number = sum(isinstance(one, paddle.nn.Linear) for one in model.sublayers())
    assert sum(isinstance(one, QuantedLinear) for one in quantized.sublayers()) == number > 0
    linear = model.encoder.layers[0].linear1
    paddle.flops(linear, [4, linear.weight.shape[0]])
    assert "Linear'>'s flops has been counted" in capsys.readouterr().out


def test_a_copy_computes_with_its_own_parameters() -> None:
    """And a Layer is freed with its last reference, without a garbage collection."""
    linear, x = paddle.nn.Linear(128, 8), random(128, 128)
    use_cpu_forms(paddle.nn.Sequential(linear))
    other = copy.deepcopy(linear)
    linear.bias.set_value(paddle.ones([8]))
    assert (linear(x) - other(x)).mean() > 0.9
    freed = weakref.ref(linear)
    del linear
    assert freed() is None and other(x).shape == [128, 8]


def test_a_class_that_a_layer_gets_later_has_its_own_forward() -> None:
    """As libraries of adapters give it. Not that of recompute, which adds to the calls alone."""

    class Doubled(paddle.nn.Linear):
        def forward(self, input: paddle.Tensor) -> paddle.Tensor:
            return 2 * super().forward(input)

    linear, x = paddle.nn.Linear(128, 8), random(128, 128)
    use_cpu_forms(paddle.nn.Sequential(linear))
    once = recompute_wrapper(linear)(x)
    linear.unwrap().__class__ = Doubled
    assert_same_bits(linear(x).numpy(), 2 * once.numpy())


@on_cpu
@pytest.mark.filterwarnings("ignore")  # Paddle's own
@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_the_bytecode_translator_takes_the_encoder(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_forms, "SMALLEST", 1)
    found = []
    for model in (made(kind), paddle.jit.to_static(made(kind), full_graph=False)):
        model.eval()
        found.append(model(paddle.to_tensor(ids_of(kind))).numpy())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("why", ["O1", "O2", "float64", "small", "device"])
def test_elsewhere_it_is_paddles_own_call(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(129, 128)
    assert has_forms(x) != selected.is_selected()
    if why == "device" and not selected.is_selected():
        pytest.skip("there is none but the CPU")
    monkeypatch.delattr(cpu_forms, "_Masked")
    monkeypatch.delattr(paddle, "gather_nd")
    linear, drop = Linear(128, 128), Dropout(0.1)
    if why == "float64":
        x, linear = x.astype(why), linear.to(dtype=why)
    if why == "small":
        x = x[:2]
    state = OFF
    if why in ("O1", "O2"):  # auto_cast is without effect on a CPU
        level = getattr(paddle.base.core.AmpLevel, why)
        state = OFF._replace(level=level, dtype="bfloat16", lists=(set(), set()))
    with amp_state_of(state):
        drop(linear(x))


@pytest.mark.skipif(paddle_version() < (3, 0), reason="2.6 keeps its own dropout")
@on_cpu
@pytest.mark.parametrize("options", [{"axis": 0}, {"mode": "downscale_in_infer"}])
def test_dropout_of_other_kinds_is_paddles_own(options: dict[str, Any]) -> None:
    x, found = random(129, 128), []
    for kind in (paddle.nn.Dropout, Dropout):
        paddle.seed(1)
        found.append(bytes_of(kind(0.5, **options)(x)))
    assert_same_bits(*found)
