"""Each form of a call of fleet's recompute, at each of our three doors, on this Paddle and on the
development branch of Paddle, whose recompute has an option more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

from paddle_recompute import is_recomputing, patch, patch_fleet, recompute
from paddle_recompute._paddle import fleet_recompute as private
from paddle_recompute.errors import ConfigError
from paddle_recompute.recompute import function as entry


def development(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Reads its options as fleet's recompute of the development branch, and one of tomorrow."""
    kwargs.pop("preserve_rng_state", True)
    kwargs.pop(
        "preserve_external_rng_state",
        True,
    )
    if kwargs.pop("use_reentrant", True):
        kwargs.pop('offload_indices', [])  # fmt: skip
    kwargs.pop("tomorrow", None)
    return function(*args, **kwargs)


def development_hybrid(ctx: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    ctx.get("mp_group"), ctx.get("offload", False), ctx.get("partition", False)
    ctx.get("tomorrow")
    return function(*args)


@pytest.fixture(params=["installed", "development"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "development":
        others = {"kwargs.pop": development, "ctx.get": development_hybrid}
        for module in (entry, patch):
            monkeypatch.setattr(
                module, "options_of", lambda _, reads: private.options_of(others[reads], reads)
            )
    yield request.param


DOORS: dict[str, Callable[..., Any]] = {
    "recompute": recompute,
    "fleet.utils.recompute": lambda *args, **kwargs: fleet.utils.recompute(*args, **kwargs),
    "recompute_hybrid": lambda *args, **kwargs: fleet.recompute.recompute_hybrid(
        {"mp_group": None, "offload": False, "partition": False}, *args, **kwargs
    ),
}
OUTSIDE = {"preserve_external_rng_state": False}
HOOKS = {"use_reentrant": False}


@dataclass
class Form:
    """The options that are recompute's, the keywords that are the function's."""

    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    parameter: str = "scale"
    """The parameter of the function, which takes all other keywords as well."""
    refused_on: str = ""


FORMS = [
    Form(),
    Form(own={"scale": 2.0}),
    Form(own={"nested": {"mask": ["tensor", 1]}}),
    Form({"preserve_rng_state": True, **HOOKS}, {"scale": 3.0}),
    Form({"use_reentrant": True}),
    Form(HOOKS, {"scale": 2.0, "mask": "tensor"}),
    Form(OUTSIDE),
    Form({"preserve_external_rng_state": True}, {"mask": "tensor"}),
    Form({"offload_indices": []}, {"scale": 2.0}),
    Form({**OUTSIDE, "offload_indices": [0]}, {"mask": "tensor"}),
    Form({**OUTSIDE, **HOOKS, "preserve_rng_state": True, "offload_indices": [0]}, {"scale": 2.0}),
    Form(own={"tomorrow": 5}, refused_on="development"),
    Form(own={"tomorrow": 5}, parameter="tomorrow"),
]


class Block(paddle.nn.Layer):
    """Draws from Paddle, NumPy and Python's own streams, and notes which keywords it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.seen: list[tuple[bool, list[str]]] = []

    def forward(self, x: paddle.Tensor, scale: float = 1.0, **more: Any) -> paddle.Tensor:
        given = ["scale"] * (scale != 1.0) + sorted(more)
        self.seen.append((is_recomputing(), given))
        for value in more.values():
            mask = value["mask"][0] if isinstance(value, dict) else value
            x = x * mask
        noise = float(np.random.random()) + len(self.seen) * 0.0
        return paddle.nn.functional.dropout(self.linear(x) * noise, 0.5).tanh() * scale


class OfTomorrow(Block):
    """Has a parameter with the name of an option."""

    def forward(self, x: paddle.Tensor, tomorrow: int = 0, **more: Any) -> paddle.Tensor:
        return super().forward(x, **more, **({"tomorrow": tomorrow} if tomorrow else {}))


def result(call: Callable[..., Any], form: Form) -> tuple[list[bytes], list[tuple[bool, Any]]]:
    paddle.seed(7)
    np.random.seed(7)
    block = OfTomorrow() if form.parameter == "tomorrow" else Block()
    x = paddle.randn([3, 4])
    mask = paddle.rand([3, 4])
    x.stop_gradient = mask.stop_gradient = False
    given = {"tensor": mask}
    own = {
        name: given.get(value, value) if isinstance(value, str) else value
        for name, value in form.own.items()
    }
    if "nested" in own:
        own["nested"] = {"mask": [mask, 1]}
    loss = call(block, x * 1, **own).sum()
    loss.backward()
    tensors = [loss, x.grad, block.linear.weight.grad, block.linear.bias.grad]
    tensors += [mask.grad] if mask.grad is not None else []
    after = [paddle.rand([1]).numpy().tobytes(), np.random.random_sample(1).tobytes()]
    return [t.numpy().tobytes() for t in tensors] + after, block.seen


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.options}{form.own}")
@pytest.mark.parametrize("door", DOORS)
def test_each_form_has_the_bits_of_the_plain_call(door: str, form: Form, version: str) -> None:
    with patch_fleet():
        if form.refused_on == version:
            with pytest.raises(
                ConfigError, match="tomorrow is an option of Paddle's own recompute"
            ):
                result(DOORS[door], form)
            return
        ours, seen = result(lambda *a, **k: DOORS[door](*a, **form.options, **k), form)
    plain, [(_, keywords)] = result(lambda block, *a, **k: block(*a, **k), form)
    assert keywords == sorted(form.own, key=lambda name: (name != "scale", name))
    assert seen == [(False, keywords), (True, keywords)]
    assert ours == plain


def test_an_option_of_a_pipeline_that_is_not_known(version: str) -> None:
    context = {"mp_group": None, "tomorrow": 1}
    x = paddle.ones([2, 4])
    with patch_fleet():
        if version == "installed":
            assert fleet.recompute.recompute_hybrid(context, Block(), x).shape == [2, 4]
        else:
            with pytest.raises(ConfigError, match="tomorrow in ctx is an option of fleet's"):
                fleet.recompute.recompute_hybrid(context, Block(), x)
