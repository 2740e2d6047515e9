"""``checkpoints: auto`` finds the blocks; the first step shows whether they are called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.distributed import fleet
from paddle.nn import LayerList, Linear, Sequential

from paddle_recompute import RecomputeConfig, apply_recompute
from paddle_recompute.errors import RecomputeError, SelectionError
from tests.recompute.contract import leaf

AUTO = RecomputeConfig()


class Mlp(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(4, 8), Linear(8, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(self.up(x).tanh())


class Mixture(paddle.nn.Layer):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.gate, self.experts = Linear(4, blocks), LayerList([Mlp() for _ in range(blocks)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Holder(paddle.nn.Layer):
    """Calls its sublayers, and the Layers in lists, in turn."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for part in self.children():
            for one in part if isinstance(part, LayerList) else [part]:
                x = one(x)
        return x


def mlps(count: int) -> LayerList:
    return LayerList([Mlp() for _ in range(count)])


MODELS: dict[str, tuple[Callable[[], paddle.nn.Layer], list[str]]] = {
    "a TransformerEncoder": (
        lambda: paddle.nn.TransformerEncoder(paddle.nn.TransformerEncoderLayer(8, 2, 16), 3),
        ["layers.* (3 x TransformerEncoderLayer)"],
    ),
    "stages of blocks": (
        lambda: Holder(
            stages=LayerList([Holder(blocks=mlps(n)) for n in (2, 6)]), head=Linear(4, 2)
        ),
        ["stages.0.blocks.* (2 x Mlp)", "stages.1.blocks.* (6 x Mlp)"],
    ),
    "a mixture of experts": (
        lambda: Holder(layers=LayerList([Mixture(8) for _ in range(3)])),
        ["layers.* (3 x Mixture)"],
    ),
    "two towers": (
        lambda: Holder(query=Holder(layers=mlps(4)), text=Holder(layers=mlps(3))),
        ["query.layers.* (4 x Mlp)", "text.layers.* (3 x Mlp)"],
    ),
    "attributes side by side": (
        lambda: Holder(stem=Linear(4, 4), block1=Mlp(), block2=Mlp(), head=Linear(4, 4)),
        ["block1, block2 (2 x Mlp)"],
    ),
    "different towers in a dict": (
        lambda: paddle.nn.LayerDict({"image": Sequential(Mlp(), Mlp()), "text": Holder(x=mlps(2))}),
        ["image.* (2 x Mlp)", "text.x.* (2 x Mlp)"],
    ),
    "one block with two attentions": (
        lambda: Holder(layers=LayerList([paddle.nn.TransformerDecoderLayer(8, 2, 16)])),
        ["layers.* (1 x TransformerDecoderLayer)"],
    ),
    "one block": (lambda: Holder(layers=mlps(1)), ["layers.* (1 x Mlp)"]),
    "a Sequential of blocks": (
        lambda: Sequential(Linear(4, 4), Mlp(), Mlp(), Linear(4, 4)),
        ["1, 2 (2 x Mlp)"],
    ),
    "Sequentials in a list": (
        lambda: Holder(
            blocks=LayerList([Sequential(Linear(4, 4), paddle.nn.ReLU()) for _ in range(3)])
        ),
        ["blocks.* (3 x Sequential)"],
    ),
    "as many stages as blocks in each": (
        lambda: Holder(stages=LayerList([Holder(blocks=mlps(2)) for _ in range(3)])),
        [f"stages.{n}.blocks.* (2 x Mlp)" for n in range(3)],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_are_found(name: str) -> None:
    build, expected = MODELS[name]
    model = build()
    report = apply_recompute(model, AUTO)
    assert list(report.chosen) == expected
    assert f"checkpoints: auto chose {expected[0]}" in str(report)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(SelectionError, match="finds no repeated blocks in Sequential"):
        apply_recompute(Sequential(Linear(4, 4), paddle.nn.ReLU(), Linear(4, 4)), AUTO)


def step(model: paddle.nn.Layer, *shape: int) -> None:
    model(leaf(*(shape or (3, 4)))).sum().backward()


def update(model: paddle.nn.Layer) -> None:
    """An optimizer's step; the next forward begins another step."""
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    optimizer.step()
    optimizer.clear_grad()


@pytest.mark.parametrize("engine", ["paddle_recompute", "fleet"])
def test_what_is_called_is_verified(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Holder(layers=mlps(3))
    report = apply_recompute(model, RecomputeConfig(engine=engine))
    with pytest.raises(RecomputeError, match="no backward has given a gradient"):
        report.verify()
    other = Mlp()
    with caplog.at_level(logging.WARNING):
        step(other)
        with pytest.raises(RecomputeError, match="no backward has given a gradient"):
            report.verify()
        step(model)
        step(model)
    report.verify()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Past(paddle.nn.Layer):
    """Calls the forward of one block directly, past the wrapping, and leaves out another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps(4)
        self.layers[3].act = paddle.tanh

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.layers[3](self.layers[2].forward(self.layers[0](x)))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("auto", "layers.1, layers.2"),
        (["**"], "layers.1, layers.2"),
        (["layers.3.act", "layers.0"], "layers.3.act"),  # a function
    ],
)
def test_what_is_not_called_is_named(
    patterns: Any, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Past()
    report = apply_recompute(model, RecomputeConfig(checkpoints=patterns))
    step(model)
    words = f"{names}: not called by any forward of the first step"
    with pytest.raises(SelectionError, match=words):
        report.verify()
    step(model)
    assert words not in caplog.text
    update(model)
    step(model)
    assert words in caplog.text
    update(model)
    step(model)
    assert caplog.text.count(words) == 1
    with pytest.raises(SelectionError, match=words):
        report.verify()


def test_towers_with_a_backward_each_are_one_step(caplog: pytest.LogCaptureFixture) -> None:
    """The forward of the second tower, and of the blocks of one model, comes after a backward."""
    towers = paddle.nn.LayerDict({"image": Holder(layers=mlps(2)), "text": Holder(layers=mlps(2))})
    report = apply_recompute(towers, AUTO)
    for _ in range(3):
        for _ in range(2):  # accumulation
            step(towers["image"])
            step(towers["text"])
        update(towers)
    report.verify()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Recomputing(paddle.nn.Layer):
    """Recomputes its blocks by fleet, as models of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.forwards = mlps(2), 0
        self.layers[0].up.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = fleet.utils.recompute(layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("outer", [True, False], ids=["around ours", "inside ours"])
def test_a_second_recompute_is_noticed(outer: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Recomputing()
    whole = Holder(model=model) if outer else Holder(blocks=LayerList([model]))
    patterns = ["model.layers.*"] if outer else ["blocks.*"]
    report = apply_recompute(whole, RecomputeConfig(checkpoints=patterns))
    step(whole)
    assert model.forwards == 3
    names = "model.layers.0, model.layers.1" if outer else "blocks.0"
    words = f"{names}: recomputed by the model as well, so there are three forwards"
    assert words in caplog.text
    with pytest.raises(SelectionError, match=words):
        report.verify()


def test_our_own_nesting_is_not_a_second_recompute(caplog: pytest.LogCaptureFixture) -> None:
    model = Holder(model=Holder(layers=mlps(2)))
    inner = apply_recompute(model.model, AUTO)
    outer = apply_recompute(model, RecomputeConfig(checkpoints=["model"]))
    step(model)
    inner.verify()
    outer.verify()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_watch_ends_with_the_step_or_the_model() -> None:
    from paddle_recompute._paddle import backward, layers

    before = len(layers.Watches.everywhere), len(backward._after)
    model = Holder(layers=mlps(2))
    apply_recompute(model, AUTO)
    del model
    model = Holder(layers=mlps(2))
    report = apply_recompute(model, AUTO)
    step(model)
    assert (len(layers.Watches.everywhere), len(backward._after)) == before
    report.verify()
