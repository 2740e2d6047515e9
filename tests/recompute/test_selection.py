"""Which parts of a model a configuration selects, and what it says about the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, RecomputeLayer, apply_recompute
from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute import forward_count
from tests.recompute.contract import clean_streams, differences, leaf, seen, state_of_the_process


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


BLOCKS = tuple(f"encoder.layers.{number}" for number in range(4))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["encoder.layers.*"], BLOCKS),
        (["encoder.layers.?"], BLOCKS),
        (["encoder.*.1"], BLOCKS[1:2]),
        (["encoder.layers.0", "encoder.layers.3"], BLOCKS[::3]),
        (["encoder.layers.3", "encoder.layers.0"], BLOCKS[::3]),
        (["encoder"], ("encoder",)),
        (["*"], ("embedding", "encoder", "head")),
        (["**.linear1"], tuple(f"{block}.linear1" for block in BLOCKS)),
        (["encoder.layers.*.self_attn"], tuple(f"{block}.self_attn" for block in BLOCKS)),
        (["encoder.layers.*.activation"], tuple(f"{block}.activation" for block in BLOCKS)),
        (["**.1.norm*"], ("encoder.layers.1.norm1", "encoder.layers.1.norm2")),
        (["**.self_attn.*_proj"], tuple(
            f"{block}.self_attn.{which}_proj" for block in BLOCKS for which in "qkv"
        ) ),
    ],
    ids=str,
)  # fmt: skip
def test_patterns(patterns: list[str], expected: tuple[str, ...]) -> None:
    model = encoder()
    report = select(*patterns, model=model)
    if patterns == ["**.self_attn.*_proj"]:  # out_proj too, in the model's order
        expected = tuple(f"{b}.self_attn.{w}_proj" for b in BLOCKS for w in ("q", "k", "v", "out"))
    assert report.wrapped == expected
    functions = [name for name in expected if name.endswith("activation")]
    assert wrapped(model) == [name for name in expected if name not in functions]


def test_a_star_stays_within_one_name_and_two_cross_dots() -> None:
    assert all(name.count(".") == 2 for name in select("encoder.layers.*").wrapped)
    deep = select("encoder.layers.**.norm1").wrapped
    assert deep == tuple(f"{block}.norm1" for block in BLOCKS)


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encoder.layer.*", "encoder.layers"),
        ("encoder.layers.9", "'encoder.layers.3'"),
        ("bert.encoder.layers.*", "'encoder.layers."),
        ("encoder.layers.*.self_attention", "self_attn"),
        ("heads", "'head'"),
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
        lists, dicts = paddle.nn.LayerList, getattr(paddle.nn, "LayerDict", None)
        self.layers = lists([block() for _ in range(3)])
        self.nested = lists([lists([block()]), lists([block(), block()])])
        self.by_name = (dicts or (lambda blocks: lists(blocks.values())))({"0": block()})
        self.scales = paddle.nn.ParameterList([paddle.create_parameter([1], "float32")])
        self.norm = paddle.nn.LayerNorm(8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        inner = [one for blocks in self.nested for one in blocks]
        for one in (*self.layers, *inner, self.by_name["0"] if dicts_exist() else self.by_name[0]):
            x = one(x)
        return self.norm(x * self.scales[0])


def dicts_exist() -> bool:
    return hasattr(paddle.nn, "LayerDict")


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
    assert all(forward_count(layer) == 1 for layer in model.sublayers() if is_wrapped(layer))


def test_two_stars_on_a_stack_of_blocks_wrap_the_blocks() -> None:
    model = encoder()
    report = select("**", model=model.encoder)
    assert report.wrapped == tuple(f"layers.{n}" for n in range(4))


def test_a_container_without_members_is_refused() -> None:
    with pytest.raises(SelectionError, match="only containers without members"):
        select("scales", model=Decoder())


def is_wrapped(layer: paddle.nn.Layer) -> bool:
    return isinstance(layer, RecomputeLayer)


def test_no_match_in_a_model_without_parts() -> None:
    with pytest.raises(SelectionError, match="matches no sublayer"):
        select("*", model=paddle.nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("patterns", "settings"),
    [
        (["encoder.layers.*", "no.such.part"], {}),
        (["encoder.layers.*"], {"policy": "segments", "segments": 9}),
    ],
    ids=str,
)
def test_an_error_leaves_the_model_as_it_was(patterns: list[str], settings: dict[str, Any]) -> None:
    model = encoder()
    before = {
        name: (type(layer), set(vars(layer)))
        for name, layer in model.named_sublayers(include_self=True)
    }
    with pytest.raises(SelectionError):
        select(*patterns, model=model, **settings)
    after = {
        name: (type(layer), set(vars(layer)))
        for name, layer in model.named_sublayers(include_self=True)
    }
    assert after == before


@pytest.mark.parametrize("patterns", [["encoder.layers.*"], ["encoder.layers.*.activation"]])
def test_applying_twice_is_refused_and_changes_nothing(patterns: list[str]) -> None:
    model = encoder()
    select(*patterns, model=model)
    before = {name: type(layer) for name, layer in model.named_sublayers(include_self=True)}
    with pytest.raises(SelectionError, match=r"selects 'encoder\.layers\.0.*wrapped already"):
        select(*patterns, model=model)
    with pytest.raises(SelectionError, match="wrapped already"):
        select("head", *patterns, model=model)
    assert {name: type(layer) for name, layer in model.named_sublayers(include_self=True)} == before


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


def test_names_that_only_begin_alike_do_not_overlap() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(4, 4) for _ in range(12)])
    report = select("1", "10", "11", model=model)
    assert report.wrapped == ("1", "10", "11") and not report.left_out


@pytest.mark.parametrize(
    ("settings", "segments"),
    [
        ({}, [[0], [1], [2], [3]]),
        ({"policy": "every_n"}, [[0], [2]]),
        ({"policy": "every_n", "every_n": 3}, [[0], [3]]),
        ({"policy": "every_n", "every_n": 1}, [[0], [1], [2], [3]]),
        ({"policy": "segments"}, [[0, 1], [2, 3]]),
        ({"policy": "segments", "segments": 1}, [[0, 1, 2, 3]]),
        ({"policy": "segments", "segments": 3}, [[0], [1, 2], [3]]),
    ],
    ids=str,
)
def test_policies(settings: dict[str, Any], segments: list[list[int]]) -> None:
    report = select("encoder.layers.*", **settings)
    assert report.segments == tuple(tuple(BLOCKS[n] for n in one) for one in segments)
    chosen = {name for one in report.segments for name in one}
    assert set(report.wrapped) == chosen
    assert report.left_out == {
        name: f"policy {settings['policy']}" for name in BLOCKS if name not in chosen
    }


def test_too_many_segments() -> None:
    with pytest.raises(SelectionError, match=r"segments is 5.* select only 4 parts"):
        select("encoder.layers.*", policy="segments", segments=5)


def test_disabled() -> None:
    model = encoder()
    report = select("no.such.part", model=model, enable=False)
    assert report.wrapped == () and wrapped(model) == []


def test_the_report_is_a_table_to_read() -> None:
    report = select("encoder.layers.*", policy="segments")
    lines = str(report).splitlines()
    assert lines[0] == "recompute: 4 parts in 2 segments"
    assert lines[1].strip() == "encoder.layers.0 + encoder.layers.1"
    cheap = select("**.activation", "**.linear1")
    assert cheap.gives_up_outputs == tuple(f"{block}.activation" for block in BLOCKS)
    assert "encoder.layers.0.activation (and its output)" in str(cheap)
    assert "encoder.layers.0.linear1\n" in str(cheap)


# ------------------------------------------------------------------- the same numbers on models


def train(model: paddle.nn.Layer, make_input: Any, steps: int = 2) -> dict[str, Any]:
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        outputs = model(make_input())
        num_classes = outputs.shape[-1]
        labels = paddle.zeros([outputs.size // num_classes], "int64")
        loss = F.cross_entropy(outputs.reshape([-1, num_classes]).astype("float32"), labels)
        loss.backward()
        losses.append(loss)
        optimizer.step()
        if len(losses) < steps:
            optimizer.clear_grad()
    return {**dict(seen({"losses": losses, "model": model})), **state_of_the_process()}


def check(make: Any, make_input: Any, config: RecomputeConfig) -> None:
    found = []
    for enabled in (False, True):
        with clean_streams():
            model = make()
            if enabled:
                assert apply_recompute(model, config).wrapped
            found.append(train(model, make_input))
    plain, recomputed = found
    gradients = [v for place, v in plain.items() if place.startswith("grad of") and v is not None]
    assert len(gradients) > 3
    assert differences(recomputed, plain) == []


CHEAP = ["encoder.layers.*.activation", "encoder.layers.*.dropout*", "encoder.layers.*.norm*"]
CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "every second": {"policy": "every_n"},
    "segments": {"policy": "segments"},
    "one segment": {"policy": "segments", "segments": 1},
    "three segments": {"policy": "segments", "segments": 3},
    "disk": {"offload": "disk"},
    "segments on disk": {"policy": "segments", "offload": "disk"},
    "whole encoder": {"checkpoints": ["encoder"]},
    "everything": {"checkpoints": ["*"]},
    "attention": {"checkpoints": ["encoder.layers.*.self_attn"]},
    "activation": {"checkpoints": ["encoder.layers.*.activation"]},
    "dropout": {"checkpoints": ["encoder.layers.*.dropout*"]},
    "cheap parts": {"checkpoints": CHEAP},
    "cheap parts and attention": {"checkpoints": [*CHEAP, "encoder.layers.*.self_attn"]},
    "cheap parts in segments": {"checkpoints": CHEAP, "policy": "segments", "segments": 2},
    "inner linear layers": {"checkpoints": ["encoder.layers.*.linear?"]},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_encoder(choice: str) -> None:
    config = RecomputeConfig(**{"checkpoints": ["encoder.layers.*"], **CHOICES[choice]})
    check(encoder, lambda: paddle.randint(0, 7, [2, 5]), config)


class Square(paddle.nn.Layer):
    """Cheap parts whose output, a square, is used in turned and cut forms over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.norm = paddle.nn.LayerNorm(4)
        self.dropout = paddle.nn.Dropout(0.5)
        self.activation = F.gelu
        self.last = paddle.nn.Linear(4, 4)
        self.way = ""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = self.norm(self.linear(x))
        if self.way == "transposed":
            return self.last(h.transpose([1, 0])).tanh() + h @ h.T
        if self.way == "transposed and back":
            return self.last(h.T.T) * self.dropout(h.T).T
        if self.way == "reshaped":
            return self.last(h.reshape([2, 8]).reshape([4, 4])) * h
        if self.way == "reshaped and kept so":
            return self.last(h.reshape([2, 8]).square().reshape([4, 4])) * h
        if self.way == "transposed and kept so":
            return self.last(h.T.square() * h.transpose([1, 0])) * h
        if self.way == "cut":
            return self.last(h[:, :]) @ h[:4].T + h[1:].sum()
        if self.way == "changed in place":
            return self.last(self.dropout(h).add_(paddle.ones([4]))) * self.activation(h)
        if self.way == "changed in place after its use":
            y = self.activation(self.linear(x))
            z = self.linear(y * 1)
            y.add_(z)
            return self.last(y)
        if self.way == "detached":
            return self.last(h.detach()) * self.activation(h)
        if self.way == "one cheap part after another":
            return self.last(self.dropout(self.activation(self.norm(h)))) @ h
        if self.way == "used by many":
            y = self.activation(h)
            return self.last(y) + self.linear(y) @ y + y.exp()
        return self.last(self.activation(h)).tanh()


WAYS = [
    "plainly", "transposed", "transposed and back",
    "reshaped and kept so",
    "transposed and kept so", "reshaped", "cut", "changed in place",
    "changed in place after its use", "detached", "one cheap part after another", "used by many",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_cheap_outputs_used(way: str) -> None:
    def make() -> paddle.nn.Layer:
        model = Square()
        model.way = way
        return model

    config = RecomputeConfig(checkpoints=["norm", "dropout", "activation"])
    check(make, lambda: leaf(4, 4), config)


@pytest.mark.parametrize("policy", ["all", "every_n", "segments"])
def test_resnet18(policy: Any) -> None:
    """A model of Paddle's own, with BatchNorm: statistics and gradients bit by bit."""
    check(
        lambda: paddle.vision.models.resnet18(num_classes=5),
        lambda: leaf(2, 3, 32, 32, stop_gradient=True),
        RecomputeConfig(checkpoints=["layer*.*"], policy=policy),
    )


def test_lenet_with_every_layer() -> None:
    check(
        lambda: paddle.vision.models.LeNet(),
        lambda: leaf(2, 1, 28, 28, stop_gradient=True),
        RecomputeConfig(checkpoints=["features.*", "fc.*"]),
    )


def test_lstm() -> None:
    class Model(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = paddle.nn.LSTM(4, 4, num_layers=2, dropout=0.3)
            self.head = paddle.nn.Linear(4, 3)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.lstm(x)[0])

    check(Model, lambda: leaf(2, 3, 4), RecomputeConfig(checkpoints=["lstm"]))


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


@pytest.mark.parametrize(
    "patterns", [["first"], ["blocks.*"], ["first", "blocks.*"], ["first", "second"], ["second"]]
)
def test_shared_layers(patterns: list[str]) -> None:
    check(Shared, lambda: leaf(3, 4), RecomputeConfig(checkpoints=patterns))


@pytest.mark.parametrize("policy", ["every_n", "segments"])
def test_shared_layers_under_a_policy(policy: Any) -> None:
    check(Shared, lambda: leaf(3, 4), RecomputeConfig(checkpoints=["blocks.*"], policy=policy))


def test_wrapped_weights_are_the_models_own() -> None:
    model = encoder()
    keys, weight = list(model.state_dict()), model.encoder.layers[0].linear1.weight
    select("encoder.layers.*", model=model)
    assert list(model.state_dict()) == keys
    assert model.encoder.layers[0].linear1.weight is weight
    for layer in model.sublayers():
        if isinstance(layer, RecomputeLayer):
            layer.unwrap()
    select("encoder.layers.*", model=model)  # an unwrapped model can be wrapped again
    assert np.isfinite(model(paddle.randint(0, 7, [2, 5])).numpy()).all()
