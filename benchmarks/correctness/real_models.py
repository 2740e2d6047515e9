"""`apply_recompute` on models that are not ours: is each bit-equal to itself without it?

Loss, every gradient and every buffer of two training steps, and the peak of the second step, each
in a process of its own. A model whose package is not installed is reported as such.

    python -m benchmarks.correctness.real_models [--only NAME]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from benchmarks.harness.record import in_own_process, table, write_record
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute


@dataclass(frozen=True)
class Subject:
    """A model, its input, and which of its parts are recomputed."""

    make: Callable[[], paddle.nn.Layer]
    batch: Callable[[], paddle.Tensor]
    checkpoints: list[str]


class VisionTransformer(paddle.nn.Layer):
    """Patches, a class token, pre-norm blocks: the shape of ViT (arXiv:2010.11929)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = paddle.nn.Conv2D(3, 128, 8, 8)
        self.token = self.create_parameter([1, 1, 128])
        block = paddle.nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.1, activation="gelu", normalize_before=True
        )
        self.encoder = paddle.nn.TransformerEncoder(block, 6, paddle.nn.LayerNorm(128))
        self.head = paddle.nn.Linear(128, 10)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        x = self.patches(images).flatten(2).transpose([0, 2, 1])
        token = self.token.expand([x.shape[0], 1, 128])
        return self.head(self.encoder(paddle.concat([token, x], 1))[:, 0])


class Recurrent(paddle.nn.Layer):
    """Two LSTMs, one after the other, with dropout between their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.LSTM(64, 128, num_layers=2, dropout=0.2)
        self.second = paddle.nn.LSTM(128, 128)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(self.first(x)[0])[0]


def paddlenlp_ernie() -> paddle.nn.Layer:
    """PaddleNLP's ERNIE, random weights, small."""
    from paddlenlp.transformers import ErnieConfig, ErnieModel

    config = ErnieConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512,
    )  # fmt: skip
    return ErnieModel(config)


def images(side: int) -> Callable[[], paddle.Tensor]:
    """A maker of 8 random images."""
    return lambda: paddle.randn([8, 3, side, side])


SUBJECTS = {
    "paddle.vision ResNet-50": Subject(
        lambda: paddle.vision.models.resnet50(num_classes=10), images(64), ["layer?.*"]
    ),
    "paddle.vision MobileNetV2": Subject(
        lambda: paddle.vision.models.mobilenet_v2(num_classes=10), images(64), ["features.*"]
    ),
    "Vision Transformer": Subject(VisionTransformer, images(64), ["encoder.layers.*"]),
    "LSTM": Subject(Recurrent, lambda: paddle.randn([8, 32, 64]), ["first", "second"]),
    "PaddleNLP ErnieModel": Subject(
        paddlenlp_ernie, lambda: paddle.randint(1, 1000, [8, 48]), ["encoder.layers.*"]
    ),
}


def first_tensor(value: Any) -> paddle.Tensor:
    """The output itself, or the first of several."""
    return value if isinstance(value, paddle.Tensor) else value[0]


def two_steps(subject: Subject, recompute: bool) -> dict[str, Any]:
    """A checksum of everything that training changed, and the peak of the second step."""
    paddle.seed(0)
    model = subject.make()
    model.train()
    wrapped = 0
    if recompute:
        wrapped = len(
            apply_recompute(model, RecomputeConfig(checkpoints=subject.checkpoints)).wrapped
        )
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    state: dict[str, np.ndarray] = {}
    losses = []
    for _ in range(2):
        if _memory.can_reset_peak():
            _memory.reset_peak()
        loss = first_tensor(model(subject.batch())).square().mean()
        loss.backward()
        losses.append(float(loss.item()))
        peak = _memory.peak_bytes()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                state[f"grad {name} {len(losses)}"] = parameter.grad.numpy()
        optimizer.step()
        optimizer.clear_grad()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor._is_initialized():
            state[name] = tensor.numpy()
    return {"losses": losses, "peak": peak, "wrapped": wrapped, "state": state}


def compare(name: str) -> dict[str, Any]:
    """Both ways of one subject; the recomputing one first, as 2.6 cannot reset its peak."""
    subject = SUBJECTS[name]
    try:
        ours = two_steps(subject, recompute=True)
    except ImportError as error:
        return {"missing": str(error)}
    plain = two_steps(subject, recompute=False)
    differing = [
        key for key, value in plain["state"].items()
        if not np.array_equal(value, ours["state"].get(key))
    ]  # fmt: skip
    return {
        "differing": differing,
        "compared": len(plain["state"]),
        "same_losses": ours["losses"] == plain["losses"],
        "wrapped": ours["wrapped"],
        "peaks": [plain["peak"], ours["peak"]],
    }


def main() -> None:
    """Compare every subject and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS, help="internal: one model, as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(compare(options.only)))
        return
    rows = []
    for name in SUBJECTS:
        found = in_own_process("benchmarks.correctness.real_models", "--only", name)
        if "missing" in found:
            rows.append((name, f"not installed: {found['missing']}", "", "", ""))
            continue
        equal = found["same_losses"] and not found["differing"]
        verdict = "bit-equal" if equal else f"differs: {', '.join(found['differing'][:3])}"
        plain, ours = found["peaks"]
        rows.append((name, verdict, found["compared"], found["wrapped"], f"{ours / plain:.3f}"))
    header = ("model", "two training steps", "tensors compared", "parts wrapped", "peak / plain")
    path = write_record(
        "real_models",
        "Models that are not ours",
        "python -m benchmarks.correctness.real_models",
        [*(__doc__ or "").strip().splitlines()[2:4], "", *table(header, rows)],
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
