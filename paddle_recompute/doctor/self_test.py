"""A test of the library on the user's device. A GPU user runs it first.

Each case makes a training step twice from the same state, with plain calls and through the library,
and compares loss and gradients.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.doctor.examination import doctor
from paddle_recompute.errors import RecomputeError
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import recompute

Run = Callable[..., Any]
_WIDTH = 16
_GPU_ROUNDING = 1e-4
_FAULTS: dict[str, Callable[[], str]] = {}
"""By the title of a case: returns its fault; empty if the case is right."""


def _case(title: str) -> Callable[[Callable[[Run], dict[str, Any]]], None]:
    """Compare what the step of a function returns with plain calls and with `recompute`."""

    def register(body: Callable[[Run], dict[str, Any]]) -> None:
        _FAULTS[title] = functools.partial(_difference, body)

    return register


def _model(title: str) -> Callable[[Callable[[], dict[str, Any]]], None]:
    """Let the doctor examine what a function returns: the arguments of `doctor`."""

    def register(build: Callable[[], dict[str, Any]]) -> None:
        _FAULTS[title] = lambda: "; ".join(map(str, doctor(**build()).findings))

    return register


def self_test() -> dict[str, Any]:
    """Run all cases on the current device.

    Returns:
        For JSON: ``ok``, the versions and the device, and for each case its title, ``ok``,
        ``seconds`` and ``fault``, which is empty if the case is right.
    """
    began = time.perf_counter()
    cases = [_judged(title, fault) for title, fault in _FAULTS.items()]
    device = paddle.get_device()
    environment = {
        "paddle": ".".join(map(str, paddle_version())),
        "python": platform.python_version(),
        "device": device,
    }
    if device.startswith("gpu"):
        properties = paddle.device.cuda.get_device_properties()
        environment["gpu"] = str(properties)
    return {
        "ok": all(case["ok"] for case in cases),
        **environment,
        "machine": platform.platform(),
        "seconds": round(time.perf_counter() - began, 1),
        "cases": cases,
    }


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _observe(body: Callable[[Run], dict[str, Any]], run: Run) -> dict[str, Any]:
    paddle.seed(7)
    seen = body(run)
    seen["next random"] = paddle.rand([2])
    return {name: _value(value) for name, value in seen.items()}


def _value(value: Any) -> Any:
    return value.astype("float32").numpy() if isinstance(value, paddle.Tensor) else value


def _judged(title: str, fault_of: Callable[[], str]) -> dict[str, Any]:
    began = time.perf_counter()
    paddle.seed(7)
    try:
        fault = fault_of()[:300]
    except Exception as error:  # whatever this device and Paddle raise is the case's verdict
        fault = f"{type(error).__name__}: {error}"[:300]
    seconds = round(time.perf_counter() - began, 3)
    return {"title": title, "ok": not fault, "seconds": seconds, "fault": fault}


def _difference(body: Callable[[Run], dict[str, Any]]) -> str:
    wanted, found = _observe(body, _plain), _observe(body, recompute)
    for name, expected in wanted.items():
        if not _equal(expected, found.get(name)):
            return f"{name} differs: {found.get(name)!r}, plain {expected!r}"
    return ""


def _equal(expected: Any, found: Any) -> bool:
    if expected is None or found is None or isinstance(expected, str | int | bool):
        return bool(type(expected) is type(found) and expected == found)
    tolerance = 0.0 if paddle.get_device() == "cpu" else _GPU_ROUNDING
    return bool(np.allclose(expected, found, rtol=tolerance, atol=tolerance))


def _step(loss: paddle.Tensor, *layers: nn.Layer, **more: Any) -> dict[str, Any]:
    """Make the backward; returns loss, gradients and buffers."""
    loss.backward()
    seen: dict[str, Any] = {"loss": loss.detach(), **more}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            seen[f"{number}.{name}.grad"] = parameter.grad
        for name, buffer in layer.named_buffers():
            seen[f"{number}.{name}"] = buffer
    return seen


def _x(grad: bool = True) -> paddle.Tensor:
    x = paddle.linspace(-1, 1, 4 * _WIDTH).reshape([4, _WIDTH])
    x.stop_gradient = not grad
    return x


@_case("keywords, lists, dicts and None as arguments and results")
def _containers(run: Run) -> dict[str, Any]:
    layer, x = nn.Linear(_WIDTH, _WIDTH), _x()

    def call(values: Any, mask: Any, *, factor: float) -> Any:
        return {"out": layer(values["a"][0]) * factor, "mask": mask, "none": None}

    found = run(call, {"a": [x, None]}, paddle.ones([4, 1]), factor=2.0)
    loss = (found["out"] * found["mask"]).sum()
    return _step(loss, layer, none=found["none"] is None) | {"x": x.grad}


@_case("a tensor of the closure")
def _closure(run: Run) -> dict[str, Any]:
    layer, x = nn.Linear(_WIDTH, _WIDTH), _x()
    hidden = x * 2
    return _step(run(lambda y: layer(y + hidden), _x(False)).sum(), layer) | {"x": x.grad}


@_case("recompute inside of recompute")
def _nested(run: Run) -> dict[str, Any]:
    inner, outer = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    return _step(run(lambda x: outer(run(inner, x).tanh()), _x()).sum(), inner, outer)


@_case("backward twice with retain_graph")
def _retained(run: Run) -> dict[str, Any]:
    layer = nn.Linear(_WIDTH, _WIDTH)
    loss = run(layer, _x()).square().sum()
    loss.backward(retain_graph=True)
    return _step(loss, layer)


@_case("paddle.grad leaves the gradients of parameters alone")
def _grad(run: Run) -> dict[str, Any]:
    layer, x = nn.Linear(_WIDTH, _WIDTH), _x()
    (found,) = paddle.grad(run(layer, x).square().sum(), [x])
    return {"x": found, "weight": layer.weight.grad is None}


@_case("bfloat16 under auto_cast")
def _auto_cast(run: Run) -> dict[str, Any]:
    layer = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 2))
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        loss = run(layer, _x()).astype("float32").square().sum()
    return _step(loss, layer)


@_case("a function that changes is refused")
def _changes(run: Run) -> dict[str, Any]:
    layer, calls = nn.Linear(_WIDTH, _WIDTH), []

    def call(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        return layer(x) if len(calls) == 1 else layer(x)[:2]

    try:
        run(call, _x()).sum().backward()
    except RecomputeError:
        return {"ok": True}
    return {"ok": run is _plain}


def _square(model: nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
    return model(batch).square().mean()


@_model("an encoder of three layers")
def _encoder() -> dict[str, Any]:
    layers = [nn.TransformerEncoderLayer(_WIDTH, 2, 32, dropout=0.1) for _ in range(3)]
    return {
        "model": nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *layers),
        "batch": paddle.randn([2, 4, _WIDTH]),
        "loss_fn": _square,
        "recompute": RecomputeConfig(checkpoints=["1", "2", "3"]),
    }


@_model("an embedding and an LSTM, whose first inputs need no gradient")
def _recurrent() -> dict[str, Any]:
    class Recurrent(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm = nn.Embedding(10, _WIDTH), nn.LSTM(_WIDTH, _WIDTH)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.lstm(self.words(ids))[0]

    return {
        "model": Recurrent(),
        "batch": paddle.randint(0, 10, [2, 5]),
        "loss_fn": _square,
        "recompute": RecomputeConfig(checkpoints=["*"]),
    }


@_model("convolutions and BatchNorm")
def _convolutions() -> dict[str, Any]:
    model = nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)
    )
    return {
        "model": model,
        "batch": paddle.randn([2, 1, 4, 8]),
        "loss_fn": _square,
        "recompute": RecomputeConfig(checkpoints=["0", "1"]),
    }


@_model("a gradient cache")
def _grad_cache() -> dict[str, Any]:
    model, loss = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), ContrastiveLoss(0.1)
    return {
        "model": model,
        "batch": (paddle.randn([8, _WIDTH]), paddle.randn([8, _WIDTH])),
        "loss_fn": lambda model, pair: loss(model(pair[0]), model(pair[1])),
        "grad_cache": GradCache(model, loss, chunk_size=3),
    }
