"""Faults that are planted into models and runs, and healthy models beside them.

Each fault is a line of a table: the finding that it must make, and a function that returns what
`doctor` is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import utils as fleet_utils

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    GradientSync,
    RecomputeConfig,
    apply_recompute,
    is_recomputing,
    recompute,
)

WIDTH = 8
Given = dict[str, Any]
Planted = dict[str, tuple[str, str, Callable[[], Given]]]
"""Title -> (kind of the finding, where it must be, what `doctor` is given)."""


def given(model: nn.Layer, *names: str, shape: Any = (4, WIDTH), **others: Any) -> Given:
    more = {"recompute": RecomputeConfig(checkpoints=list(names))} if names else {}
    return {
        "model": model,
        "batch": paddle.randn(list(shape)),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
        **more,
        **others,
    }


def linear(outputs: int = WIDTH) -> nn.Layer:
    return nn.Linear(WIDTH, outputs)


def blocks(*layers: nn.Layer) -> nn.Layer:
    return nn.Sequential(linear(), *layers, linear(2))


class Block(nn.Layer):
    """A Linear with something done in its forward."""

    def __init__(self, effect: Callable[[Any, paddle.Tensor], paddle.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.effect = effect
        self.calls = 0
        self.kept: list[Any] = []

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return self.effect(self, self.linear(x).tanh())


class ByFleet(nn.Layer):
    """Calls fleet's recompute itself, as many models do."""

    def __init__(self, inner: nn.Layer, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Any) -> paddle.Tensor:
        return fleet_utils.recompute(self.inner, x, **self.options)


class Whole(nn.Layer):
    def __init__(self, forward: Callable[..., paddle.Tensor], **layers: nn.Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = forward

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.function(self, x)


def attend(block: Block, x: paddle.Tensor) -> paddle.Tensor:
    block.kept.append(x.detach())
    return paddle.stack(block.kept).mean(0) + x


class Inner(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return recompute(self.linear, x).tanh()


def one_of_two(forward: Callable[..., paddle.Tensor], *names: str, **others: Any) -> Given:
    """A model with the Layers `one` and `other`, of which `forward` uses what it wants."""
    return given(Whole(forward, one=linear(2), other=linear(2)), *names, **others)


def without_the_last_layer() -> nn.Layer:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        for layer in model.layers[:2]:
            x = layer(x)
        return x

    return Whole(forward, layers=nn.LayerList([linear() for _ in range(3)]))


def by_an_optimizer_of_one() -> Given:
    case = one_of_two(lambda m, x: m.one(x))
    optimizer = paddle.optimizer.AdamW(parameters=case["model"].one.parameters())
    return {**case, "optimizer": optimizer}


def optimized(parameters: Callable[[Any], list[paddle.Tensor]]) -> Given:
    model = blocks(linear())
    return given(model, "1", optimizer=paddle.optimizer.AdamW(parameters=parameters(model)))


def frozen() -> Given:
    model, batch = blocks(linear()), paddle.randn([4, WIDTH])
    for parameter in model.parameters():
        parameter.stop_gradient = True
    batch.stop_gradient = False
    return given(model, "1", batch=batch)


def with_nan() -> Given:
    model = blocks(linear())
    with paddle.no_grad():
        model[1].weight[0, 0] = float("nan")
    return given(model, "1")


def keeps_a_cache() -> Given:
    model = blocks(linear())
    model.config = SimpleNamespace(use_cache=True)
    return given(model, "1")


def in_evaluation_mode() -> Given:
    model = blocks(nn.Dropout(0.5))
    model.eval()
    return given(model, "1")


def sparse() -> Given:
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), linear(2))
    return given(model, "1", batch=paddle.to_tensor([[1, 2, 3], [4, 5, 5]]))


def chunked(model: nn.Layer, step: Callable[[paddle.Tensor], Any]) -> Given:
    """`step` gets the loss of the whole batch."""
    return given(model, grad_cache=lambda batch: step(model(batch).square().mean()))


def half_the_gradient(loss: paddle.Tensor) -> paddle.Tensor:
    (loss * 0.5).backward()
    return loss


def cached(model: nn.Layer, temperature: float = 0.1) -> Given:
    loss = ContrastiveLoss(temperature=0.1)
    cache: Any = None
    if not any(isinstance(layer, nn.BatchNorm1D) for layer in model.sublayers()):
        cache = GradCache(model, ContrastiveLoss(temperature=temperature), chunk_size=2)
    else:  # a GradCache refuses BatchNorm in training; a chunked step of one's own does not

        def cache(pair: Any) -> paddle.Tensor:
            parts = [[model(side[:2]), model(side[2:])] for side in pair]
            value = loss(*[paddle.concat(part) for part in parts])
            value.backward()
            return value

    return given(
        model,
        batch=(paddle.randn([4, WIDTH]), paddle.randn([4, WIDTH])),
        loss_fn=lambda model, pair: loss(model(pair[0]), model(pair[1])),
        grad_cache=cache,
    )


def with_loss(loss_fn: Callable[..., Any]) -> Given:
    return given(blocks(linear()), "1", loss_fn=loss_fn)


FAULTS: Planted = {
    "an output that depends on the number of calls": (
        *("not_repeatable", "1"),
        lambda: given(blocks(Block(lambda block, x: x * (1.0 + 0.5 * (block.calls % 2)))), "1"),
    ),
    "another output in the second forward": (
        *("second_forward_differs", "1"),
        lambda: given(blocks(Block(lambda _, x: x * (1.5 if is_recomputing() else 1.0))), "1"),
    ),
    "keys and values of earlier calls": (
        *("cache_grows", "1.kept"),
        lambda: given(blocks(Block(attend)), "1"),
    ),
    "fleet: no input needs a gradient": (
        *("gradient_missing", "0.inner"),
        lambda: given(nn.Sequential(ByFleet(linear()), linear(2))),
    ),
    "fleet: BatchNorm is updated twice": (
        *("buffer_differs", "1.inner.1"),
        lambda: given(blocks(ByFleet(nn.Sequential(linear(), nn.BatchNorm1D(WIDTH))))),
    ),
    "fleet: dropout without its random state": (
        *("second_forward_differs", "1.inner.1"),
        lambda: given(
            blocks(
                ByFleet(
                    nn.Sequential(linear(), nn.Dropout(0.5), linear()), preserve_rng_state=False
                )
            )
        ),
    ),
    "recompute inside of recompute": (
        *("three_forwards", "1.*"),
        lambda: given(blocks(nn.Sequential(Inner(), Inner())), "1"),
    ),
    "a wrapped part whose forward is called directly": (
        *("never_called", "one"),
        lambda: one_of_two(lambda m, x: m.one.forward(x) + m.other(x), "one"),
    ),
    "a model that is frozen": ("nothing_trained", "", frozen),
    "a loss computed without gradients": (
        *("nothing_trained", ""),
        lambda: with_loss(paddle.no_grad()(lambda model, batch: model(batch).mean())),
    ),
    "an optimizer without the last layer": (
        *("not_in_optimizer", "2.weight"),
        lambda: optimized(lambda model: model[:2].parameters()),
    ),
    "an optimizer of the model of before": (
        *("not_in_model", ""),
        lambda: optimized(lambda model: [*model.parameters(), *linear().parameters()]),
    ),
    "NaN among the weights": ("not_finite", "1", with_nan),
    "a gradient that is not finite": (
        *("not_finite", "0.weight"),
        lambda: given(
            nn.Sequential(linear()), loss_fn=lambda model, batch: (model(batch) * 0).sqrt().sum()
        ),
    ),
    "a loss of each example": (
        *("loss_not_scalar", "the loss"),
        lambda: with_loss(lambda model, batch: model(batch).square()),
    ),
    "a count for a loss": (
        *("loss_not_scalar", "the loss"),
        lambda: with_loss(lambda model, batch: (model(batch) > 0).astype("int64").sum()),
    ),
    "a chunked step that returns nothing": (
        *("loss_not_scalar", "the gradient cache"),
        lambda: chunked(blocks(), lambda loss: loss.backward()),
    ),
    "a gradient of another scale": (
        *("gradient_differs", "1"),
        lambda: chunked(blocks(), half_the_gradient),
    ),
    "an Embedding with sparse gradients": ("sparse_gradient", "0.weight", sparse),
    "a model in evaluation mode": ("eval_mode", "", in_evaluation_mode),
    "BatchNorm in a gradient cache": (
        *("batch_norm_in_chunks", "1"),
        lambda: cached(nn.Sequential(linear(), nn.BatchNorm1D(WIDTH))),
    ),
    "a cached gradient with another temperature": (
        *("loss_differs", ""),
        lambda: cached(linear(), temperature=0.2),
    ),
}

WARNINGS: Planted = {
    "config.use_cache": ("use_cache", "config.use_cache", keeps_a_cache),
    "a parameter that the loss does not use": (
        *("unused_parameter", "other.weight"),
        lambda: one_of_two(lambda m, x: m.one(x), "one"),
    ),
    "a dropped layer that is to be recomputed": (
        *("never_called", "layers.2"),
        lambda: given(without_the_last_layer(), "layers.*"),
    ),
    "a pooler in neither loss nor optimizer": (
        *("unused_parameter", "other.*"),
        by_an_optimizer_of_one,
    ),
}
"""What is often meant to be so: it is said, and the model passes."""


# --------------------------------------------------------------------------------------- two ranks


def rank_given(model: nn.Layer, **others: Any) -> Given:
    paddle.seed(100 + dist.get_rank())
    return given(model, **others)


def from_other_weights() -> Given:
    paddle.seed(dist.get_rank())
    return rank_given(blocks())


def unused_on_one_rank() -> Given:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        return model.one(x) + (model.other(x) if dist.get_rank() else 0)

    paddle.seed(0)
    case = one_of_two(forward)
    return rank_given(case["model"], sync=GradientSync(case["model"]))


def frozen_on_one_rank() -> Given:
    model = blocks()
    model[0].weight.stop_gradient = dist.get_rank() == 1
    return rank_given(model)


def sum_of_the_ranks() -> Given:
    model = blocks()
    sync = GradientSync(model)
    before = sync.last_backward

    class Doubled(type(sync)):
        @contextlib.contextmanager
        def last_backward(self) -> Any:
            with before():
                yield
            with paddle.no_grad():
                for parameter in model.parameters():
                    parameter.grad.set_value(parameter.grad * 2)

    sync.__class__ = Doubled
    return rank_given(model, sync=sync)


RANK_FAULTS: Planted = {
    "ranks that start from different weights": (
        *("ranks_start_different", "0.weight"),
        from_other_weights,
    ),
    "ranks that read the same data": (
        *("same_data", "rank 0, 1"),
        lambda: {**rank_given(blocks()), "batch": paddle.ones([4, WIDTH])},
    ),
    "a parameter unused on one rank": (
        *("unused_on_some_ranks", "other.weight"),
        unused_on_one_rank,
    ),
    "a loss scale that differs": (
        *("ranks_disagree", "loss_scale"),
        lambda: rank_given(blocks(), settings={"loss_scale": 1024.0 * (1 + dist.get_rank())}),
    ),
    "a part that is frozen on one rank": ("ranks_differ", "0.weight", frozen_on_one_rank),
    "a batch that only one rank cannot take": (
        *("error", "rank 1"),
        lambda: {**rank_given(blocks()), "batch": paddle.randn([4, WIDTH + dist.get_rank()])},
    ),
    "a sum in place of the mean over ranks": ("gradient_differs", "1", sum_of_the_ranks),
}


# ----------------------------------------------------------------------------------------- healthy


def of_convolutions() -> Given:
    model = nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    return given(model, "0", "1", shape=(2, 1, 4, 4))


def of_an_embedding() -> Given:
    model = nn.Sequential(nn.Embedding(10, WIDTH), linear(), nn.Tanh(), linear(2))
    return given(model, "0", "2", batch=paddle.to_tensor([[1, 2, 3], [4, 5, 5]]))


def with_a_frozen_layer() -> Given:
    case = optimized(lambda model: model.parameters())
    for parameter in case["model"][0].parameters():
        parameter.stop_gradient = True
    return case


def wrapped_before() -> Given:
    model = nn.Sequential(*[linear() for _ in range(6)])
    apply_recompute(model, RecomputeConfig(checkpoints=["*"], policy="every_n"))
    return given(model)


HEALTHY: dict[str, Callable[[], Given]] = {
    "a loss that is a list of one number": lambda: given(
        blocks(), "0", loss_fn=lambda model, batch: model(batch).mean().reshape([1, 1])
    ),
    "a Transformer encoder": lambda: given(
        nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1) for _ in range(3)]),
        *("*",),
        shape=(2, 5, WIDTH),
    ),
    "convolutions with BatchNorm": of_convolutions,
    "an embedding first, every second part": of_an_embedding,
    "one layer called twice": lambda: given(
        Whole(lambda m, x: m.last(m.twice(m.twice(x).tanh())), twice=linear(), last=linear(2)),
        "twice",
    ),
    "fleet's recompute where it is right": lambda: given(
        blocks(ByFleet(nn.Sequential(linear(), nn.Dropout(0.5))))
    ),
    "a gradient cache": lambda: cached(nn.Sequential(linear(), nn.LayerNorm(WIDTH))),
    "a frozen first layer and the optimizer of the rest": with_a_frozen_layer,
    "wrapped before": wrapped_before,
}
