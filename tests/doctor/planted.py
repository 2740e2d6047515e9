"""Faults that are planted into models and runs, and healthy models beside them.

Each fault is a function that returns what `doctor` is given; the name of the finding that it must
make is beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    recompute,
)

WIDTH = 8
Given = dict[str, Any]
FAULTS: dict[str, tuple[str, str, Callable[[], Given]]] = {}
"""Title -> (kind of the finding, where it must be, what `doctor` is given)."""
RANK_FAULTS: dict[str, tuple[str, str, Callable[[], Given]]] = {}
WARNINGS: dict[str, tuple[str, str, Callable[[], Given]]] = {}
"""What is often meant to be so: it is said, and the model passes."""
HEALTHY: dict[str, Callable[[], Given]] = {}


def fault(title: str, kind: str, where: str, faults: Any = FAULTS) -> Any:
    def register(build: Callable[[], Given]) -> Callable[[], Given]:
        faults[title] = kind, where, build
        return build

    return register


def healthy(title: str) -> Any:
    def register(build: Callable[[], Given]) -> Callable[[], Given]:
        HEALTHY[title] = build
        return build

    return register


def given(model: nn.Layer, *names: str, shape: Any = (4, WIDTH), **others: Any) -> Given:
    more = {"recompute": RecomputeConfig(checkpoints=list(names))} if names else {}
    return {
        "model": model,
        "batch": paddle.randn(list(shape)),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
        **more,
        **others,
    }


def blocks(*layers: nn.Layer) -> nn.Layer:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 2))


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


class Experts(nn.Layer):
    """Each row goes to the expert that the gate prefers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.LayerList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weights = nn.functional.softmax(self.gate(x))
        chosen = weights.argmax(-1).numpy()
        out = x
        for number in sorted(set(chosen.tolist())):
            rows = paddle.to_tensor(np.flatnonzero(chosen == number))
            part = self.experts[number](x[rows]) * weights[rows, number].unsqueeze(-1)
            out = paddle.scatter_nd_add(out, rows.unsqueeze(-1), part)
        return out


# ------------------------------------------------------------------------------------- one process


def of_numpy(block: Block, x: paddle.Tensor) -> paddle.Tensor:
    return x * float(np.random.default_rng().random() + 0.5)


def by_count(block: Block, x: paddle.Tensor) -> paddle.Tensor:
    return x * (1.0 + 0.5 * (block.calls % 2))


def once_more(block: Block, x: paddle.Tensor) -> paddle.Tensor:
    """Two outputs in turn, so that every step of two calls looks the same from outside."""
    return x * (1.5 if is_second(block) else 1.0)


def is_second(block: Block) -> bool:
    from paddle_recompute.recompute import is_recomputing

    return is_recomputing()


@fault("a random source of its own", "not_repeatable", "1")
def _() -> Given:
    return given(blocks(Block(of_numpy)), "1")


@fault("an output that depends on the number of calls", "not_repeatable", "1")
def _() -> Given:
    return given(blocks(Block(by_count)), "1")


@fault("another output in the second forward", "second_forward_differs", "1")
def _() -> Given:
    return given(blocks(Block(once_more)), "1")


@fault("a list that grows in the forward", "cache_grows", "1.kept")
def _() -> Given:
    return given(blocks(Block(lambda block, x: (block.kept.append(0), x)[1])), "1")


@fault("keys and values of earlier calls", "cache_grows", "1.kept")
def _() -> Given:
    def attend(block: Block, x: paddle.Tensor) -> paddle.Tensor:
        block.kept.append(x.detach())
        return paddle.stack(block.kept).mean(0) + x

    return given(blocks(Block(attend)), "1")


@fault("config.use_cache", "use_cache", "config.use_cache", WARNINGS)
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    model.config = SimpleNamespace(use_cache=True)
    return given(model, "1")


@fault("fleet: no input needs a gradient", "gradient_missing", "0.inner")
def _() -> Given:
    return given(nn.Sequential(ByFleet(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 2)))


@fault("fleet: BatchNorm is updated twice", "buffer_differs", "1.inner.1")
def _() -> Given:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1D(WIDTH))
    return given(blocks(ByFleet(inner)))


@fault("fleet: dropout without its random state", "second_forward_differs", "1.inner.1")
def _() -> Given:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    return given(blocks(ByFleet(inner, preserve_rng_state=False)))


@fault("recompute inside of recompute", "three_forwards", "1.*")
def _() -> Given:
    class Inner(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return recompute(self.linear, x).tanh()

    return given(blocks(nn.Sequential(Inner(), Inner())), "1")


@fault("a wrapped part whose forward is called directly", "never_called", "part")
def _() -> Given:
    return given(
        Whole(
            lambda model, x: model.last(model.part.forward(x)),
            part=nn.Linear(WIDTH, WIDTH),
            last=nn.Linear(WIDTH, 2),
        ),
        "part",
    )


@fault("a parameter that the loss does not use", "unused_parameter", "other.weight", WARNINGS)
def _() -> Given:
    return given(
        Whole(lambda m, x: m.one(x), one=nn.Linear(WIDTH, 2), other=nn.Linear(WIDTH, 2)), "one"
    )


@fault("experts without a token", "unused_parameter", "1.experts.*.weight", WARNINGS)
def _() -> Given:
    return given(blocks(Experts(16)))


@fault("selected experts without a token", "never_called", "1.experts.*", WARNINGS)
def _() -> Given:
    return given(blocks(Experts(16)), "1.experts.*")


@fault("a dropped layer that is to be recomputed", "never_called", "layers.2", WARNINGS)
def _() -> Given:
    return given(without_the_last_layer(), "layers.*")


def without_the_last_layer() -> nn.Layer:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        for layer in model.layers[:2]:
            x = layer(x)
        return x

    return Whole(forward, layers=nn.LayerList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]))


@fault("a pooler in neither loss nor optimizer", "unused_parameter", "pooler.*", WARNINGS)
def _() -> Given:
    model = Whole(lambda m, x: m.one(x), one=nn.Linear(WIDTH, 2), pooler=nn.Linear(WIDTH, 2))
    return given(model, optimizer=paddle.optimizer.AdamW(parameters=model.one.parameters()))


@fault("LayerDrop", "unused_parameter", "*.linear.weight", WARNINGS)
def _() -> Given:
    class Dropped(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return x if paddle.rand([1]).item() < 0.5 else self.linear(x)

    return given(nn.Sequential(*[Dropped() for _ in range(6)]), "*")


@fault("a model that is frozen", "nothing_trained", "")
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    for parameter in model.parameters():
        parameter.stop_gradient = True
    batch = paddle.randn([4, WIDTH])
    batch.stop_gradient = False
    return given(model, "1", batch=batch)


@fault("an optimizer without the last layer", "not_in_optimizer", "2.weight")
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    optimizer = paddle.optimizer.AdamW(parameters=model[:2].parameters())
    return given(model, "1", optimizer=optimizer)


@fault("an optimizer of the model of before", "not_in_model", "")
def _() -> Given:
    model, before = blocks(nn.Linear(WIDTH, WIDTH)), nn.Linear(3, 3)
    both = [*model.parameters(), *before.parameters()]
    return given(model, "1", optimizer=paddle.optimizer.AdamW(parameters=both))


@fault("NaN among the weights", "not_finite", "1")
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    weight = model[1].weight.numpy().copy()
    weight[0, 0] = np.nan
    model[1].weight.set_value(weight)
    return given(model, "1")


@fault("a gradient that is not finite", "not_finite", "0.weight")
def _() -> Given:
    return given(
        nn.Sequential(nn.Linear(WIDTH, WIDTH)),
        loss_fn=lambda model, batch: (model(batch) * 0).sqrt().sum(),
    )


@fault("a loss of each example", "loss_not_scalar", "the loss")
def _() -> Given:
    return given(
        blocks(nn.Linear(WIDTH, WIDTH)), "1", loss_fn=lambda model, batch: model(batch).square()
    )


@fault("a loss that is a tuple", "loss_not_scalar", "the loss")
def _() -> Given:
    return given(
        blocks(nn.Linear(WIDTH, WIDTH)), loss_fn=lambda model, batch: (model(batch).mean(), None)
    )


@fault("a count for a loss", "loss_not_scalar", "the loss")
def _() -> Given:
    return given(blocks(), loss_fn=lambda model, batch: (model(batch) > 0).astype("int64").sum())


@fault("a chunked step that returns nothing", "loss_not_scalar", "the gradient cache")
def _() -> Given:
    model = blocks()
    return given(model, grad_cache=lambda batch: model(batch).square().mean().backward())


@fault("a chunked step without a backward, with dropout", "gradient_missing", "0")
def _() -> Given:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    return given(model, grad_cache=lambda batch: model(batch).square().mean())


@fault("a model whose assertion fails", "error", "")
def _() -> Given:
    def narrow(block: Block, x: paddle.Tensor) -> paddle.Tensor:
        assert x.shape[-1] < WIDTH, "the input is too wide"
        return x

    return given(blocks(Block(narrow)), "1")


@fault("a loss computed without gradients", "nothing_trained", "")
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    return given(model, loss_fn=paddle.no_grad()(lambda model, batch: model(batch).mean()))


@fault("an Embedding with sparse gradients", "sparse_gradient", "0.weight")
def _() -> Given:
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 2))
    return given(model, "1", batch=paddle.to_tensor([[1, 2, 3], [4, 5, 5]]))


@fault("a model in evaluation mode", "eval_mode", "")
def _() -> Given:
    model = blocks(nn.Dropout(0.5))
    model.eval()
    return given(model, "1")


@fault("BatchNorm in a gradient cache", "batch_norm_in_chunks", "1")
def _() -> Given:
    return cached(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1D(WIDTH)))


@fault("a cached gradient with another temperature", "loss_differs", "")
def _() -> Given:
    return cached(nn.Linear(WIDTH, WIDTH), temperature=0.2)


@fault("a gradient of another scale", "gradient_differs", "1")
def _() -> Given:
    def half(batch: paddle.Tensor) -> paddle.Tensor:
        loss = model(batch).square().mean()
        (loss * 0.5).backward()
        return loss

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    return given(model, grad_cache=half)


def cached(model: nn.Layer, temperature: float = 0.1) -> Given:
    loss = ContrastiveLoss(temperature=0.1)
    # A GradCache refuses BatchNorm in training itself; a chunked step of one's own does not.
    cache: Any = None
    if not any(isinstance(layer, nn.BatchNorm1D) for layer in model.sublayers()):
        cache = GradCache(model, ContrastiveLoss(temperature=temperature), chunk_size=2)
    else:

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


# --------------------------------------------------------------------------------------- two ranks


def rank_given(model: nn.Layer, **others: Any) -> Given:
    paddle.seed(100 + dist.get_rank())
    return given(model, **others)


def same_model(*layers: nn.Layer) -> nn.Layer:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 2))


@fault("ranks that start from different weights", "ranks_start_different", "0.weight", RANK_FAULTS)
def _() -> Given:
    paddle.seed(dist.get_rank())
    return rank_given(same_model())


@fault("ranks that read the same data", "same_data", "rank 0, 1", RANK_FAULTS)
def _() -> Given:
    return {**rank_given(same_model()), "batch": paddle.ones([4, WIDTH])}


@fault("a parameter unused on one rank", "unused_on_some_ranks", "other.weight", RANK_FAULTS)
def _() -> Given:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        return model.one(x) + (model.other(x) if dist.get_rank() else 0)

    model = Whole(forward, one=nn.Linear(WIDTH, 2), other=nn.Linear(WIDTH, 2))
    return rank_given(model, sync=GradientSync(model))


@fault("a loss scale that differs", "ranks_disagree", "loss_scale", RANK_FAULTS)
def _() -> Given:
    return rank_given(same_model(), settings={"loss_scale": 1024.0 * (1 + dist.get_rank())})


@fault("a part that is frozen on one rank", "ranks_differ", "0.weight", RANK_FAULTS)
def _() -> Given:
    model = same_model()
    model[0].weight.stop_gradient = dist.get_rank() == 1
    return rank_given(model)


@fault("a batch that only one rank cannot take", "error", "rank 1", RANK_FAULTS)
def _() -> Given:
    width = WIDTH + dist.get_rank()
    return {**rank_given(same_model()), "batch": paddle.randn([4, width])}


@fault("a sum in place of the mean over ranks", "gradient_differs", "1", RANK_FAULTS)
def _() -> Given:
    model = same_model()
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


# ----------------------------------------------------------------------------------------- healthy


@healthy("a perceptron with dropout")
def _() -> Given:
    return given(blocks(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)), "0", "1", "2")


@healthy("a loss that is a list of one number")
def _() -> Given:
    return given(blocks(), "0", loss_fn=lambda model, batch: model(batch).mean().reshape([1, 1]))


@healthy("a Transformer encoder")
def _() -> Given:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1) for _ in range(3)]
    return given(nn.Sequential(*layers), "*", shape=(2, 5, WIDTH))


@healthy("convolutions with BatchNorm")
def _() -> Given:
    model = nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    return given(model, "0", "1", shape=(2, 1, 4, 4))


@healthy("an embedding first, every second part")
def _() -> Given:
    model = nn.Sequential(
        nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    )
    return given(model, "0", "2", batch=paddle.to_tensor([[1, 2, 3], [4, 5, 5]]))


@healthy("one layer called twice")
def _() -> Given:
    return given(
        Whole(
            lambda m, x: m.last(m.twice(m.twice(x).tanh())),
            twice=nn.Linear(WIDTH, WIDTH),
            last=nn.Linear(WIDTH, 2),
        ),
        "twice",
    )


@healthy("an LSTM")
def _() -> Given:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        return model.head(model.lstm(x)[0])

    model = Whole(forward, lstm=nn.LSTM(WIDTH, WIDTH), head=nn.Linear(WIDTH, 2))
    return given(model, "head", shape=(2, 5, WIDTH))


@healthy("fleet's recompute where it is right")
def _() -> Given:
    return given(blocks(ByFleet(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))))


@healthy("a gradient cache")
def _() -> Given:
    return cached(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))


@healthy("a frozen first layer and the optimizer of the rest")
def _() -> Given:
    model = blocks(nn.Linear(WIDTH, WIDTH))
    for parameter in model[0].parameters():
        parameter.stop_gradient = True
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    return given(model, "1", optimizer=optimizer)


@healthy("wrapped before, in segments")
def _() -> Given:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    apply_recompute(model, RecomputeConfig(checkpoints=["*"], policy="segments", segments=2))
    return given(model)
