"""A test of the library on the user's device, in about two minutes. A GPU user runs it first.

Each case is a model that `doctor` examines there.

    python -m benchmarks.correctness.self_test --device gpu --output self_test.json
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from paddle_recompute._files import write_json
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.doctor import doctor
from paddle_recompute.options import RecomputeConfig

_WIDTH = 16


def self_test() -> dict[str, Any]:
    """Run all cases on the current device.

    Returns:
        For JSON: ``ok``, the versions and the device, and for each case its title, ``ok``,
        ``seconds`` and ``fault``, which is empty if the case is right.
    """
    began = time.perf_counter()
    cases = [_judged(title, build) for title, build in _CASES.items()]
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


def _judged(title: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.perf_counter()
    paddle.seed(7)
    try:
        fault = "; ".join(map(str, doctor(**build()).findings))[:300]
    except Exception as error:  # whatever this device and Paddle raise is the case's verdict
        fault = f"{type(error).__name__}: {error}"[:300]
    seconds = round(time.perf_counter() - began, 3)
    return {"title": title, "ok": not fault, "seconds": seconds, "fault": fault}


def _square(model: nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
    return model(batch).square().mean()


def _auto_cast() -> dict[str, Any]:
    def loss_fn(model: nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            return model(batch).astype("float32").square().sum()

    return {
        "model": nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 2)),
        "batch": paddle.randn([4, _WIDTH]),
        "loss_fn": loss_fn,
        "recompute": RecomputeConfig(checkpoints=["*"]),
    }


def _encoder() -> dict[str, Any]:
    layers = [nn.TransformerEncoderLayer(_WIDTH, 2, 32, dropout=0.1) for _ in range(3)]
    return {
        "model": nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *layers),
        "batch": paddle.randn([2, 4, _WIDTH]),
        "loss_fn": _square,
        "recompute": RecomputeConfig(checkpoints=["1", "2", "3"]),
    }


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


def _grad_cache() -> dict[str, Any]:
    model, loss = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), ContrastiveLoss(0.1)
    return {
        "model": model,
        "batch": (paddle.randn([8, _WIDTH]), paddle.randn([8, _WIDTH])),
        "loss_fn": lambda model, pair: loss(model(pair[0]), model(pair[1])),
        "grad_cache": GradCache(model, loss, chunk_size=3),
    }


_CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "bfloat16 under auto_cast": _auto_cast,
    "an encoder of three layers": _encoder,
    "an embedding and an LSTM, whose first inputs need no gradient": _recurrent,
    "convolutions and BatchNorm": _convolutions,
    "a gradient cache": _grad_cache,
}
"""By title: returns the arguments of `doctor`."""


def main(arguments: Sequence[str]) -> int:
    """Run all cases, print and write their results; the code to exit with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="gpu, cpu, ...; Paddle's choice if not given")
    parser.add_argument("--output", type=Path, default=Path("paddle_recompute_self_test.json"))
    given = parser.parse_args(arguments)
    if given.device is not None:
        paddle.set_device(given.device)
    result = self_test()
    for case in result["cases"]:
        if not case["ok"]:
            print(f"{case['title']}: {case['fault']}")
    num_right = sum(case["ok"] for case in result["cases"])
    print(
        f"{num_right} of {len(result['cases'])} cases are right on {result['device']}, Paddle "
        f"{result['paddle']}; attach {given.output} to a report"
    )
    write_json(given.output, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
