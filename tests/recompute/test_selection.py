"""Which parts of a model a configuration selects, and what it says about the others."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, RecomputeLayer, apply_recompute
from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute import forward_count
from tests.recompute.contract import Seen, assert_as_plain, leaf


def encoder(layers: int = 4, dropout: float = 0.1) -> paddle.nn.Layer:
    class Model(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = paddle.nn.Embedding(7, 8)
            block = paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout, activation="gelu")
            self.encoder = paddle.nn.TransformerEncoder(block, layers)
            self.head = paddle.nn.Linear(8, 3)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.encoder(self.embedding(ids)))

    return Model()


def select(*patterns: str, model: paddle.nn.Layer | None = None, **settings: Any) -> Any:
    config = RecomputeConfig(checkpoints=list(patterns), **settings)
    return apply_recompute(model or encoder(), config)


def wrapped(model: paddle.nn.Layer) -> list[str]:
    return [n for n, layer in model.named_sublayers() if isinstance(layer, RecomputeLayer)]


def look(model: paddle.nn.Layer) -> dict[str, Any]:
    """What wrapping changes of each Layer."""
    layers = model.named_sublayers(include_self=True)
    return {name: (type(layer), set(vars(layer))) for name, layer in layers}


BLOCKS = tuple(f"encoder.layers.{number}" for number in range(4))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["encoder.layers.*"], BLOCKS),
        (["encoder.*.1"], BLOCKS[1:2]),
        (["encoder.layers.3", "encoder.layers.0"], BLOCKS[::3]),
        (["encoder"], ("encoder",)),
        (["*"], ("embedding", "encoder", "head")),
        (["**.linear1"], tuple(f"{block}.linear1" for block in BLOCKS)),
        (["encoder.layers.*.activation"], tuple(f"{block}.activation" for block in BLOCKS)),
        (["**.1.norm*"], ("encoder.layers.1.norm1", "encoder.layers.1.norm2")),
        (["encoder.layers.**.norm1"], tuple(f"{block}.norm1" for block in BLOCKS)),
    ],
    ids=str,
)  # fmt: skip
def test_patterns(patterns: list[str], expected: tuple[str, ...]) -> None:
    model = encoder()
    report = select(*patterns, model=model)
    assert report.wrapped == expected
    functions = [name for name in expected if name.endswith("activation")]
    assert wrapped(model) == [name for name in expected if name not in functions]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encoder.layer.*", "encoder.layers"),
        ("bert.encoder.layers.*", "'encoder.layers."),
        ("encoder.layers.*.self_attention", "self_attn"),
        ("", "similar names"),
    ],
)
def test_no_match_names_what_is_near(pattern: str, near: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(pattern)
    assert f"the pattern '{pattern}' matches no sublayer" in str(caught.value)
    assert near in str(caught.value)
    assert "model.named_sublayers()" in str(caught.value)


class Decoder(paddle.nn.Layer):
    """Blocks in a LayerList, some of them in a list of lists and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        lists = paddle.nn.LayerList
        self.layers = lists([block() for _ in range(3)])
        self.nested = lists([lists([block()]), lists([block(), block()])])
        self.by_name = paddle.nn.LayerDict({"0": block()})
        self.scales = paddle.nn.ParameterList([paddle.create_parameter([1], "float32")])
        self.norm = paddle.nn.LayerNorm(8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        inner = [one for blocks in self.nested for one in blocks]
        for one in (*self.layers, *inner, self.by_name["0"]):
            x = one(x)
        return self.norm(x * self.scales[0])


def block() -> paddle.nn.Layer:
    return paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.Tanh())


@pytest.mark.parametrize("patterns", [["**"], ["*"], ["layers", "nested", "by_name", "norm"]])
def test_a_container_stands_for_its_members(patterns: list[str]) -> None:
    model = Decoder()
    report = select(*patterns, model=model)
    blocks = [*(f"layers.{n}" for n in range(3)), "nested.0.0", "nested.1.0", "nested.1.1"]
    assert report.wrapped == (*blocks, "by_name.0", "norm")
    assert wrapped(model) == list(report.wrapped)
    assert not any(name in report.left_out for name in ("layers", "nested", "scales"))
    model(leaf(2, 8)).sum().backward()
    assert all(
        forward_count(layer) == 1
        for layer in model.sublayers()
        if isinstance(layer, RecomputeLayer)
    )


def test_a_container_without_members_is_refused() -> None:
    with pytest.raises(SelectionError, match="only containers without members"):
        select("scales", model=Decoder())


@pytest.mark.parametrize(
    ("patterns", "settings"),
    [
        (["encoder.layers.*", "no.such.part"], {}),
        (["encoder.layers.*"], {"policy": "segments", "segments": 9}),
        (["encoder.layers.*", "head"], {}),
        (["encoder.layers.*.activation", "head"], {}),
    ],
    ids=str,
)
def test_an_error_leaves_the_model_as_it_was(patterns: list[str], settings: dict[str, Any]) -> None:
    model = encoder()
    if "head" in patterns:
        select(patterns[0], model=model)
    before = look(model)
    with pytest.raises(SelectionError, match="wrapped already" if "head" in patterns else ""):
        select(*reversed(patterns), model=model, **settings)
    assert look(model) == before


def test_a_part_inside_another_is_left_out_and_said() -> None:
    model = encoder()
    report = select("encoder.layers.*", "encoder.layers.1.linear1", "**.activation", model=model)
    assert report.wrapped == BLOCKS
    assert set(report.left_out) == {
        "encoder.layers.1.linear1",
        *(f"{block}.activation" for block in BLOCKS),
    }
    reason = "inside 'encoder.layers.1', which is recomputed as a whole"
    assert report.left_out["encoder.layers.1.linear1"] == reason
    assert f"encoder.layers.1.linear1: left out, {reason}" in str(report)


def test_the_report_is_a_table_to_read(caplog: pytest.LogCaptureFixture) -> None:
    report = select("encoder.layers.*", policy="segments")
    lines = str(report).splitlines()
    assert lines[0] == "recompute: 4 parts in 2 segments"
    assert lines[1].strip() == "encoder.layers.0 + encoder.layers.1"
    assert report.segments == (BLOCKS[:2], BLOCKS[2:])
    every_n = select("encoder.layers.*", policy="every_n")
    assert every_n.left_out == dict.fromkeys(BLOCKS[1::2], "policy every_n")
    cheap = select("**.activation", "**.linear1")
    assert "recompute: encoder.layers.0.activation," in caplog.text and "linear1" not in caplog.text
    assert cheap.discard_outputs == tuple(f"{block}.activation" for block in BLOCKS)
    assert "encoder.layers.0.activation (in a Program, its output too)" in str(cheap)
    assert "encoder.layers.0.linear1\n" in str(cheap)


# ------------------------------------------------------------------- the same numbers on models


def check(make: Any, make_input: Any, config: RecomputeConfig) -> None:
    """Two steps of the model are those without recompute."""

    def outcome(enabled: bool) -> Seen:
        model = make()
        if enabled:
            assert apply_recompute(model, config).wrapped
        optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
        losses = []
        for _ in range(2):
            optimizer.clear_grad()
            outputs = model(make_input())
            num_classes = outputs.shape[-1]
            labels = paddle.zeros([outputs.size // num_classes], "int64")
            losses.append(F.cross_entropy(outputs.reshape([-1, num_classes]), labels))
            losses[-1].backward()
            optimizer.step()
        return {"losses": losses, "model": model}

    assert_as_plain(outcome, True, False)


CHEAP = ["encoder.layers.*.activation", "encoder.layers.*.dropout*", "encoder.layers.*.norm*"]
CHOICES: dict[str, dict[str, Any]] = {
    "every second": {"policy": "every_n"},
    "disk": {"offload": "disk"},
    "whole encoder": {"checkpoints": ["encoder"]},
    "cheap parts": {"checkpoints": CHEAP},
    "cheap parts and attention": {"checkpoints": [*CHEAP, "encoder.layers.*.self_attn"]},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_encoder(choice: str) -> None:
    config = RecomputeConfig(**{"checkpoints": ["encoder.layers.*"], **CHOICES[choice]})
    check(encoder, lambda: paddle.randint(0, 7, [2, 5]), config)


@pytest.mark.parametrize(
    "policy",
    ["every_n", pytest.param("all", marks=pytest.mark.matrix)],
)
def test_resnet18(policy: Any) -> None:
    """A model of Paddle's own, with BatchNorm: statistics and gradients bit by bit."""
    check(
        lambda: paddle.vision.models.resnet18(num_classes=5),
        lambda: leaf(2, 3, 32, 32, stop_gradient=True),
        RecomputeConfig(checkpoints=["layer*.*"], policy=policy),
    )


class Shared(paddle.nn.Layer):
    """One block under two names, and twice in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.3))
        self.second = self.first
        self.blocks = paddle.nn.LayerList([self.first, paddle.nn.Linear(4, 4), self.first])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.second(self.first(x).tanh())
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("patterns", [["blocks.*"], ["first", "blocks.*"], ["second"]])
def test_shared_layers(patterns: list[str]) -> None:
    check(Shared, lambda: leaf(3, 4), RecomputeConfig(checkpoints=patterns))
