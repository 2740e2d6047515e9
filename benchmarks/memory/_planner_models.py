"""The models whose plans are measured: small shapes of common architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from benchmarks.correctness import _third_party_models
from paddle_recompute import ContrastiveLoss, GradCache
from paddle_recompute.planner import Job

nn = paddle.nn


class Mean(nn.Layer):
    """The mean over the tokens."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.mean(axis=1)


class Recurrent(nn.Layer):
    """A residual LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(x + self.lstm(x)[0])


class UNet(nn.Layer):
    """Four levels down and up, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        shapes = [(3, w), (w, 2 * w), (2 * w, 4 * w), (4 * w, 4 * w), (8 * w, 2 * w), (4 * w, w)]
        self.blocks = nn.LayerList([self._block(a, b) for a, b in [*shapes, (2 * w, w)]])
        self.head = nn.Conv2D(w, 4, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Layer:
        def conv(c: int) -> list[nn.Layer]:
            return [nn.Conv2D(c, b, 3, padding=1), nn.BatchNorm2D(b), nn.ReLU()]

        return nn.Sequential(*conv(a), *conv(b))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        f, blocks = nn.functional, self.blocks
        one = blocks[0](x)
        two = blocks[1](f.max_pool2d(one, 2))
        three = blocks[2](f.max_pool2d(two, 2))
        low = blocks[3](f.max_pool2d(three, 2))
        up = blocks[4](paddle.concat([f.interpolate(low, scale_factor=2), three], axis=1))
        up = blocks[5](paddle.concat([f.interpolate(up, scale_factor=2), two], axis=1))
        up = blocks[6](paddle.concat([f.interpolate(up, scale_factor=2), one], axis=1))
        return self.head(up)


def encoder(layers: int, width: int, heads: int) -> nn.Layer:
    """Post-norm blocks."""
    block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu")
    return nn.TransformerEncoder(block, layers)


def square(model: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """A loss of any output."""
    return model(x).square().mean()


def contrastive(model: nn.Layer, pair: tuple[paddle.Tensor, paddle.Tensor]) -> paddle.Tensor:
    """The loss of two towers that are one model."""
    query, positive = pair
    return ContrastiveLoss(temperature=0.1)(model(query), model(positive))


def of_formers(model: nn.Layer, batch: dict[str, paddle.Tensor]) -> paddle.Tensor:
    """A loss of a model of PaddleFormers."""
    return _third_party_models.loss_of(model(**batch))


def _llama() -> _third_party_models.Case:
    return next(one for one in _third_party_models.PADDLEFORMERS if one.name == "Llama")


@dataclass(frozen=True)
class Case:
    """A model that is planned.

    Attributes:
        title: For the record.
        model: Builds it.
        batch: Makes its batch.
        loss: Of model and batch.
        chunk: Rows of a chunk of the gradient cache, in dygraph; None: there is none.
        checkpoints: Patterns of the blocks; None: they are found.
        static: Whether its forward can be built into a Program.
        accumulate_steps: Micro-batches of a step. With more than one, all gradients are held at the
            peak; else those of a small batch of a large model would be the peak, whatever is
            recomputed.
        is_large: Fewer hand policies and rounds, and four budgets for Programs: a step takes
            seconds.
    """

    title: str
    model: Callable[[], nn.Layer]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], paddle.Tensor] = square
    chunk: int | None = None
    checkpoints: tuple[str, ...] | None = None
    static: bool = True
    accumulate_steps: int = 1
    is_large: bool = False

    def job(self, mode: str = "dygraph") -> Job:
        """Its step in dygraph, whose calls are those of a step of `mode`."""
        paddle.seed(0)
        model, batch, cache = self.model(), self.batch(), None
        if self.chunk is not None and mode == "dygraph":
            loss = ContrastiveLoss(temperature=0.1)
            cache = GradCache(model, loss, chunk_size=self.chunk)
        optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
        return Job(
            model,
            batch,
            None if cache is not None else self.loss,
            optimizer,
            cache,
            keeps_gradients=self.accumulate_steps > 1,
            checkpoints=self.checkpoints,
        )


CASES = {
    "ernie-base": Case(
        "ERNIE-base's shape: 12 post-norm blocks, hidden 768, 12 heads, two micro-batches of 2 x "
        "32 tokens",
        lambda: encoder(12, 768, 12),
        lambda: paddle.randn([2, 32, 768]),
        accumulate_steps=2,
        is_large=True,
    ),
    "encoder": Case(
        "encoder: 12 post-norm blocks, hidden 64, 8 x 32 tokens",
        lambda: encoder(12, 64, 4),
        lambda: paddle.randn([8, 32, 64]),
    ),
    "resnet50": Case(
        "ResNet-50, two micro-batches of 4 images of 64 x 64",
        lambda: paddle.vision.models.resnet50(num_classes=10),
        lambda: paddle.randn([4, 3, 64, 64]),
        checkpoints=("layer*.*",),
        accumulate_steps=2,
        is_large=True,
    ),
    "unet": Case(
        "U-Net, 7 double convolutions, 4 images of 48 x 48",
        UNet,
        lambda: paddle.randn([4, 3, 48, 48]),
    ),
    "lstm": Case(
        "8 residual LSTMs, width 96, 16 x 24",
        lambda: nn.Sequential(*[Recurrent(96) for _ in range(8)]),
        lambda: paddle.randn([16, 24, 96]),
    ),
    "towers": Case(
        "two towers, one encoder of 6 blocks, hidden 64, 32 pairs of 16 tokens; in dygraph a "
        "gradient cache in chunks of 16",
        lambda: nn.Sequential(encoder(6, 64, 4), Mean()),
        lambda: (paddle.randn([32, 16, 64]), paddle.randn([32, 16, 64])),
        contrastive,
        chunk=16,
    ),
    "formers": Case(
        "Llama of PaddleFormers, 6 blocks, hidden 64, 8 x 64 tokens",
        lambda: _llama().build(),
        lambda: _llama().batch(),
        of_formers,
        static=False,
    ),
}
