"""`minimize`: clip, merge, precision, names, refusals; the same tests on 2.6 and 3.3."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute, recompute_wrapper
from paddle_recompute._paddle import device
from paddle_recompute._paddle.static.training import in_program_order
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph import (
    RecomputeOptimizer,
    explain,
    mark_checkpoint,
    minimize,
)
from tests.bfloat16 import needs_bfloat16
from tests.ranks import run_ranks
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    IS_26,
    Block,
    Run,
    Stack,
    assert_equal,
    assert_equal_arrays,
    assert_recompute_changes_nothing,
    building,
    copies,
    data,
    marked_stack,
    needs_old_ir,
    needs_pir,
    num_recomputed,
    of_paddle,
    strategy_of,
    train,
)


def sgd() -> Any:
    return paddle.optimizer.SGD(0.1)


def clipped_adamw() -> Any:
    return paddle.optimizer.AdamW(1e-2, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.01))


def decayed_momentum() -> Any:
    clip = paddle.nn.ClipGradByNorm(0.02)
    return paddle.optimizer.Momentum(0.1, weight_decay=0.01, grad_clip=clip)


def adamw_of_some() -> Any:
    """An optimizer that was given parameters, and decays some of them only."""
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    return paddle.optimizer.AdamW(
        1e-2,
        parameters=[p for p in parameters if not p.name.startswith("layer_norm")],
        apply_decay_param_fun=lambda name: ".w" in name,
    )


@pytest.mark.parametrize("optimizer", [clipped_adamw, decayed_momentum, adamw_of_some])
def test_with_recompute_it_trains_as_paddles_own_minimize(optimizer: Callable[[], Any]) -> None:
    run = train(marked_stack, (), make_optimizer=optimizer)
    assert num_recomputed(run) > 0 and len(set(run.losses)) == 3  # it learns, and masks differ
    assert_equal(run, train(marked_stack, None, make_optimizer=optimizer, minimizes=of_paddle))


# ------------------------------------------------------------------------------ gradient merge


def merged(steps: int, average: bool = True) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": steps, "avg": average}}


def without_dropout() -> Any:
    return marked_stack(dropout=0.0)


@pytest.mark.parametrize("optimizer", [clipped_adamw, decayed_momentum])
def test_merging_two_equal_runs_is_one_run(optimizer: Callable[[], Any]) -> None:
    """The mean of two equal gradients is that gradient, to the bit."""
    options: dict[str, Any] = {"make_optimizer": optimizer, "steps": 6, "runs_per_step": 2}
    run = train(without_dropout, (), **options, **merged(2))
    plain = train(without_dropout, None, steps=3, make_optimizer=optimizer)
    assert run.losses[::2] == run.losses[1::2] == plain.losses
    assert_equal_arrays(run.parameters, plain.parameters)


def test_merging_without_average_sums() -> None:
    options: dict[str, Any] = {"make_optimizer": sgd, "steps": 2, "runs_per_step": 2}
    run = train(without_dropout, (), **options, **merged(2, average=False))
    plain = train(without_dropout, None, steps=1, make_optimizer=lambda: paddle.optimizer.SGD(0.2))
    assert_equal_arrays(run.parameters, plain.parameters, rtol=1e-6, atol=1e-7)


def test_merging_with_dropout_follows_a_learning_rate_scheduler() -> None:
    def scheduled() -> Any:
        return paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.1, 1))

    assert_recompute_changes_nothing(marked_stack, steps=7, make_optimizer=scheduled, **merged(3))


# ----------------------------------------------------------------------------- mixed precision


def bfloat16(**lists: Any) -> Callable[[], Any]:
    """What a Program of PIR is built in; 2.6 casts in `minimize`."""
    if IS_26:
        return contextlib.nullcontext
    return lambda: paddle.amp.auto_cast(True, level="O1", dtype="bfloat16", **lists)


@needs_bfloat16
@pytest.mark.parametrize("merge", [{}, merged(2)], ids=["plain", "merged"])
def test_bfloat16(merge: dict[str, Any]) -> None:
    """The first product of what is fed has one gradient: oneDNN's own would crash (2.6, 3.3)."""

    def build() -> Any:
        return marked_stack(stop_gradient=not merge)

    run = assert_recompute_changes_nothing(build, prepare=bfloat16(), amp=True, steps=4, **merge)
    plain = train(build, None, steps=4, **merge)
    assert len(set(run.losses)) == 4 and run.losses != plain.losses
    assert run.losses == pytest.approx(plain.losses, rel=0.02)


def without_gradient(value: Any) -> Any:
    value.stop_gradient = True
    return value


def frozen(h: Any) -> Any:
    layer = paddle.nn.Linear(8, 8)
    layer.weight.stop_gradient = True
    return layer(h)


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "mask on the left": lambda h, mask: paddle.matmul(mask.unsqueeze(1), h),
    "mask on the right": lambda h, mask: paddle.matmul(h.transpose([0, 2, 1]), mask.unsqueeze(2)),
    "constant": lambda h, mask: paddle.matmul(h, paddle.ones([8, 8])),
    "detached": lambda h, mask: paddle.matmul(h, h.detach(), transpose_y=True),
    "stopped": lambda h, mask: paddle.matmul(h, without_gradient(paddle.tanh(h)), transpose_y=True),
    "frozen": lambda h, mask: frozen(h),
}


def train_products() -> None:
    def feeds(random: np.random.RandomState) -> dict[str, np.ndarray]:
        return {"x": random.randn(4, 3, 8).astype("float32"), "mask": np.ones([4, 3], "float32")}

    for name, product in PRODUCTS.items():
        print(name, flush=True)

        def build(product: Callable[[Any, Any], Any] = product) -> Any:
            mask = paddle.static.data("mask", [4, 3])
            h = paddle.tanh(paddle.nn.Linear(8, 8)(paddle.static.data("x", [4, 3, 8])))
            y = product(mark_checkpoint(h, "h"), mask)
            return mark_checkpoint(y.astype("float32"), "y").square().mean()

        run = train(build, (), feeds=feeds, prepare=bfloat16(), amp=True)
        assert_equal(run, train(build, None, feeds=feeds, prepare=bfloat16(), amp=True))
        exact = train(build, None, feeds=feeds)
        for key, gradient in exact.gradients[0].items():
            # bfloat16 has 8 bits; a gradient is a sum of products of sums.
            most = 0.05 * np.abs(gradient).max() + 1e-3
            assert np.abs(run.gradients[0][key] - gradient).max() < most, (name, key)


@needs_bfloat16
def test_products_in_bfloat16_with_one_gradient() -> None:
    """In a process of its own: a crash of oneDNN ends it, after the name of the product."""
    run_ranks(train_products, 1, fresh=True)


@needs_bfloat16
def test_the_casts_of_a_wrapped_layer_are_part_of_it() -> None:
    with in_program_order():
        run = train(wrapped(ALL), (), prepare=bfloat16(), amp=True)
        assert_equal(run, train(wrapped(None), None, prepare=bfloat16(), amp=True))
    float32 = train(wrapped(ALL), ())
    for one, other in zip(run.report.segments, float32.report.segments, strict=True):
        assert one.num_recomputed > other.num_recomputed


def test_a_cpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "programs_compute_bfloat16", lambda: False)
    with pytest.raises(StaticGraphError, match="needs AVX-512, and this CPU has none"):
        train(marked_stack, (), prepare=bfloat16(), amp=True)


@needs_bfloat16
def test_operators_on_the_black_list_stay_in_float32() -> None:
    lists = {"custom_black_list": ["matmul_v2"] if IS_26 else ["gelu"]}
    options = {"prepare": bfloat16(**lists), "amp": True, "amp_configs": lists}
    run = assert_recompute_changes_nothing(marked_stack, **options)
    if IS_26:  # there is nothing else that it casts on a CPU
        assert run.losses == train(marked_stack, None).losses


def half() -> Any:
    x = paddle.cast(data(), "float16")
    return mark_checkpoint(paddle.cast(x * 2, "float32"), "c").mean()


def prepared(dtype: Any, lists: dict[str, Any], words: str, marks: Any = needs_pir) -> Any:
    return pytest.param(marked_stack, dtype, lists, words, marks=marks)


@pytest.mark.parametrize(
    ("build", "prepare", "lists", "words"),
    [
        prepared(contextlib.nullcontext, {}, r"paddle\.amp\.auto_cast\(True, level='O1'"),
        pytest.param(half, contextlib.nullcontext, {}, "float16, which needs", marks=needs_pir),
        prepared(bfloat16(), {"custom_white_list": ["layer_norm"]}, "computes in float32"),
        prepared(bfloat16(), {"custom_black_list": ["matmul"]}, "computes in bfloat16"),
        prepared(
            bfloat16(), {"custom_white_list": ["softmax"]}, "names softmax; on a CPU", needs_old_ir
        ),
    ],
    ids=["no auto_cast", "float16", "white list", "black list", "not on a CPU"],
)
def test_mixed_precision_that_is_refused(
    build: Callable[[], Any], prepare: Any, lists: dict[str, Any], words: str
) -> None:
    configs = {"amp_configs": lists} if lists else {}
    with pytest.raises(StaticGraphError, match=words):
        train(build, (), prepare=prepare, amp=True, **configs)


# -------------------------------------------------------------------------------- wrapped layers

ALL = {"checkpoints": ["layers.*"]}
EVERY_SECOND = {**ALL, "policy": "every_n"}
JOINED = {**ALL, "policy": "segments", "segments": 2}
CHEAP = {"checkpoints": ["layers.*.activation", "layers.*.dropout", "layers.*.norm"]}


def wrapped(selection: dict[str, Any] | None, num_blocks: int = 2) -> Callable[[], Any]:
    """A stack that is called twice."""

    def build() -> Any:
        model = Stack(num_blocks)
        if selection is not None:
            apply_recompute(model, RecomputeConfig(**selection))
        x = data()
        return model(x).square().mean() + model(x * 2).square().mean()

    return build


@functools.cache
def unwrapped(num_blocks: int = 2) -> Run:
    with in_program_order():
        return train(wrapped(None, num_blocks), None)


def segments_of(run: Run) -> list[str]:
    return [segment.name for segment in run.report.segments]


@pytest.mark.parametrize(
    ("selection", "num_blocks", "asked", "names", "crossing"),
    [
        (ALL, 2, [], ["layers.0", "layers.1", "layers.0#2", "layers.1#2"], 4),
        (EVERY_SECOND, 2, [], ["layers.0", "layers.0#2"], 2),
        (JOINED, 4, [], ["layers.1", "layers.3", "layers.1#2", "layers.3#2"], 4),
        (ALL, 2, ["layers.1"], ["layers.1", "layers.1#2"], 2),
        (ALL, 2, ["layers.1#2"], ["layers.1#2"], 1),
    ],
    ids=["all", "every second", "joined", "all calls of one", "one call"],
)
def test_segments_are_the_calls_of_wrapped_layers(
    selection: dict[str, Any], num_blocks: int, asked: list[str], names: list[str], crossing: int
) -> None:
    """A name selects all calls of its layer; joined layers keep nothing between them."""
    with in_program_order():
        run = train(wrapped(selection, num_blocks), asked)
    assert segments_of(run) == names and num_recomputed(run) > 0
    assert sum(segment.crossing for segment in run.report.segments) == crossing
    assert_equal(run, unwrapped(num_blocks))


def test_cheap_parts_give_up_their_outputs_and_no_matmul_runs_twice() -> None:
    with in_program_order():
        assert_equal(train(wrapped(CHEAP), ()), unwrapped())
    again = copies(wrapped(CHEAP))
    assert {"gelu", "dropout_grad"} <= again.keys()
    assert again.keys().isdisjoint(["matmul", "matmul_v2"])


class Outer(paddle.nn.Layer):
    """A Layer of wrapped Layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = paddle.nn.LayerList([recompute_wrapper(Block(), name="part")] * 2)

    def forward(self, x: Any) -> Any:
        return self.parts[1](self.parts[0](x)) + x


class Marking(Block):
    """A Layer that marks an intermediate variable of its own."""

    def forward(self, x: Any) -> Any:
        return mark_checkpoint(super().forward(x), "inside") * 2


def nested_calls() -> Any:
    x = data()
    for _ in range(2):
        x = recompute_wrapper(Outer(), name="outer")(x)
    return x.square().mean()


def marked_inside() -> Any:
    return recompute_wrapper(Marking(), name="whole")(data()).square().mean()


@pytest.mark.parametrize(
    ("build", "segments"),
    [
        (nested_calls, ["outer", "outer#2"]),
        (marked_inside, ["whole"]),
    ],
)
def test_odd_calls(build: Callable[[], Any], segments: list[str]) -> None:
    """A wrapped model cannot be trained without recompute, so it is built bare instead."""
    run = train(build, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.recompute_wrapper", lambda layer, **_: layer)
        assert_equal(run, train(build, None))
    assert segments_of(run) == segments and num_recomputed(run) > 0


def test_variables_that_a_user_fetches() -> None:
    """Whatever is fetched, a checkpoint or recomputed, is what the forward computed."""

    def run(checkpoints: list[str] | None) -> list[Any]:
        with building() as main, paddle.utils.unique_name.guard():
            paddle.seed(3)
            x, wanted = data(), []
            for index in range(3):
                hidden = paddle.nn.functional.gelu(paddle.nn.Linear(HIDDEN, 32)(x))
                dropped = paddle.nn.functional.dropout(hidden, 0.3)
                x = mark_checkpoint(paddle.nn.Linear(32, HIDDEN)(dropped) + x, f"c{index}")
                wanted += [hidden, dropped, x]
            minimize(sgd(), x.square().mean(), strategy_of(checkpoints))
            return run_three_times(main, wanted)

    np.testing.assert_equal(run([]), run(None))


def run_three_times(main: paddle.static.Program, wanted: list[Any]) -> list[Any]:
    with paddle.static.scope_guard(paddle.static.Scope()):
        executor = paddle.static.Executor()
        executor.run(paddle.static.default_startup_program())
        random, values = np.random.RandomState(0), []
        for _ in range(3):
            feed = {"x": random.randn(BATCH, HIDDEN).astype("float32")}
            values += executor.run(main, feed=feed, fetch_list=wanted)
        return values


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: paddle.optimizer.SGD(0.1).minimize(loss),
        paddle.static.append_backward,
        lambda loss: paddle.static.gradients(loss, paddle.static.data("y", [1])),
    ],
    ids=["minimize", "append_backward", "gradients"],
)
def test_a_backward_that_would_not_recompute_is_refused(backward: Callable[..., Any]) -> None:
    with building():
        loss = wrapped(ALL)()
        with pytest.raises(StaticGraphError, match=r"'layers\.0', \.\.\..*static_graph\.minimize"):
            backward(loss)
        with pytest.raises(StaticGraphError, match=r"set strategy\.recompute = True"):
            minimize(sgd(), loss, strategy_of(None))


# -------------------------------------------------------------------------- two losses, in turn


@needs_pir
def test_two_minimizes_in_one_program() -> None:
    """As for two networks that are trained against each other; each has its own parameters."""

    def run(recomputes: bool) -> list[Any]:
        with building() as main:
            paddle.seed(3)
            trunk = mark_checkpoint(Block()(mark_checkpoint(Block()(data()), "a")), "b")
            first = trunk.square().mean()
            strategy = strategy_of([] if recomputes else None)
            _, one = minimize(sgd(), first, strategy)
            second = mark_checkpoint(Block()(paddle.tanh(trunk)), "c").mean()
            _, two = minimize(sgd(), second, strategy)
            return run_three_times(main, [first, second, *(g for _, g in one + two)])

    np.testing.assert_equal(run(True), run(False))


@needs_old_ir
def test_a_second_optimizer_is_refused() -> None:
    """fleet's own second minimize ends the process with SIGSEGV (2.6.2)."""
    with building():
        loss = marked_stack()
        minimize(sgd(), loss, strategy_of(["layers.0"]))
        with pytest.raises(StaticGraphError, match="has an optimizer already"):
            minimize(sgd(), loss, strategy_of(None))


# -------------------------------------------------------------------------- RecomputeOptimizer


def test_recompute_optimizer_takes_names_and_variables_also_marked_ones() -> None:
    with building() as program:
        first = Block()(data())
        second = mark_checkpoint(Block()(first), "second")
        third = mark_checkpoint(Block()(second), "third")
        optimizer = RecomputeOptimizer(sgd())
        optimizer._set_checkpoints([first, second, "third"])
        operators, params_grads = optimizer.minimize(third.square().mean())
        segments = explain(program).segments
    assert len(params_grads) == 3 * 6 and operators
    assert [segment.name for segment in segments] == ["checkpoint_0", "second", "third"]
    assert all(segment.num_recomputed for segment in segments)


# ------------------------------------------------------------------------------------- explain


def test_explain_before_and_after() -> None:
    with building() as program:
        loss = marked_stack(2)
        before = explain(program.clone())  # the marks survive it
        minimize(sgd(), loss, strategy_of([]))
        after = explain(program)
    assert [segment.num_recomputed for segment in before.segments] == [None, None]
    assert [s.num_ops for s in before.segments] == [s.num_ops for s in after.segments]
    # The checkpoint of 4 x 8 floats and the masks of 4 x 32 and 4 x 8 bytes; in PIR the means and
    # variances of a norm, too, which are small beside its result.
    first = after.segments[0]
    of_norm = 0 if IS_26 else 2 * 4 * 4
    assert first.kept_bytes == 4 * 8 * 4 + 4 * 32 + 4 * 8 + of_norm
    assert f"layers.0: {'9 operators, 9' if IS_26 else '11 operators, 8'} run again" in str(after)
    assert "1 variable crosses its end" in str(after)
    assert "after the last checkpoint, kept" in str(after)


def test_explain_names_what_is_kept_and_unknown_sizes() -> None:
    with building() as program:
        x = data(shape=(-1, HIDDEN))
        noise = paddle.rand([1, HIDDEN])
        mark_checkpoint(paddle.tanh(x * noise), "noisy")
        report = explain(program)
    assert report.unknown_sizes and "unknown dimensions count as 1" in str(report)
    random = "uniform_random" if IS_26 else "pd_op.uniform"
    assert report.segments[0].kept_ops == {random: "it draws random numbers"}
    assert f"{random} is kept: it draws random numbers" in str(report)


# ------------------------------------------------------------------- refusals and warnings


def test_a_name_that_does_not_exist() -> None:
    with building() as program:
        loss = marked_stack()
        before = len(program.global_block().ops)
        with pytest.raises(StaticGraphError, match=r"'layer\.1' is not in .* 'layers\.1'"):
            minimize(sgd(), loss, strategy_of(["layers.0", "layer.1"]))
        assert len(program.global_block().ops) == before


def in_a_branch() -> None:
    x = data()
    paddle.static.nn.cond(x.mean() > 0, lambda: mark_checkpoint(x * 2, "c"), lambda: x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: minimize(sgd(), Block()(data()).mean(), strategy_of([])),
            r"no checkpoints.*: name variables with",
        ),
        (lambda: RecomputeOptimizer(sgd()).minimize(marked_stack()), r"call\s+_set_checkpoints"),
        (lambda: explain(Block()(data()).block.program), "has no checkpoints"),
        (lambda: mark_checkpoint(data(), "c"), r"not .* \(a parameter or what is fed\)"),
        (lambda: mark_checkpoint(paddle.nn.Linear(2, 2).weight, "c"), r"not .* \(a parameter"),
        (lambda: mark_checkpoint(3.0, "c"), "not a float"),
        (
            lambda: [mark_checkpoint(data(name) * 2, "c") for name in "ab"],
            r"'c' is taken by another variable",
        ),
        (lambda: mark_checkpoint(data() * 2, ""), "received an empty name"),
        (in_a_branch, "inside a branch or loop body"),
    ],
)
def test_what_is_refused(call: Callable[[], object], words: str) -> None:
    with building(), pytest.raises(StaticGraphError, match=words):
        call()
    with pytest.raises(StaticGraphError, match="in dygraph, where variables have no"):
        mark_checkpoint(paddle.ones([2]), "c")


def test_one_variable_may_have_several_names() -> None:
    with building() as program:
        x = Block()(data())
        assert mark_checkpoint(mark_checkpoint(mark_checkpoint(x, "a"), "b"), "a") is x
        loss = mark_checkpoint(Block()(x), "c and d").mean()
        minimize(sgd(), loss, strategy_of(["b", "c and d"]))
        assert [(s.name, s.crossing) for s in explain(program).segments] == [
            ("b", 1),
            ("c and d", 1),
        ]


def not_cutting() -> Any:
    x = data()
    others = [paddle.tanh(paddle.nn.Linear(HIDDEN, HIDDEN)(x)) for _ in range(3)]
    narrow = mark_checkpoint(paddle.nn.Linear(HIDDEN, 1)(others[0]), "narrow")
    return (sum(others) * narrow).mean()


def nothing_to_compute_again() -> Any:
    x = mark_checkpoint(Block()(data()), "a")
    return mark_checkpoint(paddle.exp(x), "b").mean()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (marked_inside, "checkpoint 'inside' has no effect: it is inside 'whole'"),
        (not_cutting, r"'narrow' does not cut .* 3 variables cross .*tanh.*\[4x8\]"),
        (nothing_to_compute_again, "segment 'b' is not recomputed"),
    ],
)
def test_a_checkpoint_of_little_use_is_told(
    build: Callable[[], Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with building(), caplog.at_level(logging.WARNING, "paddle_recompute"):
        minimize(sgd(), build(), strategy_of([]))
    assert re.search(words, caplog.records[0].getMessage())


@needs_old_ir
def test_offload_which_fleet_would_ignore_is_refused() -> None:
    offload = {"checkpoints": [], "enable_offload": True}
    with pytest.raises(StaticGraphError, match="enable_offload"):
        train(marked_stack, (), recompute_configs=offload)


def changed_build_strategy() -> Any:
    build_strategy = paddle.static.BuildStrategy()
    build_strategy.fuse_gemm_epilogue = True
    return build_strategy


@needs_pir
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("localsgd", True, "localsgd to True"),
        ("nccl_comm_num", 2, "nccl_comm_num to 2"),
        ("recompute_configs", {"enable_offload": True}, r"recompute_configs\.enable_offload"),
        ("amp_configs", {"use_pure_fp16": True}, r"amp_configs\.use_pure_fp16 to True"),
        ("amp_configs", {"init_loss_scaling": 8.0}, r"amp_configs\.init_loss_scaling to 8\.0"),
        ("build_strategy", changed_build_strategy(), "build_strategy to"),
        ("hybrid_configs", {"mp_degree": 2}, r"hybrid_configs\.mp_degree to 2"),
    ],
)
def test_what_the_strategy_asks_and_cannot_have(name: str, value: Any, told: str) -> None:
    with building():
        loss = marked_stack()
        with pytest.raises(StaticGraphError, match=rf"the strategy sets {told}.* leave it at"):
            minimize(sgd(), loss, strategy_of([], **{name: value}))
