"""Buckets: gradients joined into a flat tensor, and given back their pieces of the sum."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_recompute._paddle import memory
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._buckets import Bucket
from paddle_recompute.grad_sync._offloaded import keep_elsewhere
from paddle_recompute.grad_sync._parameters import ParameterList


def parameters() -> list[paddle.Tensor]:
    """The second one gets a gradient that is not contiguous."""
    return [paddle.create_parameter(shape, "float32") for shape in ([2, 3], [3, 4], [4])]


def backward(of: list[paddle.Tensor]) -> list[np.ndarray]:
    (of[0].square().sum() + (of[1].t() * paddle.randn([4, 3])).sum() + of[2].exp().sum()).backward()
    return [one.grad.numpy() for one in of]


def test_a_write_raises_the_version_of_a_gradient() -> None:
    own, bucket = parameters(), Bucket((0, 2), (6, 4))
    backward(own)
    gradients = [one.grad for one in own]
    before = [one.inplace_version for one in gradients]
    bucket.split_into(own, gradients, bucket.join(gradients[::2], paddle.float32, 1.0), frozenset())
    now = [one.inplace_version for one in gradients]
    assert now[0] > before[0] and now[1] == before[1] and now[2] > before[2]


def test_gradients_of_another_dtype_are_refused() -> None:
    with pytest.raises(SyncError, match=r"a gradient is .*float32, and its parameter .*float16"):
        Bucket((0, 1), (2, 2)).join([paddle.ones([2])] * 2, paddle.float16, 0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_joined_as_they_are_under_auto_cast(dtype: str) -> None:
    """Seen on a device: on a CPU ``auto_cast`` casts nothing."""
    gradients, bucket = [paddle.ones([2], dtype), paddle.ones([3], dtype)], Bucket((0, 1), (2, 3))
    with paddle.amp.auto_cast(level="O2", dtype="float16"):
        flat = bucket.join(gradients, gradients[0].dtype, 0.5)
        pieces = bucket.split(flat)
    assert [one.dtype for one in pieces] == [gradients[0].dtype] * 2
    assert float(flat.astype("float32").sum()) == 2.5


def test_a_bucket_keeps_no_memory_of_gradients() -> None:
    if not memory.is_counted():
        pytest.skip("this Paddle counts no bytes here")
    own = [paddle.create_parameter([1 << 18], "float32") for _ in range(2)]
    bucket = Bucket((0, 1), (1 << 18,) * 2)
    empty = memory.current_bytes()
    for _ in range(3):
        paddle.add_n([one.sum() for one in own]).backward()
        gradients = [one.grad for one in own]
        flat = bucket.join(gradients, paddle.float32, 0.5)
        bucket.split_into(own, gradients, flat, frozenset())
        del flat, gradients
        assert memory.current_bytes() - empty < 2.1 * (1 << 20)
        for one in own:
            one.clear_gradient(False)
        assert memory.current_bytes() - empty < 1000


class Nest(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.none = None


CHANGES = {
    "a parameter is replaced": lambda model: setattr(
        model.inner[0], "weight", model.inner[0].create_parameter([2, 2])
    ),
    "in the dict itself": lambda model: model.inner[0]._parameters.update(
        bias=model.create_parameter([2])
    ),
    "the dict is another one": lambda model: vars(model.inner[0]).update(
        _parameters={"other": model.create_parameter([2])}
    ),
    "a parameter is added": lambda model: model.inner[1].add_parameter(
        "more", model.create_parameter([1])
    ),
    "a Layer is added": lambda model: (
        model.inner.append(nn.Linear(1, 1))
        if hasattr(model.inner, "append")
        else model.inner.add_sublayer("2", nn.Linear(1, 1))
    ),
    "a Layer is replaced": lambda model: setattr(model, "inner", nn.Linear(2, 2)),
    "a Layer is removed": lambda model: model._sub_layers.pop("inner"),
    "a tied weight": lambda model: setattr(model.inner[0], "weight", model.inner[0].weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_walk_lists_what_the_layer_lists_after_a_change(change: str) -> None:
    model = Nest()
    walk = ParameterWalk(model)
    assert walk()[1] is walk()[1] and len(walk()[1]) == 4
    CHANGES[change](model)
    names, found = walk()
    wanted = list(model.named_parameters())
    assert names == [name for name, _ in wanted]
    assert [id(one) for one in found] == [id(one) for _, one in wanted]


def test_a_layer_that_lists_its_parameters_itself_is_asked_each_time() -> None:
    class Own(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = nn.Linear(2, 2), 1

        def named_parameters(self, *args: object, **kwargs: object) -> list[tuple[str, object]]:
            return [*super().named_parameters()][: self.count]

    model = Own()
    walk = ParameterWalk(model)
    assert len(walk()[1]) == 1
    model.count = 2
    assert len(walk()[1]) == 2


def test_an_owner_that_comes_later_is_seen() -> None:
    class Owner:
        parameters = ()

    model, owner = nn.Linear(2, 2), Owner()
    walk = ParameterWalk(model)
    listed = ParameterList(walk, structured=True)
    assert listed.trained == (0, 1) and not listed.read()
    keep_elsewhere(model.bias, owner)
    assert listed.read() and listed.trained == (0,)
    assert list(listed.offloaded.values()) == [owner]
