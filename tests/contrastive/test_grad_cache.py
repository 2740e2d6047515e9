"""GradCache leaves the gradients of the whole batch: bit by bit with the same chunks."""

from __future__ import annotations

import gc
import threading
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, apply_recompute
from paddle_recompute._paddle import gradients as leaf_hooks
from paddle_recompute._paddle.gradients import leaves_with_hooks
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    BATCH,
    SIZE,
    WIDTH,
    Encoder,
    both,
    criterion,
    gradients,
    make,
    one_shot,
    parameters,
    relative_difference,
    same_bits,
    step,
    texts,
)

TOLERANCE = 1e-5
"""A sum over the rows of a batch is rounded in another order when the rows come in chunks."""

SIZES = {"uneven": 5, "one row": 1, "more than there is": 100}


@pytest.mark.parametrize("chunk_size", [*SIZES.values(), None], ids=[*SIZES, "no chunks"])
@pytest.mark.parametrize("towers", [1, 2], ids=["tied", "separate"])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned temperature, hooks"])
def test_same_bits_as_one_loss_over_the_same_chunks(
    chunk_size: int | None, towers: int, learned: bool
) -> None:
    """With hooks on the parameters too: they get the sum over all chunks, once."""
    encoders, query, positive = make(towers), texts(1), texts(2)
    loss = ContrastiveLoss(0.1, normalize=True, learnable_temperature=True)
    trained = (encoders, loss) if learned else (encoders,)
    criteria = loss if learned else criterion
    hooks = [Counting() for _ in parameters(*trained)] if learned else []
    for parameter, hook in zip(parameters(*trained), hooks, strict=learned):
        parameter.register_hook(hook)
    paddle.seed(3)
    expected_loss = one_shot(encoders, criteria, query, positive, chunk_size=chunk_size)
    expected, stream = gradients(*trained), paddle.rand([1]).item()

    cache = GradCache(encoders, criteria, chunk_size=chunk_size)
    paddle.seed(3)
    value = cache.backward(query, positive)

    assert value.shape == [] and value.stop_gradient
    assert value.item() == expected_loss.item()
    assert same_bits(gradients(*trained), expected)
    assert {hook.calls for hook in hooks} <= {0, 2}  # in each of both steps, where it is used
    assert paddle.rand([1]).item() == stream, "the random stream stands where a step leaves it"
    assert cache.num_chunks == 2 * -(-BATCH // (chunk_size or BATCH))


@pytest.mark.parametrize(
    "recompute",
    [{"checkpoints": ["encoder.layers.*"]}, {"checkpoints": ["encoder"]}, {"engine": "fleet"}],
    ids=str,
)
def test_with_recompute_inside(recompute: dict[str, Any]) -> None:
    plain, encoder = make(1), make(1)
    apply_recompute(encoder, RecomputeConfig(**recompute))
    step(False, plain)
    step(True, encoder)
    assert same_bits(gradients(encoder), gradients(plain))


class Counting:
    """A hook that is not linear, and how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return gradient * gradient + 0.01


def of_heads(query: dict[str, Any], positive: dict[str, Any]) -> paddle.Tensor:
    assert query["ids"].dtype == paddle.int64 and query["ids"].stop_gradient
    assert query["both"][2] is None
    return (
        criterion(query["pooled"], positive["pooled"])
        + criterion(query["both"][0], positive["same"])
        + query["ids"].astype("float32").mean()
    )


def test_more_heads_than_one() -> None:
    encoder, extra, unused = make(1), paddle.nn.Linear(WIDTH, 4), paddle.nn.Linear(WIDTH, 4)

    def heads(ids: paddle.Tensor) -> dict[str, Any]:
        pooled = encoder(ids)
        same = extra(pooled)
        return {
            "pooled": pooled,
            "ids": ids[:, 0],
            "both": (same, unused(pooled), None),
            "same": same,
        }

    expected, found = both(heads, encoder, extra, loss=of_heads)
    assert relative_difference(found, expected) < TOLERANCE  # the engine has an order of its own
    assert unused.weight.grad is None, "not zeros"


def test_more_inputs_go_through_the_second_encoder_and_arguments_to_the_loss() -> None:
    encoders = make(2)
    inputs = texts(1), texts(2), texts(3, rows=11)

    def loss(query: Any, positive: Any, negatives: Any, *, factor: float = 3.0) -> paddle.Tensor:
        assert [len(query), len(positive), len(negatives)] == [BATCH, BATCH, 11]
        scores = paddle.matmul(query, paddle.concat([positive, negatives]), transpose_y=True)
        return F.cross_entropy(scores * factor, paddle.arange(BATCH))

    expected, found = both(encoders, loss=loss, inputs=inputs)
    assert same_bits(found, expected)
    paddle.seed(3)
    cache = GradCache(encoders, loss, chunk_size=SIZE)
    cache.backward(*inputs, loss_arguments={"factor": 0.0})
    assert not any(one.any() for one in gradients(encoders))


class Towers(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Encoder(), Encoder()

    def of_query(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.left(ids)

    def of_positive(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.right(ids)


def test_methods_of_one_layer_are_encoders() -> None:
    paddle.seed(1)
    model = Towers()
    assert same_bits(*both((model.of_query, model.of_positive), model))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "chunks"),
    [("float16", 2e-3, {"chunk_size": 5}), ("bfloat16", 2e-2, {"chunk_tokens": 30})],
    ids=str,
)
def test_embeddings_in_half_precision(dtype: str, tolerance: float, chunks: dict[str, int]) -> None:
    """Rounded, as under AMP."""
    encoder, query, positive = make(1, dropout=0.0), texts(1), texts(2)
    one_shot(encoder, criterion, query, positive)
    exact = gradients(encoder)
    seen: list[Any] = []

    def loss(*embeddings: paddle.Tensor) -> paddle.Tensor:
        seen.extend(one.dtype for one in embeddings)
        return criterion(*(one.astype("float32") for one in embeddings))

    GradCache(lambda ids: encoder(ids).astype(dtype), loss, **chunks).backward(query, positive)
    assert seen == [getattr(paddle, dtype)] * 2
    assert relative_difference(gradients(encoder), exact) < tolerance


@pytest.mark.parametrize("chunk_size", [None, 5, BATCH])
def test_evaluate_is_the_loss_alone(chunk_size: int | None) -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    encoder.eval()
    has_graph = []
    hook = encoder.register_forward_post_hook(
        lambda *call: has_graph.append(not call[2].stop_gradient)
    )
    cache = GradCache(encoder, criterion, chunk_size=chunk_size)
    value = cache.evaluate(query, positive)
    hook.remove()
    assert value.stop_gradient and value.item() == cache.backward(query, positive).item()
    assert has_graph == [False] * cache.num_chunks


# ---------------------------------------------------------------------------------- without chunks


class Order(paddle.autograd.PyLayer):
    """The identity, which notes when its backward runs."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, name: str) -> paddle.Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        Order.log.append(ctx.name)
        return gradient * 1


class Stack(paddle.nn.Layer):
    """Three linear Layers; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(4, 4) for _ in range(3)])
        self.calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = Order.apply(paddle.tanh(layer(x)), f"call {self.calls}")
        return x


def test_one_encoder_ends_its_backward_before_the_other_begins() -> None:
    stack, loss = Stack(), ContrastiveLoss()
    query, positive = paddle.randn([6, 4]), paddle.randn([6, 4])
    Order.log.clear()
    loss(stack(query), stack(positive)).backward()
    plain, Order.log[:] = Order.log[:], []
    assert plain[:2] in (["call 1", "call 2"], ["call 2", "call 1"]), "the engine takes turns"
    stack.calls = 0
    GradCache(stack, loss).backward(query, positive)
    assert stack.calls == 2
    assert Order.log in (["call 1"] * 3 + ["call 2"] * 3, ["call 2"] * 3 + ["call 1"] * 3)


# ------------------------------------------------------------------------------ hooks on parameters


def square(gradient: paddle.Tensor) -> paddle.Tensor:
    return gradient * gradient


def test_a_hook_on_the_input_runs_once_per_chunk() -> None:
    linear, norms = paddle.nn.Linear(6, 5), []

    def encoder(x: paddle.Tensor) -> paddle.Tensor:
        x.stop_gradient = False
        x.register_hook(lambda gradient: norms.append(float(gradient.norm())))
        return linear(x).tanh()

    GradCache(encoder, criterion, chunk_size=2).backward(paddle.randn([8, 6]), paddle.randn([8, 6]))
    assert len(norms) == 8


def test_hooks_can_be_removed_and_come_back_after_an_error() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    weight = encoder.words.weight
    hook = Counting()
    handle = weight.register_hook(hook)
    (weight.sum() * 2).backward()
    before = weight.grad.numpy().copy()

    def failing(ids: paddle.Tensor) -> paddle.Tensor:
        if is_recomputing():
            raise RecomputeError("stop")
        return encoder(ids)

    with pytest.raises(RecomputeError, match="stop"):
        GradCache(failing, criterion, chunk_size=SIZE).backward(query, positive)
    assert hook.calls == 1 and (weight.grad.numpy() == before).all()
    weight.sum().backward()
    assert hook.calls == 2, "not muted any more"
    assert handle.remove()
    GradCache(encoder, criterion, chunk_size=SIZE).backward(query, positive)
    assert hook.calls == 2


def test_hooks_of_another_thread_s_step_are_its_own() -> None:
    """Two threads, each with an encoder and hooks of its own, change over at each chunk."""
    encoders = [make(1, dropout=0.0) for _ in range(2)]
    hooks = [[Counting() for _ in encoder.parameters()] for encoder in encoders]
    for encoder, own in zip(encoders, hooks, strict=True):
        for parameter, hook in zip(encoder.parameters(), own, strict=True):
            parameter.register_hook(hook)
        step(True, encoder)
    expected = [gradients(encoder) for encoder in encoders]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def run(place: int) -> None:
        def in_turn(ids: paddle.Tensor) -> paddle.Tensor:
            turns[1 - place].release()
            assert turns[place].acquire(timeout=60)
            return encoders[place](ids)

        assert turns[place].acquire(timeout=60)
        try:
            GradCache(in_turn, criterion, chunk_size=SIZE).backward(texts(1), texts(2))
        finally:
            turns[1 - place].release(1000)

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for encoder, wanted in zip(encoders, expected, strict=True):
        assert same_bits(gradients(encoder), wanted)
    assert {hook.calls for own in hooks for hook in own} == {2}


def test_a_step_in_a_step_adds_to_the_sum() -> None:
    """The hook runs once, on the sum of both steps, and not on what ``.grad`` held."""
    encoder = make(1, dropout=0.0)
    inner = GradCache(encoder, criterion, chunk_size=SIZE)

    def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        inner.backward(texts(3), texts(4))
        return criterion(query, positive)

    def plain(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        one_shot(encoder, criterion, texts(3), texts(4), chunk_size=SIZE)
        return criterion(query, positive)

    one_shot(encoder, plain, texts(1), texts(2), chunk_size=SIZE)
    sums = gradients(encoder)
    hooks = [Counting() for _ in encoder.parameters()]
    for parameter, hook in zip(encoder.parameters(), hooks, strict=True):
        parameter.grad = paddle.full_like(parameter, 3.0)
        parameter.register_hook(hook)
    step(True, encoder, loss)
    assert {hook.calls for hook in hooks} == {1}
    found = [one - 3.0 for one in gradients(encoder)]
    assert relative_difference(found, [one * one + np.float32(0.01) for one in sums]) < TOLERANCE


def test_a_hook_from_before_the_import_is_refused() -> None:
    encoder = make(1)
    weight = encoder.words.weight
    leaf_hooks._register_grad_hook(weight, square)  # as it was registered then
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"the parameter '{weight.name}' got a hook"):
            GradCache(encoder, criterion, chunk_size=SIZE)


def test_a_leaf_that_is_gone_is_forgotten() -> None:
    gc.collect()
    before = len(leaves_with_hooks())
    tensor = paddle.zeros([2])
    tensor.stop_gradient = False
    tensor.register_hook(square)
    assert len(leaves_with_hooks()) == before + 1
    del tensor
    assert len(leaves_with_hooks()) == before


def test_hooks_on_the_embeddings_change_their_gradient() -> None:
    def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        query.register_hook(lambda gradient: gradient * 2)
        positive.register_hook(lambda gradient: gradient * 3)
        return criterion(query, positive)

    assert same_bits(*both(make(1), loss=loss))
