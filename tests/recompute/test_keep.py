"""Parts of a recomputed function that the second forward does not run (`keep`)."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import (
    GradCache,
    OffloadSequential,
    RecomputeConfig,
    apply_recompute,
    is_recomputing,
    keep,
    recompute,
    recompute_wrapper,
)
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import ConfigError, RecomputeError, SelectionError
from paddle_recompute.recompute import undo_recompute
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf, plain, step
from tests.recompute.test_engine import Masked, OneByOne

WIDTH = 4


class Mixer(paddle.nn.Layer):
    """A block with an attention, a norm and two linear layers; what of it is kept, it is told."""

    def __init__(self, *kept: str) -> None:
        super().__init__()
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.linear1 = paddle.nn.Linear(WIDTH, 3 * WIDTH)
        self.linear2 = paddle.nn.Linear(WIDTH, WIDTH)
        self.kept = kept
        self.calls: list[str] = []

    def attend(self, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        self.calls.append("attend")
        weights = F.softmax(paddle.matmul(q, k, transpose_y=True))
        return paddle.matmul(F.dropout(weights, 0.4), v)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        def call(name: str, *args: Any) -> Any:
            function = getattr(self, name)
            return keep(function, *args) if name in self.kept else function(*args)

        q, k, v = call("linear1", call("norm", x)).split(3, -1)
        h = F.dropout(call("attend", q, k, v), 0.2)
        return x + call("linear2", F.gelu(h))


PARTS = ["norm", "linear1", "attend", "linear2"]


@case("a kept {part}", part=PARTS)
def test_a_part(run: Run, part: str) -> Seen:
    return step(run, Mixer(part), leaf(3, WIDTH))


@case("all parts kept, two calls and two steps")
def test_two_calls(run: Run) -> Seen:
    block, x = Mixer(*PARTS), leaf(3, WIDTH)
    for _ in range(2):
        run(block, run(block, x * 2)).sum().backward()
    return {"x": x, "block": block}


@case("a kept part under preserve_rng_state=False inside of a call that draws")
def test_inner_streams(run: Run) -> Seen:
    options = {} if run is plain else {"preserve_rng_state": False}

    def outer(x: paddle.Tensor) -> paddle.Tensor:
        x = run(lambda x: keep(F.dropout, x.exp(), 0.5).tanh(), x, **options)
        return F.dropout(x.exp(), 0.5)

    return step(run, outer, leaf(3, WIDTH))


@case("a kept part that draws from the streams of NumPy and Python")
def test_host_streams(run: Run) -> Seen:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = (x * float(np.random.rand())).tanh()
        x = (x * keep(lambda: float(np.random.rand()) + random.random())).exp()
        return (x * float(np.random.rand()) * random.random()).tanh()

    return step(run, function, leaf(3, WIDTH))


def batch_norm() -> paddle.nn.Layer:
    return paddle.nn.BatchNorm1D(WIDTH)


def spectral() -> paddle.nn.Layer:
    return paddle.nn.utils.spectral_norm(paddle.nn.Linear(WIDTH, WIDTH))


class Remembers(paddle.nn.Layer):
    """Writes to a buffer, and assigns a tensor with a gradient to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", paddle.zeros([WIDTH]))
        self.loss = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.mean.set_value(self.mean * 0.5 + x.detach().mean(0))
        self.loss = x.square().mean()
        return x * self.mean


@case("{what} kept, and called again without", what=["BatchNorm", "a spectral norm"])
def test_buffers(run: Run, what: str) -> Seen:
    layer = batch_norm() if what == "BatchNorm" else spectral()

    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = keep(layer, x)
        y = layer(x.tanh())
        return y * layer.state_dict()["_mean"] if what == "BatchNorm" else y

    return step(run, paddle.nn.Sequential(layer, _Calling(function)), leaf(6, WIDTH))


class _Calling(paddle.nn.Layer):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


@case("a kept Layer that writes to a buffer and assigns its loss to itself")
def test_state(run: Run) -> Seen:
    layer = Remembers()

    def function(x: paddle.Tensor) -> paddle.Tensor:
        return keep(layer, x).tanh() * layer.loss + layer.mean.tanh()

    block = paddle.nn.Sequential(layer, _Calling(function))
    return {"first": step(run, block, leaf(3, WIDTH)), "second": step(run, block, leaf(3, WIDTH))}


@case("a recomputed call inside of a kept part")
def test_recompute_inside(run: Run) -> Seen:
    inner = Mixer("attend")
    return step(run, lambda x: keep(lambda x: run(inner, x.tanh()).exp(), x).tanh(), leaf(3, WIDTH))


@case("kept parts inside of a recomputed call inside of a recomputed call")
def test_inside_nested(run: Run) -> Seen:
    first, second = Mixer("linear1", "attend"), Mixer("linear2")
    return step(run, lambda x: run(second, run(first, x).tanh()).exp(), leaf(3, WIDTH))


@case("a kept part inside of a kept part")
def test_keep_inside(run: Run) -> Seen:
    linear = paddle.nn.Linear(WIDTH, WIDTH)
    return step(
        run, lambda x: keep(lambda x: keep(linear, x.tanh()).exp(), x.tanh()).tanh(), leaf(3, WIDTH)
    )


@case("a kept part that raises, and the function goes on with what it left")
def test_raising(run: Run) -> Seen:
    linear = paddle.nn.Linear(WIDTH, WIDTH)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        left = []

        def part(x: paddle.Tensor) -> None:
            left.append(F.dropout(linear(x).tanh() * x, 0.4))
            raise KeyError("on purpose")

        x = x.exp()
        with contextlib.suppress(KeyError):
            keep(part, x)
        return F.dropout(left[0], 0.4).tanh()

    return {**step(run, function, leaf(3, WIDTH)), "linear": linear}


@case("a router: top-k, sampled indices and a scale without gradients are kept")
def test_router(run: Run) -> Seen:
    gate, experts = paddle.nn.Linear(WIDTH, 3), leaf(3, WIDTH, WIDTH)

    def choose(x: paddle.Tensor) -> dict[str, Any]:
        with paddle.no_grad():
            noise = paddle.rand([x.shape[0], 3])
        score = F.softmax(gate(x) + noise)
        return {"best": score.topk(2), "sample": paddle.multinomial(score.detach(), 1), "k": 2}

    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = x.tanh()
        found = keep(choose, x)
        weights, chosen = found["best"]
        mixed = paddle.bmm(x.unsqueeze(1), experts.index_select(chosen[:, 0])).squeeze(1)
        return mixed * weights[:, :1] * found["k"] + x[found["sample"][:, 0] % x.shape[0]]

    return {**step(run, function, leaf(6, WIDTH)), "gate": gate, "experts": experts}


@case("kept under no_grad: integers and a mean")
def test_no_grad(run: Run) -> Seen:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            mean, best = keep(lambda x: (x.mean(), x.argmax(-1)), x)
        return (x * mean).tanh() + F.one_hot(best, WIDTH) * x.exp()

    return step(run, function, leaf(3, WIDTH))


@case("a kept part that returns its argument, views of it, and one tensor twice")
def test_views_returned(run: Run) -> Seen:
    def part(x: paddle.Tensor) -> Any:
        y = x.tanh()
        return x, x[1:], x.transpose([1, 0]), x.reshape([-1]), y, y

    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = x.exp()
        same, rest, turned, flat, one, other = keep(part, x)
        assert same is x and one is other
        return paddle.matmul(same, turned).sum() * flat.square().sum() + (rest * one[1:]).exp()

    return step(run, function, leaf(3, WIDTH))


@case("a kept part of strided views: slices, a transposed and an expanded tensor")
def test_views_given(run: Run) -> Seen:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = x.exp()
        y = keep(paddle.matmul, x[1:, ::2], x.transpose([1, 0])[::2])
        return keep(paddle.multiply, y.unsqueeze(0).expand([2, *y.shape]), y[0]).tanh()

    return step(run, function, leaf(3, WIDTH))


@case("a kept part that changes its own tensors in place")
def test_in_place_inside(run: Run) -> Seen:
    def part(x: paddle.Tensor) -> paddle.Tensor:
        y = x * 2
        y.add_(x.tanh())
        return F.relu_(y)

    return step(run, lambda x: keep(part, x.exp()).tanh(), leaf(3, WIDTH))


@case("a kept part that captures a tensor of the function, and takes a parameter")
def test_captured(run: Run) -> Seen:
    linear = paddle.nn.Linear(WIDTH, WIDTH)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = x.tanh()
        return keep(lambda y, w: F.linear(h * y, w).exp(), x, w=linear.weight) + h.exp()

    return {**step(run, function, leaf(3, WIDTH)), "linear": linear}


@case("a kept PyLayer")
def test_py_layer(run: Run) -> Seen:
    return step(run, lambda x: keep(OneByOne.apply, x.tanh(), x.exp()).tanh(), leaf(3, WIDTH))


class Asks(Masked):
    """Notes ``stop_gradient`` of what it saved; the second needs no gradient."""

    noted: ClassVar[list[bool]] = []

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        x, y = ctx.saved_tensor()
        Asks.noted += [x.stop_gradient, y.stop_gradient]
        return gradient * y, None


OF_AN_ARGUMENT: dict[str, Callable[[paddle.Tensor], Any]] = {
    "its argument, and the same without a gradient": lambda h: (h, h.detach()),
    "slices of its argument, one without a gradient": lambda h: (h[:2], h[1:].detach()),
    "a turned argument": lambda h: (h.transpose([1, 0]), h.detach().transpose([1, 0])),
}


@case("a kept PyLayer asks stop_gradient of {what}", what=list(OF_AN_ARGUMENT))
def test_py_layer_asks(run: Run, what: str) -> Seen:
    def part(h: paddle.Tensor) -> paddle.Tensor:
        return Asks.apply(*OF_AN_ARGUMENT[what](h)).exp()

    Asks.noted.clear()
    return {**step(run, lambda x: keep(part, x.tanh()), leaf(3, WIDTH)), "noted": [*Asks.noted]}


@case("kept parts return an argument and a parameter without their gradients")
def test_detached_arguments(run: Run) -> Seen:
    linear = paddle.nn.Linear(WIDTH, WIDTH)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = x.tanh()
        weight = keep(paddle.Tensor.detach, linear.weight)
        return F.linear(h.exp() * keep(paddle.Tensor.detach, h), weight).exp() + linear(h)

    return {**step(run, function, leaf(3, WIDTH)), "linear": linear}


@case("kept LSTM")
def test_lstm(run: Run) -> Seen:
    lstm = paddle.nn.LSTM(WIDTH, WIDTH)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        return keep(lstm, x.tanh())[0].exp()

    return {**step(run, function, leaf(2, 3, WIDTH)), "lstm": lstm}


@case("two backwards through kept parts")
def test_two_backwards(run: Run) -> Seen:
    block, x = Mixer("linear1", "attend"), leaf(3, WIDTH)
    y = run(block, x * 2)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return {"x": x, "block": block}


@case("a double backward through kept parts")
def test_double_backward(run: Run) -> Seen:
    linear, x = paddle.nn.Linear(WIDTH, WIDTH), leaf(3, WIDTH)
    y = run(lambda x: keep(linear, x.tanh()).tanh() * keep(paddle.tanh, x), x * 2)
    (gradient,) = paddle.grad(y.square().sum(), x, create_graph=True)
    (gradient.square().sum() + y.sum()).backward()
    return {"x": x, "linear": linear}


@case("hooks on what a kept part takes and returns, and on the Layer that is kept")
def test_hooks(run: Run) -> Seen:
    linear, seen = paddle.nn.Linear(WIDTH, WIDTH), []

    def noted(gradient: paddle.Tensor) -> paddle.Tensor:
        seen.append(float(gradient.sum()))
        return gradient * 2

    linear.register_forward_post_hook(lambda layer, args, y: y * 3)
    linear.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))

    def function(x: paddle.Tensor) -> paddle.Tensor:
        x = x.tanh()
        x.register_hook(noted)
        y = keep(linear, x)
        y.register_hook(noted)
        return y.exp()

    return {**step(run, function, leaf(3, WIDTH)), "linear": linear, "seen": seen}


@case("kept parts in threads that run at the same time")
def test_threads(run: Run) -> Seen:
    def block(x: paddle.Tensor, linear: Any) -> paddle.Tensor:
        return keep(linear, x.tanh()).exp() + keep(paddle.tanh, x)

    linears, inputs = (
        [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(3)],
        [leaf(3, WIDTH) for _ in range(3)],
    )
    together = threading.Barrier(3)

    def train(number: int) -> None:
        together.wait()
        for _ in range(5):
            run(block, inputs[number] * 2, linears[number]).sum().backward()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"inputs": inputs, "linears": linears}


@case("a kept last linear layer of a block, whose output is then added to the input")
def test_end(run: Run) -> Seen:
    up, down = paddle.nn.Linear(WIDTH, 8), paddle.nn.Linear(8, WIDTH)
    found = step(run, lambda x: x + keep(down, F.gelu(up(x))), leaf(3, WIDTH))
    return {**found, "up": up, "down": down}


def test_what_is_kept_leaves_the_device_with_the_inputs() -> None:
    linear, x = paddle.nn.Linear(64, 64), leaf(64, 64)

    def block(x: paddle.Tensor) -> paddle.Tensor:
        x = x.tanh()
        return keep(lambda x: F.softmax(paddle.matmul(linear(x), x)).exp(), x).tanh()

    kept = []
    for offload in (None, "disk"):
        before = memory.current_bytes()
        y = recompute(block, x * 2, offload=offload)
        kept.append((memory.current_bytes() - before) / (x.size * 4) - 1)  # without y
        y.sum().backward()
        x.clear_gradient(), linear.clear_gradients()
        del y
    # The input of the function, the product, the softmax, and its exponential, which is an output.
    assert kept == [4, 0]


@case("what is kept waits on the disk with the inputs")
def test_on_disk(run: Run) -> Seen:
    options = {"offload": "disk"} if run is not plain else {}
    block, x = Mixer("linear1", "attend"), leaf(3, WIDTH)
    y = x * 2
    for _ in range(3):
        y = run(block, y, **options)
    y.sum().backward()
    return {"x": x, "block": block}


@case("strided tensors of a kept part wait on the disk")
def test_strided_on_disk(run: Run) -> Seen:
    options = {"offload": "disk"} if run is not plain else {}

    def part(x: paddle.Tensor) -> paddle.Tensor:
        q = x.tanh().reshape([3, 2, 2]).transpose([1, 0, 2])
        return paddle.matmul(paddle.matmul(q, q.exp(), transpose_y=True), q)

    x = leaf(3, WIDTH)
    run(lambda x: keep(part, x.exp()).tanh(), x * 2, **options).sum().backward()
    return {"x": x}


# ------------------------------------------------------------------------------ what is not run


def count_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """`function`, and a list with as many items as there were calls."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return counted, calls


def test_the_second_forward_does_not_run_a_kept_part() -> None:
    kept, number = count_of(lambda x: F.dropout(x.exp(), 0.5))
    rest, of_rest = count_of(lambda x: x.tanh())
    x = leaf(3, WIDTH)
    recompute(lambda x: rest(keep(kept, x)).sum(), x * 2).backward()
    assert (len(number), len(of_rest)) == (1, 2)


def test_outside_of_a_recomputed_function_it_is_the_plain_call() -> None:
    assert_as_plain(lambda run: step(run, Mixer(), leaf(3, WIDTH)), keep)
    linear, x = paddle.nn.Linear(WIDTH, WIDTH), leaf(3, WIDTH)
    with paddle.no_grad():
        assert recompute(lambda x: keep(linear, x), x).stop_gradient


# ------------------------------------------------------------------------------- the function ends


def test_the_second_forward_ends_at_the_last_kept_part_if_nothing_is_saved_behind_it() -> None:
    down, x = paddle.nn.Linear(WIDTH, WIDTH), leaf(3, WIDTH)
    seen: list[str] = []

    def block(x: paddle.Tensor) -> paddle.Tensor:
        y = keep(down, x.tanh())
        seen.append("again" if is_recomputing() else "first")
        return x + y

    recompute(block, x * 2).sum().backward()
    assert seen == ["first"]
    recompute(lambda x: block(x).tanh(), x * 2).sum().backward()
    assert seen == ["first", "first", "again"]


def swallow(x: paddle.Tensor, part: Any) -> paddle.Tensor:
    try:
        return x + keep(part, x.tanh())
    except:  # noqa: E722
        return x.exp().tanh()


def in_a_generator(x: paddle.Tensor, part: Any) -> paddle.Tensor:
    def each() -> Iterator[paddle.Tensor]:
        yield x.tanh()
        yield keep(part, x.tanh())

    return sum(each(), x)


ENDS = [swallow, in_a_generator]


@pytest.mark.parametrize("block", ENDS, ids=[one.__name__ for one in ENDS])
def test_whatever_the_function_does_about_the_end_the_gradients_are_right(block: Any) -> None:
    def outcome(run: Run) -> Seen:
        linear, x = paddle.nn.Linear(WIDTH, WIDTH), leaf(3, WIDTH)
        y = run(block, run(block, x * 2, linear), linear)
        y.sum().backward()
        return {"x": x, "linear": linear, "y": y}

    assert_as_plain(outcome)


def bytes_kept(function: Callable[[paddle.Tensor], paddle.Tensor]) -> float:
    """What a recomputed `function` of a tensor keeps, in such tensors, besides its input."""
    x = paddle.randn([64, 64])
    x.stop_gradient = False
    before = memory.current_bytes()
    y = recompute(function, x)
    found = (memory.current_bytes() - before) / (x.size * 4) - 1  # without y
    y.sum().backward()
    del y
    x.clear_gradient()
    return found


def test_a_kept_matrix_product_costs_its_output_and_the_last_one_nothing() -> None:
    linear, paddle_gelu = paddle.nn.Linear(64, 64), F.gelu
    linear(paddle.randn([2, 64])).sum().backward()
    assert bytes_kept(lambda x: linear(x.tanh()).tanh()) == 0
    assert bytes_kept(lambda x: keep(linear, x.tanh()).tanh()) == 1
    assert bytes_kept(lambda x: keep(linear, x.tanh()).reshape([64, 64])) == 0
    assert bytes_kept(lambda x: keep(paddle_gelu, keep(linear, x.tanh())).tanh()) == 2


# ------------------------------------------------------------------------------------ refused


def in_another_order(x: paddle.Tensor) -> paddle.Tensor:
    one, other = (paddle.exp, paddle.tanh)[:: -1 if is_recomputing() else 1]
    return keep(other, keep(one, x)).tanh()


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda x: keep(lambda x: x.add_(x), x.tanh()), "changes an argument .* in place"),
    (lambda x: keep(paddle.exp, x).add_(x).tanh(), "An output of keep.* changed in place"),
    # Paddle counts writes; that this one changes no value is not to be seen.
    (lambda x: keep(paddle.exp, x).reshape_([-1]).tanh(), "An output of keep.*reshape for"),
    (in_another_order, "calls keep.*tanh.*called keep.*exp"),
    (lambda x: (x.exp() if is_recomputing() else keep(paddle.exp, x)).tanh(), "does not call keep"),
    (lambda x: (keep(paddle.exp, x) if is_recomputing() else x.exp()).tanh(), "called no keep"),
    (
        lambda x: keep(paddle.exp, x[1:] if is_recomputing() else x).tanh(),
        r"float32\[2, 4\], where .*float32\[3, 4\]",
    ),
]


@pytest.mark.parametrize(("function", "words"), REFUSED)
def test_what_cannot_be_kept_is_refused(function: Callable[..., Any], words: str) -> None:
    x = leaf(3, WIDTH)
    with pytest.raises(RecomputeError, match=words):
        recompute(function, x * 2).sum().backward()


# ----------------------------------------------------------------------------------- by patterns


def chain(num: int = 2) -> paddle.nn.Layer:
    return paddle.nn.Sequential(*[Mixer() for _ in range(num)])


@pytest.mark.parametrize("pattern", ["*.norm", "*.linear1", "*.attend", "?.linear*", "**.linear2"])
def test_patterns_name_sublayers_and_methods(pattern: str) -> None:
    def outcome(run: Run) -> Seen:
        model, x = chain(), leaf(3, WIDTH)
        if run is not plain:
            config = RecomputeConfig(checkpoints=["*"], keep=[pattern])
            report = apply_recompute(model, config)
            assert len(report.kept) in (2, 4) and f"{report.kept[0]}: kept" in str(report)
        model(x * 2).sum().backward()
        calls = [[*layer.calls] for layer in model]
        if run is not plain:
            assert [len(one) for one in calls] == [1 if pattern == "*.attend" else 2] * 2
            undo_recompute(model)
            assert type(model[0].norm) is paddle.nn.LayerNorm and type(model[0]) is Mixer
            assert "attend" not in vars(model[0])
        return {"x": x, "model": model}

    assert_as_plain(outcome)


def test_a_function_that_a_layer_holds_is_kept() -> None:
    model, x = chain(1), leaf(3, WIDTH)
    model[0].attend, calls = count_of(lambda q, k, v: q * k + v.tanh())
    apply_recompute(model, RecomputeConfig(checkpoints=["0"], keep=["0.attend"]))
    model(x).sum().backward()
    assert len(calls) == 1
    undo_recompute(model)
    assert model[0].attend.__name__ == "counted"


def test_copies_and_pickles_of_a_model_keep_the_same_parts() -> None:
    model = chain(1)
    apply_recompute(model, RecomputeConfig(checkpoints=["*"], keep=["*.attend", "*.norm"]))
    made_of = [copy.deepcopy(model)]
    if paddle_version() >= (3, 0, 0):  # 2.6 cannot pickle a parameter
        made_of.append(pickle.loads(pickle.dumps(model)))
    for made in made_of:
        made(leaf(3, WIDTH)).sum().backward()
        assert made[0].calls == ["attend"] and not model[0].calls
        assert made.state_dict().keys() == chain(1).state_dict().keys()


@pytest.mark.parametrize(
    ("keep_", "words"),
    [
        (["*.attention"], "keep: the pattern '\\*.attention' matches no"),
        (["1.norm"], "keep selects '1.norm', which is in no recomputed part"),
        (["0"], "keep selects '0', which is a recomputed part itself; name parts inside of it"),
    ],
)
def test_patterns_that_keep_nothing_are_refused(keep_: list[str], words: str) -> None:
    model = chain()
    with pytest.raises(SelectionError, match=words):
        apply_recompute(model, RecomputeConfig(checkpoints=["0"], keep=keep_))
    assert type(model[0]) is Mixer


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "fleet"},
        {"offload_parameters": "host", "num_shards": 2},
    ],
)
def test_settings_that_cannot_keep_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keep"):
        RecomputeConfig(keep=["*.norm"], **other)


# --------------------------------------------------------------------------- with other features


def test_a_gradient_cache_over_blocks_with_kept_parts_has_the_bits_of_plain_blocks() -> None:
    def outcome(run: Run) -> Seen:
        encoder = chain()
        if run is not plain:
            apply_recompute(encoder, RecomputeConfig(checkpoints=["*"], keep=["*.linear1"]))
        cache = GradCache(encoder, lambda a, b: (a * b).sum(), chunk_size=2)
        cache.backward(*[leaf(6, WIDTH, stop_gradient=True) for _ in range(2)])
        if run is not plain:
            undo_recompute(encoder)
        return {"encoder": encoder}

    assert_as_plain(outcome)


def test_in_an_offloaded_chain_it_is_the_plain_call() -> None:
    def outcome(run: Run) -> Seen:
        model, x = paddle.nn.LayerList([Mixer("attend"), Mixer("linear1")]), leaf(3, WIDTH)
        call: Any = paddle.nn.Sequential(*model)
        if run is not plain:
            call = OffloadSequential(call, num_shards=2)
        call(x * 2).sum().backward()
        if run is plain:
            return {"x": x, "gradients": [p.grad for p in call.parameters()]}
        with call.resident():
            return {"x": x, "gradients": [p.grad.clone() for p in call.parameters()]}

    assert_as_plain(outcome)


def test_what_is_kept_is_freed_with_the_graph_and_by_the_backward() -> None:
    inner = paddle.nn.Linear(64, 64)
    linear = recompute_wrapper(_Calling(lambda x: keep(paddle.tanh, keep(inner, x.tanh())).exp()))
    x = paddle.randn([64, 64])
    x.stop_gradient = False
    linear(x).sum().backward()
    x.clear_gradient(), inner.clear_gradients()
    before = memory.current_bytes()
    for _ in range(3):
        y = linear(x)
        assert memory.current_bytes() > before
        del y
        assert memory.current_bytes() == before
        linear(x).sum().backward()
        x.clear_gradient(), inner.clear_gradients()
        assert memory.current_bytes() == before


@pytest.mark.parametrize("part", ["q_proj", "_prepare_qkv"])
def test_what_is_kept_already_is_refused_before_anything_is_wrapped(part: str) -> None:
    model = paddle.nn.TransformerEncoder(paddle.nn.TransformerEncoderLayer(8, 2, 16), 2)
    keep_it = [f"layers.*.self_attn.{part}"]
    apply_recompute(model, RecomputeConfig(checkpoints=["layers.*.self_attn"], keep=keep_it))
    classes = [type(layer) for layer in model.sublayers()]
    with pytest.raises(SelectionError, match=r"'layers\.0\.self_attn\.\w+', which is kept already"):
        apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"], keep=keep_it))
    assert [type(layer) for layer in model.sublayers()] == classes
