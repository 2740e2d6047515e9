"""What a Program is made for is compared in each call: a change after calls that fit is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from paddle_recompute.replay import ModelStamp
from paddle_recompute.train_step.trusted_programs import _MadeFor


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1D(4)
        self.scale, self.factors, self.unread = 2.0, [1.0, 3.0], 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.linear(x)) * self.scale * self.factors[0]


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([Block(), Block()])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Change = Callable[[Net], Any]
SEEN: dict[str, tuple[Change, str]] = {
    "a number": (lambda net: setattr(net.blocks[1], "scale", 3.0), "blocks.1.scale"),
    "in a list": (lambda net: net.blocks[0].factors.__setitem__(0, 2.0), "blocks.0.factors"),
    "a longer list": (lambda net: net.blocks[0].factors.append(2.0), "blocks.0.factors"),
    "a sublayer": (
        lambda net: setattr(net.blocks[0], "linear", nn.Linear(4, 4)),
        "blocks.0.linear",
    ),
    "a hook": (
        lambda net: net.blocks[1].register_forward_post_hook(lambda *_: None),
        "the hooks of blocks.1",
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_stamp_names_what_was_changed_once(name: str) -> None:
    net = Net()
    change, label = SEEN[name]
    stamp = ModelStamp(net)
    assert [stamp.change() for _ in range(3)] == [""] * 3
    change(net)
    assert [stamp.change() for _ in range(3)] == [label, "", ""]
    net.blocks[1].scale = 7.0
    assert stamp.change() == "blocks.1.scale"


def test_a_stamp_does_not_mind_what_no_forward_reads() -> None:
    net = Net()
    stamp = ModelStamp(net)
    for count in range(3):
        net.blocks[0].unread = count
        assert stamp.change() == ""


def freeze(net: Net) -> None:
    net.blocks[1].linear.weight.stop_gradient = True


def replace(net: Net) -> None:
    net.blocks[0].linear.weight = net.create_parameter([4, 4])


MISFITS: dict[str, tuple[Change, str]] = {
    "frozen": (freeze, "replaced, frozen or unfrozen"),
    "replaced": (replace, "replaced, frozen or unfrozen"),
    "a sublayer": (lambda net: net.blocks[0].norm.eval(), "into train"),
    "all": (lambda net: net.eval(), "in eval"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_program_that_fitted_is_not_run_after_a_change(name: str) -> None:
    net = Net()
    made_for = _MadeFor(net)
    assert [made_for.misfit(net) for _ in range(3)] == [""] * 3
    change, said = MISFITS[name]
    change(net)
    assert all(said in made_for.misfit(net) for _ in range(3))


def test_the_statistics_of_a_norm_may_be_others() -> None:
    net = Net()
    made_for = _MadeFor(net)
    assert made_for.misfit(net) == ""
    norm = net.blocks[0].norm
    norm._parameters["_mean"] = norm._mean.clone() if "_mean" in norm._parameters else None
    assert made_for.misfit(net) == ""


def test_gradients_that_are_switched_on_in_eval_are_seen() -> None:
    net = Net()
    made_for = _MadeFor(net)
    net.eval()
    with paddle.no_grad():
        assert [made_for.misfit(net) for _ in range(2)] == ["", ""]
    assert "in eval() with gradients on" in made_for.misfit(net)
