"""`minimize`: clip, merge, precision, names, refusals; the same tests on 2.6 and 3.3."""

from __future__ import annotations

import contextlib
import functools
import logging
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
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    IS_26,
    Block,
    Run,
    Stack,
    assert_equal,
    assert_recompute_changes_nothing,
    building,
    copies,
    data,
    marked_stack,
    needs_old_ir,
    needs_pir,
    num_recomputed,
    strategy_of,
    train,
)


def sgd() -> Any:
    return paddle.optimizer.SGD(0.1)


def clipped_adamw() -> Any:
    return paddle.optimizer.AdamW(1e-2, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.01))


def decayed_momentum() -> Any:
    return paddle.optimizer.Momentum(
        0.1, weight_decay=0.01, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.1)
    )


def adamw_of_some() -> Any:
    """An optimizer that was given parameters, and decays some of them only."""
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    return paddle.optimizer.AdamW(
        1e-2,
        parameters=[p for p in parameters if not p.name.startswith("layer_norm")],
        apply_decay_param_fun=lambda name: ".w" in name,
    )


# ------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize(
    "optimizer", [sgd, clipped_adamw, decayed_momentum, adamw_of_some], ids=lambda o: o.__name__
)
def test_optimizer(optimizer: Callable[[], Any]) -> None:
    assert_recompute_changes_nothing(marked_stack, make_optimizer=optimizer)


@pytest.mark.parametrize(
    "clip",
    [
        paddle.nn.ClipGradByGlobalNorm(0.05),
        paddle.nn.ClipGradByNorm(0.02),
        # Paddle 3.3 has none for Programs.
        pytest.param(paddle.nn.ClipGradByValue(0.001), marks=needs_old_ir),
    ],
    ids=lambda clip: type(clip).__name__,
)
def test_gradient_clip(clip: Any) -> None:
    clipped = assert_recompute_changes_nothing(
        marked_stack, make_optimizer=lambda: paddle.optimizer.SGD(0.1, grad_clip=clip)
    )
    free = train(marked_stack, (), make_optimizer=sgd)
    assert free.losses[0] == clipped.losses[0] and free.losses[2] != clipped.losses[2]
    name = next(iter(free.parameters))
    assert not np.array_equal(clipped.parameters[name], free.parameters[name])


# ------------------------------------------------------------------------------ gradient merge


def merged(steps: int, average: bool = True) -> dict[str, Any]:
    return {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": steps, "avg": average},
    }


def without_dropout() -> Any:
    return marked_stack(dropout=0.0)


@pytest.mark.parametrize("optimizer", [sgd, clipped_adamw, decayed_momentum])
def test_merging_two_equal_runs_is_one_run(optimizer: Callable[[], Any]) -> None:
    """The mean of two equal gradients is that gradient, to the bit."""
    run = train(
        without_dropout,
        (),
        steps=6,
        runs_per_step=2,
        make_optimizer=optimizer,
        **merged(2),
    )
    plain = train(without_dropout, None, steps=3, make_optimizer=optimizer)
    assert run.losses[::2] == run.losses[1::2] == plain.losses
    for name, value in run.parameters.items():
        np.testing.assert_array_equal(value, plain.parameters[name], name)


def test_merging_without_average_sums() -> None:
    run = train(
        without_dropout, (), steps=3, runs_per_step=3, make_optimizer=sgd, **merged(3, False)
    )
    plain = train(without_dropout, None, steps=1, make_optimizer=lambda: paddle.optimizer.SGD(0.3))
    for name, value in run.parameters.items():
        np.testing.assert_allclose(value, plain.parameters[name], rtol=1e-6, atol=1e-7)


def test_merging_with_recompute_and_dropout() -> None:
    assert_recompute_changes_nothing(
        marked_stack, steps=7, make_optimizer=clipped_adamw, **merged(3)
    )


def test_merging_follows_a_learning_rate_scheduler() -> None:
    def scheduled() -> Any:
        return paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.1, 1))

    assert_recompute_changes_nothing(marked_stack, make_optimizer=scheduled, **merged(2))


# ----------------------------------------------------------------------------- mixed precision


def bfloat16(**lists: Any) -> Callable[[], Any]:
    """What a Program of PIR is built in; 2.6 casts in `minimize`."""
    if IS_26:
        return contextlib.nullcontext
    return lambda: paddle.amp.auto_cast(True, level="O1", dtype="bfloat16", **lists)


@needs_bfloat16
@pytest.mark.parametrize(
    ("merge", "stop_gradient"),
    [
        pytest.param({}, True, id="plain, fed input"),
        pytest.param(merged(2), False, id="merged, trained input"),
        pytest.param({}, False, id="plain, trained input", marks=pytest.mark.matrix),
        pytest.param(merged(2), True, id="merged, fed input", marks=pytest.mark.matrix),
    ],
)
def test_bfloat16(merge: dict[str, Any], stop_gradient: bool) -> None:
    """The first product of what is fed has one gradient: oneDNN's own would crash (2.6, 3.3)."""

    def build() -> Any:
        return marked_stack(stop_gradient=stop_gradient)

    run = assert_recompute_changes_nothing(build, prepare=bfloat16(), amp=True, steps=4, **merge)
    plain = train(build, None, steps=4, **merge)
    assert len(set(run.losses)) == 4 and run.losses != plain.losses
    assert run.losses == pytest.approx(plain.losses, rel=0.02)


@needs_bfloat16
def test_the_casts_of_a_wrapped_layer_are_part_of_it() -> None:
    with in_program_order():
        run = train(wrapped(SELECTIONS["all"]), (), prepare=bfloat16(), amp=True)
        plain = train(wrapped(None), None, prepare=bfloat16(), amp=True)
    assert_equal(run, plain)
    float32 = train(wrapped(SELECTIONS["all"]), ())
    for one, other in zip(run.report.segments, float32.report.segments, strict=True):
        assert one.num_recomputed > other.num_recomputed


def test_a_cpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "programs_compute_bfloat16", lambda: False)
    with pytest.raises(StaticGraphError, match="needs AVX-512, and this CPU has none"):
        train(marked_stack, (), prepare=bfloat16(), amp=True)


@needs_old_ir
def test_operators_on_the_black_list_stay_in_float32() -> None:
    black = {"custom_black_list": ["matmul_v2"]}
    run = train(marked_stack, None, amp=True, amp_configs=black)
    assert run.losses == train(marked_stack, None).losses


@needs_old_ir
def test_what_a_cpu_cannot_do_in_bfloat16_is_refused() -> None:
    with pytest.raises(StaticGraphError, match="custom_white_list names softmax; on a CPU"):
        train(marked_stack, None, amp=True, amp_configs={"custom_white_list": ["softmax"]})


def half() -> Any:
    x = paddle.cast(data(), "float16")
    return mark_checkpoint(paddle.cast(x * 2, "float32"), "c").mean()


@needs_pir
@pytest.mark.parametrize(
    ("build", "prepare", "lists", "words"),
    [
        (marked_stack, None, {}, r"inside paddle\.amp\.auto_cast\(True, level='O1'"),
        (half, None, {}, "float16, which needs loss scaling"),
        (
            marked_stack,
            bfloat16(),
            {"custom_white_list": ["layer_norm"]},
            "layer_norm computes in float32",
        ),
        (
            marked_stack,
            bfloat16(),
            {"custom_black_list": ["matmul"]},
            "matmul computes in bfloat16",
        ),
    ],
    ids=["no auto_cast", "float16", "white list not followed", "black list not followed"],
)
def test_mixed_precision_that_is_refused(
    build: Callable[[], Any], prepare: Any, lists: dict[str, Any], words: str
) -> None:
    with pytest.raises(StaticGraphError, match=words):
        train(
            build,
            (),
            prepare=prepare or contextlib.nullcontext,
            amp=True,
            **({"amp_configs": lists} if lists else {}),
        )


@needs_pir
@needs_bfloat16
def test_amp_lists_that_were_followed() -> None:
    lists = {"custom_black_list": ["gelu"]}
    assert_recompute_changes_nothing(
        marked_stack, prepare=bfloat16(**lists), amp=True, amp_configs=lists
    )


# -------------------------------------------------------------------------------- wrapped layers

SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {"checkpoints": ["layers.*"]},
    "every second": {"checkpoints": ["layers.*"], "policy": "every_n"},
    "joined": {"checkpoints": ["layers.*"], "policy": "segments", "segments": 2},
    "cheap": {
        "checkpoints": ["layers.*.activation", "layers.*.dropout", "layers.*.norm"],
    },
}


def wrapped(selection: dict[str, Any] | None, calls: int = 1) -> Callable[[], Any]:
    def build() -> Any:
        model = Stack(num_blocks=4)
        if selection is not None:
            apply_recompute(model, RecomputeConfig(**selection))
        x = data()
        return sum((model(x * (1 + call)).square().mean() for call in range(calls)), 0.0)

    return build


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_wrapped_layers(selection: str, calls: int) -> None:
    with in_program_order():
        run = train(wrapped(SELECTIONS[selection], calls), ())
    assert num_recomputed(run) > 0
    assert_equal(run, unwrapped(calls))


@functools.cache
def unwrapped(calls: int) -> Run:
    with in_program_order():
        return train(wrapped(None, calls), None)


def segments_of(run: Run) -> list[str]:
    return [segment.name for segment in run.report.segments]


@pytest.mark.parametrize(
    ("selection", "calls", "asked", "names", "crossing"),
    [
        ("all", 2, [], [f"layers.{i}{call}" for call in ("", "#2") for i in range(4)], 8),
        ("every second", 1, [], ["layers.0", "layers.2"], 2),
        ("joined", 2, [], ["layers.1", "layers.3", "layers.1#2", "layers.3#2"], 4),
        ("all", 2, ["layers.1"], ["layers.1", "layers.1#2"], 2),
        ("all", 2, ["layers.1#2"], ["layers.1#2"], 1),
    ],
)
def test_segments_are_the_calls_of_wrapped_layers(
    selection: str, calls: int, asked: list[str], names: list[str], crossing: int
) -> None:
    """A name selects all calls of its layer; joined layers keep nothing between them."""
    with building() as program:
        minimize(sgd(), wrapped(SELECTIONS[selection], calls)(), strategy_of(asked))
        report = explain(program)
    assert [segment.name for segment in report.segments] == names
    assert sum(segment.crossing for segment in report.segments) == crossing


def test_cheap_parts_give_up_their_outputs_and_no_matmul_runs_twice() -> None:
    again = copies(wrapped(SELECTIONS["cheap"]))
    assert {"gelu", "dropout_grad"} <= again.keys()
    assert again.keys().isdisjoint(["matmul", "matmul_v2"])


def test_marks_and_wrapped_layers_together() -> None:
    def build() -> Any:
        block = recompute_wrapper(Block(), name="wrapped")
        x = mark_checkpoint(Block()(data()), "marked")
        return mark_checkpoint(Block()(block(x)), "last").square().mean()

    run = assert_recompute_changes_nothing_but_wrapping(build)
    assert segments_of(run) == ["marked", "wrapped", "last"]


def assert_recompute_changes_nothing_but_wrapping(build: Callable[[], Any], **options: Any) -> Run:
    """A wrapped model cannot be trained without recompute, so it is built bare instead."""
    run = train(build, (), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.recompute_wrapper", lambda layer, **_: layer)
        assert_equal(run, train(build, None, **options))
    return run


class Outer(paddle.nn.Layer):
    """A Layer of wrapped Layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = paddle.nn.LayerList([recompute_wrapper(Block(), name="part")] * 2)

    def forward(self, x: Any) -> Any:
        return self.parts[1](self.parts[0](x)) + x


class Marking(paddle.nn.Layer):
    """A Layer that marks an intermediate variable of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Any) -> Any:
        return self.second(mark_checkpoint(self.first(x), "inside"))


class Several(paddle.nn.Layer):
    """A Layer that takes two variables and returns a structure, part of which it uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, y: Any) -> Any:
        hidden = paddle.nn.functional.gelu(self.inner(x))
        return paddle.tanh(hidden) * y, hidden, [hidden * 2, None]


class WithLoss(paddle.nn.Layer):
    """A Layer that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        return self.block(x).square().mean()


def nested_calls() -> Any:
    x = data()
    for _ in range(2):
        x = recompute_wrapper(Outer(), name="outer")(x)
    return x.square().mean()


def several_outputs() -> Any:
    x, y = data(), paddle.tanh(data("y"))
    for _ in range(3):
        a, b, (c, nothing) = recompute_wrapper(Several(), name="several")(x, y)
        assert nothing is None
        x, y = a + b, paddle.nn.functional.gelu(c)
    return x.square().mean() + y.mean()


def loss_inside() -> Any:
    return recompute_wrapper(WithLoss(), name="all")(recompute_wrapper(Block(), name="b")(data()))


def x_and_y(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {name: random.randn(BATCH, HIDDEN).astype("float32") for name in ("x", "y")}


@pytest.mark.parametrize(
    ("build", "segments"),
    [
        (nested_calls, ["outer", "outer#2"]),
        (several_outputs, ["several", "several#2", "several#3"]),
        (loss_inside, ["b", "all"]),
    ],
)
def test_odd_calls(build: Callable[[], Any], segments: list[str]) -> None:
    feeds = x_and_y if build is several_outputs else None
    run = assert_recompute_changes_nothing_but_wrapping(build, feeds=feeds)
    assert segments_of(run) == segments and num_recomputed(run) > 0


def test_a_mark_inside_a_call_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        return recompute_wrapper(Marking(), name="whole")(data()).square().mean()

    with caplog.at_level(logging.WARNING, "paddle_recompute"):
        run = assert_recompute_changes_nothing_but_wrapping(build)
    assert segments_of(run) == ["whole"]
    [message] = [record.getMessage() for record in caplog.records]
    assert "checkpoint 'inside' has no effect: it is inside 'whole'" in message


@pytest.mark.parametrize("which", ["checkpoints", "inside"])
def test_variables_that_a_user_fetches(which: str) -> None:
    """Whatever is fetched, recomputed or not, is what the forward computed."""

    def run(checkpoints: list[str] | None) -> list[Any]:
        with building() as main, paddle.utils.unique_name.guard():
            paddle.seed(3)
            x, wanted = data(), []
            for index in range(3):
                hidden = paddle.nn.functional.gelu(paddle.nn.Linear(HIDDEN, 32)(x))
                dropped = paddle.nn.functional.dropout(hidden, 0.3)
                x = mark_checkpoint(paddle.nn.Linear(32, HIDDEN)(dropped) + x, f"c{index}")
                wanted += [x] if which == "checkpoints" else [hidden, dropped]
            minimize(sgd(), x.square().mean(), strategy_of(checkpoints))
            with paddle.static.scope_guard(paddle.static.Scope()):
                executor = paddle.static.Executor()
                executor.run(paddle.static.default_startup_program())
                feed = {"x": np.ones([BATCH, HIDDEN], "float32")}
                return [v for _ in range(3) for v in executor.run(main, feed, wanted)]

    values, plain = run([]), run(None)
    assert len(values) == len(plain) > 0
    for value, expected in zip(values, plain, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_wrapped_model_without_recompute_in_the_strategy_is_refused() -> None:
    with pytest.raises(StaticGraphError, match=r"set strategy\.recompute = True"):
        train(wrapped(SELECTIONS["all"]), None)


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: paddle.optimizer.SGD(0.1).minimize(loss),
        paddle.static.append_backward,
        lambda loss: paddle.static.gradients(loss, paddle.static.data("y", [1])),
    ],
    ids=["minimize", "append_backward", "gradients"],
)
def test_paddles_own_backward_of_a_wrapped_model_is_refused(backward: Callable[..., Any]) -> None:
    with building():
        loss = wrapped(SELECTIONS["all"])()
        with pytest.raises(StaticGraphError, match=r"'layers\.0', \.\.\..*static_graph\.minimize"):
            backward(loss)


# -------------------------------------------------------------------------- two losses, in turn


@needs_pir
def test_two_minimizes_in_one_program() -> None:
    """As for two networks that are trained against each other; each has its own parameters."""

    def run(recomputes: bool) -> list[Any]:
        with building() as main:
            paddle.seed(3)
            startup = paddle.static.default_startup_program()
            x = data()
            trunk = mark_checkpoint(Block()(mark_checkpoint(Block()(x), "a")), "b")
            first = trunk.square().mean()
            strategy = strategy_of([] if recomputes else None)
            _, one = minimize(paddle.optimizer.SGD(0.1), first, strategy)
            second = mark_checkpoint(Block()(paddle.tanh(trunk)), "c").mean()
            _, two = minimize(paddle.optimizer.SGD(0.1), second, strategy)
            wanted = [first, second, *(gradient for _, gradient in one + two)]
            values = []
            with paddle.static.scope_guard(paddle.static.Scope()):
                executor = paddle.static.Executor()
                executor.run(startup)
                random = np.random.RandomState(0)
                for _ in range(3):
                    feed = {"x": random.randn(4, HIDDEN).astype("float32")}
                    values += executor.run(main, feed=feed, fetch_list=wanted)
            return values

    for value, plain in zip(run(True), run(False), strict=True):
        np.testing.assert_array_equal(value, plain)


@needs_old_ir
def test_a_second_optimizer_is_refused() -> None:
    """fleet's own second minimize ends the process with SIGSEGV (2.6.2)."""

    def build() -> Any:
        loss = marked_stack()
        minimize(sgd(), loss, strategy_of(("layers.0",)))
        return loss

    with pytest.raises(StaticGraphError, match="has an optimizer already"):
        train(build, None)


# -------------------------------------------------------------------------- RecomputeOptimizer


@pytest.mark.parametrize("by_name", [True, False])
def test_recompute_optimizer(by_name: bool) -> None:
    with building() as program:
        x, checkpoints = data(), []
        for index in range(3):
            x = Block()(x)
            checkpoints.append(f"c{index}" if by_name else x)
            if by_name:
                mark_checkpoint(x, f"c{index}")
        optimizer = RecomputeOptimizer(sgd())
        optimizer._set_checkpoints(checkpoints)
        operators, params_grads = optimizer.minimize(x.square().mean())
        report = explain(program)
    assert len(params_grads) == 3 * 6 and operators
    assert [bool(segment.num_recomputed) for segment in report.segments] == [True] * 3


def test_recompute_optimizer_takes_a_variable_that_is_marked_already() -> None:
    with building() as program:
        x = mark_checkpoint(Block()(data()), "mine")
        optimizer = RecomputeOptimizer(sgd())
        optimizer._set_checkpoints([x])
        optimizer.minimize(x.square().mean())
        assert [segment.name for segment in explain(program).segments] == ["mine"]


# ------------------------------------------------------------------------------------- explain


def test_explain_before_and_after() -> None:
    with building() as program:
        loss = marked_stack(2)
        before = explain(program)
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


def test_marks_survive_a_clone() -> None:
    with building() as program:
        marked_stack()
        clone = program.clone()
        assert [s.name for s in explain(clone).segments] == [f"layers.{i}" for i in range(3)]


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


def changed_build_strategy() -> Any:
    strategy, build_strategy = strategy_of([]), paddle.static.BuildStrategy()
    build_strategy.fuse_gemm_epilogue = True
    strategy.build_strategy = build_strategy
    return strategy


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
        (
            lambda: RecomputeOptimizer(sgd()).minimize(marked_stack()),
            r"call\s+_set_checkpoints",
        ),
        (lambda: explain(Block()(data()).block.program), "has no checkpoints"),
        (lambda: mark_checkpoint(data(), "c"), r"not .* \(a parameter or what is fed\)"),
        (
            lambda: mark_checkpoint(paddle.nn.Linear(2, 2).weight, "c"),
            r"not .* \(a parameter or what is fed\)",
        ),
        (lambda: mark_checkpoint(3.0, "c"), "not a float"),
        (
            lambda: [mark_checkpoint(data(name) * 2, "c") for name in "ab"],
            r"'c' is taken by another variable",
        ),
        (lambda: mark_checkpoint(data() * 2, ""), "received an empty name"),
        (in_a_branch, "inside a branch or loop body"),
        pytest.param(
            lambda: minimize(sgd(), marked_stack(), changed_build_strategy()),
            "sets build_strategy",
            marks=needs_pir,
        ),
    ],
)
def test_what_is_refused(call: Callable[[], object], words: str) -> None:
    with building(), pytest.raises(StaticGraphError, match=words):
        call()


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


def test_mark_checkpoint_in_dygraph() -> None:
    with pytest.raises(StaticGraphError, match="in dygraph, where variables have no"):
        mark_checkpoint(paddle.ones([2]), "c")


def test_a_checkpoint_that_does_not_cut_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    with building(), caplog.at_level(logging.WARNING, "paddle_recompute"):
        x = data()
        others = [paddle.tanh(paddle.nn.Linear(HIDDEN, HIDDEN)(x)) for _ in range(3)]
        narrow = mark_checkpoint(paddle.nn.Linear(HIDDEN, 1)(others[0]), "narrow")
        loss = (sum(others) * narrow).mean()
        minimize(sgd(), loss, strategy_of([]))
    message, _ = [record.getMessage() for record in caplog.records]
    assert "'narrow' does not cut the graph: 3 variables cross this segment's end" in message
    assert "tanh" in message and "[4x8]" in message


def test_a_segment_with_nothing_to_compute_again(caplog: pytest.LogCaptureFixture) -> None:
    with building(), caplog.at_level(logging.WARNING, "paddle_recompute"):
        x = mark_checkpoint(Block()(data()), "a")
        loss = mark_checkpoint(paddle.exp(x), "b").mean()
        minimize(sgd(), loss, strategy_of([]))
    [message] = [record.getMessage() for record in caplog.records]
    assert "segment 'b' is not recomputed" in message


@needs_pir
def test_a_gradient_that_ranks_cannot_exchange() -> None:
    """Paddle 3.3 makes no sparse gradients in PIR; an array stands for one."""
    from paddle_recompute.static_graph._pir_data_parallel import mean_over_ranks

    with building():
        weight = paddle.nn.Linear(2, 2).weight
        array = paddle.tensor.create_array("float32")
        with pytest.raises(StaticGraphError, match=r"gradient of 'linear_\d+\.w_0' is sparse"):
            mean_over_ranks([(weight, array)], num_ranks=2, bucket_bytes=8)


@needs_old_ir
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute_configs": {"checkpoints": [], "enable_offload": True}}, "enable_offload"),
        ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, "use_pure_bf16, level O2"),
    ],
    ids=["offload", "O2"],
)
def test_what_fleet_would_ignore_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StaticGraphError, match=words):
        train(marked_stack, (), **settings)


@needs_pir
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("localsgd", True, "localsgd to True"),
        ("sharding", True, "sharding to True"),
        ("sync_batch_norm", True, "sync_batch_norm to True"),
        ("fp16_allreduce", True, "fp16_allreduce to True"),
        ("nccl_comm_num", 2, "nccl_comm_num to 2"),
        ("recompute_configs", {"enable_offload": True}, r"recompute_configs\.enable_offload"),
        ("amp_configs", {"use_pure_fp16": True}, r"amp_configs\.use_pure_fp16 to True"),
        ("amp_configs", {"init_loss_scaling": 8.0}, r"amp_configs\.init_loss_scaling to 8\.0"),
        ("hybrid_configs", {"mp_degree": 2}, r"hybrid_configs\.mp_degree to 2"),
        ("gradient_scale_configs", {"scale_strategy": "sum"}, r"gradient_scale_configs\.scale"),
    ],
)
def test_what_the_strategy_asks_and_cannot_have(name: str, value: Any, told: str) -> None:
    with building():
        loss = marked_stack()
        with pytest.raises(StaticGraphError, match=rf"the strategy sets {told}.* leave it at"):
            minimize(sgd(), loss, strategy_of([], **{name: value}))
