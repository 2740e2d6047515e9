"""The second forward of a chunk repeats the first, and leaves no marks of its own."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_recompute import GradCache, compile_model
from paddle_recompute._paddle import amp as tracer_state
from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute.captured_state import CapturedState, call
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    BATCH,
    CHUNKS,
    SIZE,
    WIDTH,
    Encoder,
    both,
    criterion,
    gradients,
    make,
    relative_difference,
    same_bits,
    step,
    texts,
)


@pytest.mark.parametrize("is_found", [True, False], ids=["a sublayer", "met when it is called"])
def test_streams_of_numpy_and_python(is_found: bool) -> None:
    """Noise on top of Paddle's dropout, which a hook of a Layer draws."""
    noise, found = paddle.nn.Identity(), []
    noise.register_forward_post_hook(
        lambda layer, inputs, output: output * (np.random.rand() + random.random())
    )
    for is_cached in (False, True):
        encoder = make(1)
        encoder.words.weight.noise = noise  # no search looks into tensors
        if is_found:
            encoder.noise = noise
        step(is_cached, lambda ids, encoder=encoder: encoder.words.weight.noise(encoder(ids)))
        found.append([*gradients(encoder), np.random.rand(), random.random()])
    assert same_bits(found[1], found[0])


class Scale:
    def __init__(self, value: float) -> None:
        self.value = value


class ChangesLater(Encoder):
    """The forward of certain rows changes what the forwards after it read."""

    def __init__(self, what: str, rows: list[list[int]]) -> None:
        super().__init__()
        self.what, self.rows, self.scale = what, rows, Scale(1.0)
        self.heads = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.head = self.heads[0]
        self.register_buffer("factor", paddle.ones([1]))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        # A copy: the backward of a plain step would read what was written to the buffer meanwhile.
        output = self.head(super().forward(ids)) * self.scale.value * self.factor.clone()
        if ids[0].tolist() in self.rows:
            if self.what == "object":
                self.scale = Scale(self.scale.value + 1.0)
            elif self.what == "sublayer":
                self.head = self.heads[self.head is self.heads[0]]
            elif self.what == "buffer":
                self.factor.set_value(self.factor + 1)
            else:
                self.encoder.eval()
        return output


@pytest.mark.parametrize("what", ["object", "sublayer", "buffer", "flag"])
@pytest.mark.parametrize("chunks", [[1], range(CHUNKS)], ids=str)
def test_what_a_chunk_changes_for_the_next_is_seen(what: str, chunks: list[int]) -> None:
    rows = [texts(1)[chunk * SIZE].tolist() for chunk in chunks]
    found, left = [], []
    for is_cached in (False, True):
        paddle.seed(1)
        encoder = ChangesLater(what, rows)
        step(is_cached, encoder)
        layers = [encoder.words, encoder.encoder, *encoder.heads]
        found.append([one for layer in layers for one in gradients(layer) if one is not None])
        head = encoder.heads.index(encoder.head)
        left.append((encoder.scale.value, head, encoder.factor.item(), encoder.encoder.training))
    assert left[0] == left[1]
    assert same_bits(*found) if what != "sublayer" else relative_difference(*found) < 1e-6


class Spy(paddle.autograd.PyLayer):
    """The identity, which notes the AMP state of its backward."""

    levels: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        Spy.levels.append(str(amp_state().level))
        return gradient


class Watching(Encoder):
    """Notes the AMP state, and whether it is to make a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.with_graph: list[bool] = []

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        amp = amp_state()
        self.seen.append((is_recomputing(), str(amp.level), amp.dtype))
        self.with_graph.append(paddle.is_grad_enabled())
        return Spy.apply(super().forward(ids))


def test_the_amp_state_is_that_of_the_first_forward_and_off_in_the_backward() -> None:
    def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        tracer_state.set_amp_state(state._replace(dtype="float16"))  # forgets to give it back
        return criterion(Spy.apply(query), positive)

    encoder = Watching()
    Spy.levels.clear()
    # On a CPU paddle.amp.auto_cast does nothing in dygraph, so the tracer is told. With no operator
    # on the white list nothing is really cast: what is looked at is the state.
    state = AmpState(core.AmpLevel.O1, "bfloat16", (set(), set()), True)
    with amp_state_of(state):
        GradCache(encoder, loss, chunk_size=SIZE).backward(texts(1), texts(2))
    first, second = encoder.seen[: 2 * CHUNKS], encoder.seen[2 * CHUNKS :]
    assert first == [(False, "AmpLevel.O1", "bfloat16")] * (2 * CHUNKS)
    assert second == [(True, "AmpLevel.O1", "bfloat16")] * (2 * CHUNKS)
    assert Spy.levels == ["AmpLevel.O0"] * (1 + 2 * CHUNKS)  # of the loss, and of each chunk


def test_float32_gradients_of_half_precision_parameters_are_refused() -> None:
    """``paddle.amp.decorate`` does nothing on a CPU, so its state is set."""
    encoder, state = Encoder(), tracer_state.global_amp_state()
    before = dict(vars(state))
    state.use_master_grad, state.model_parameters = True, encoder.parameters()
    try:
        GradCache(encoder, criterion, chunk_size=SIZE).backward(texts(1), texts(2))  # float32
        encoder.to(dtype="bfloat16")
        with pytest.raises(ConfigError, match="master_grad=False"):
            GradCache(encoder, criterion, chunk_size=SIZE).backward(texts(1), texts(2))
    finally:
        vars(state).update(before)


def test_amp_that_is_switched_off_keeps_the_dtype_that_grad_scaler_reads() -> None:
    state = tracer_state.global_amp_state()
    o1 = AmpState(core.AmpLevel.O1, "bfloat16", (set(), set()), True)
    with paddle.amp.auto_cast(enable=False, dtype="bfloat16"), amp_state_of(o1):
        with tracer_state.amp_off():
            assert amp_state() is tracer_state.OFF
        assert state.amp_dtype == "bfloat16"


@pytest.mark.parametrize("size", [SIZE, BATCH])
def test_each_chunk_is_encoded_without_a_graph_and_once_more_with_one(size: int) -> None:
    encoder, chunks = Watching(), -(-BATCH // size)
    GradCache(encoder, criterion, chunk_size=size).backward(texts(1), texts(2))
    # The first chunk of each side has one, which tells whether anything is trained, and drops it.
    first = [True] + [False] * (chunks - 1)
    assert encoder.with_graph == first * 2 + [True] * (2 * chunks)


@pytest.mark.parametrize("how", ["frozen", "detached by the loss"])
def test_a_tower_that_is_not_trained_is_run_once(how: str) -> None:
    encoders = make(2)
    loss = criterion
    if how == "frozen":
        for parameter in encoders[1].parameters():
            parameter.stop_gradient = True
    else:

        def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
            return criterion(query, positive.detach())

    expected, found = both(encoders, encoders[0], loss=loss)
    assert [e.num_forwards for e in encoders] == [CHUNKS + 2 * CHUNKS, CHUNKS + CHUNKS]
    assert same_bits(found, expected)
    assert all(one is None for one in gradients(encoders[1]))


@pytest.mark.parametrize("chunks", [{"chunk_size": SIZE}, {"chunk_tokens": 30}], ids=str)
@pytest.mark.parametrize("what", ["its rows", "all rows"])
def test_an_encoder_that_writes_into_its_input_is_told(what: str, chunks: dict[str, int]) -> None:
    inner, query = make(1), texts(1)

    def encoder(ids: paddle.Tensor) -> paddle.Tensor:
        written = ids if what == "its rows" else query
        written.add_(paddle.zeros_like(written))
        return inner(ids)

    told = "encoder of query changes its (positional argument|input)"
    with pytest.raises(RecomputeError, match=told):
        GradCache(encoder, criterion, **chunks).backward(query, texts(2))


def test_chunks_share_the_record_of_what_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(
        call, "CapturedState", lambda *args: searches.append(1) or CapturedState(*args)
    )
    GradCache(make(1), criterion, chunk_size=SIZE).backward(texts(1), texts(2))
    assert len(searches) == 1


@pytest.mark.parametrize("place", ["whole", "part"])
@pytest.mark.parametrize("chunk_size", [2, None])
def test_a_compiled_batch_norm_has_the_bits_of_eager_execution(
    place: str, chunk_size: int | None
) -> None:
    found = []
    pair = paddle.randn([4, 8]), paddle.randn([4, 8])
    for compiles in (False, True):
        paddle.seed(1)
        inner = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.BatchNorm1D(8))
        encoder = inner
        if place == "part":
            encoder = paddle.nn.Sequential(inner, paddle.nn.Linear(8, 4))
        if compiles:
            compile_model(inner, [paddle.static.InputSpec([-1, 8], "float32")])
        GradCache(encoder, criterion, chunk_size=chunk_size).backward(*pair)
        statistics = inner[1]._mean.numpy(), inner[1]._variance.numpy()
        found.append([*gradients(encoder), *statistics])
    assert same_bits(*found)
