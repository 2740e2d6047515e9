"""Recompute in Programs of Paddle 2.6: equal to the last bit, cheaper, and refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import (
    RecomputeConfig,
    apply_recompute,
    static_graph,
)
from paddle_recompute._paddle import device
from paddle_recompute._paddle.static import training
from paddle_recompute.errors import StaticGraphError
from tests.bfloat16 import needs_bfloat16
from tests.ranks import run_ranks
from tests.static_graph.old_ir_programs import (
    BATCH,
    LENGTH,
    WIDTH,
    batches,
    blocks,
    needs_old_ir,
    strategy,
    train,
)

pytestmark = needs_old_ir

# The rounding of bfloat16, with 8 bits, on a loss near 1.
BFLOAT16 = 2e-2


def encoder_loss(x: Any) -> Any:
    return (blocks(x) - x).square().mean()


def plain_loss(x: Any) -> Any:
    return (blocks(x, mark=False) - x).square().mean()


def wrapped_loss(x: Any) -> Any:
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1)
    model = paddle.nn.TransformerEncoder(block, 3)
    apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"]))
    return (model(x) - x).square().mean()


def unwrapped_loss(x: Any) -> Any:
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1)
    return (paddle.nn.TransformerEncoder(block, 3)(x) - x).square().mean()


# ---------------------------------------------------------------------------------- equality


def test_ten_steps_with_dropout_are_those_without_recompute() -> None:
    plain = train(plain_loss, recompute=False, steps=10)
    recomputed = train(encoder_loss, recompute=True, steps=10)
    assert recomputed.count("depend") > 0 and len(plain.gradients) > 30
    recomputed.same_as(plain)


def test_no_random_number_is_drawn_again() -> None:
    recomputed = train(encoder_loss, recompute=True)
    plain = train(plain_loss, recompute=False)
    assert recomputed.count("dropout") == plain.count("dropout") == 12
    assert recomputed.count("dropout_grad") == 2 * plain.count("dropout_grad")


def test_matrix_products_are_run_again() -> None:
    recomputed = train(encoder_loss, recompute=True)
    plain = train(plain_loss, recompute=False)
    # Of each block's 8 products the last one, before a residual sum, is needed by nobody's
    # gradient but the LayerNorm's, which needs its input.
    assert recomputed.count("matmul_v2") == 2 * plain.count("matmul_v2")


def test_variable_names_are_checkpoints_too_as_in_paddles_own_strategy() -> None:
    found: list[str] = []

    def build(x: Any) -> Any:
        for _ in range(2):
            x = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1)(x)
            found.append(x.name)
        return x.square().mean()

    plain = train(build, recompute=False)
    recomputed = train(build, recompute=True, names=tuple(found))
    assert [segment.name for segment in recomputed.report.segments] == found[:2]
    recomputed.same_as(plain)


# --------------------------------------------------------------------------- mixed precision


@needs_bfloat16
def test_bfloat16_with_recompute_is_bfloat16_without() -> None:
    plain = train(plain_loss, recompute=False, amp=True)
    recomputed = train(encoder_loss, recompute=True, amp=True)
    recomputed.same_as(plain)
    float32 = train(plain_loss, recompute=False)
    assert plain.losses != float32.losses
    np.testing.assert_allclose(plain.losses[0], float32.losses[0], rtol=BFLOAT16)
    assert plain.count("cast") > 20


@needs_bfloat16
def test_wrapped_layers_with_bfloat16() -> None:
    recomputed = train(wrapped_loss, recompute=True, amp=True)
    # The casts of a weight and of an activation are part of the Layer that needs them.
    assert all(one.num_recomputed > 40 for one in recomputed.report.segments)
    recomputed.same_as(train(unwrapped_loss, recompute=False, amp=True))


def test_operators_on_the_black_list_stay_in_float32() -> None:
    black = {"custom_black_list": ["matmul_v2"]}
    done = train(plain_loss, recompute=False, amp=True, amp_configs=black)
    assert done.losses == train(plain_loss, recompute=False).losses


def test_a_cpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "programs_compute_bfloat16", lambda: False)
    with pytest.raises(StaticGraphError, match="needs AVX-512, and this CPU has none"):
        train(plain_loss, recompute=False, amp=True)


def test_what_a_cpu_cannot_do_in_bfloat16_is_refused() -> None:
    with pytest.raises(StaticGraphError, match="custom_white_list names softmax; on a CPU"):
        train(plain_loss, recompute=False, amp=True, amp_configs={"custom_white_list": ["softmax"]})


# ----------------------------------------------------------------------------------- memory


def peak_of_a_process(recompute: bool) -> int:
    from paddle.base import core

    paddle.seed(1)
    with training.static_mode():
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            x = hidden = paddle.static.data("x", [16, 32, 64])
            for number in range(6):
                hidden = paddle.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1)(hidden)
                static_graph.mark_checkpoint(hidden, str(number))
            loss = (hidden - x).square().mean()
            static_graph.minimize(
                paddle.optimizer.SGD(0.1), loss, strategy(recompute), startup_program=startup
            )
        executor = paddle.static.Executor()
        executor.run(startup)
        for batch in batches(4, (16, 32, 64)):
            executor.run(main, feed={"x": batch}, fetch_list=[loss])
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def test_the_peak_falls_under_the_multi_threaded_executor() -> None:
    # Each in a process of its own: on 2.6 the peak cannot be reset. The executor frees in a thread
    # of its own, late on a loaded machine: the least of some processes is what a step needs.
    def least(recompute: bool) -> int:
        return min(run_ranks(peak_of_a_process, 1, recompute=recompute)[0] for _ in range(3))

    assert least(True) < 0.5 * least(False)


# ------------------------------------------------------------------------------------ words


def test_to_static_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, WIDTH))
    apply_recompute(model, RecomputeConfig(checkpoints=["*"]))
    with pytest.raises(StaticGraphError, match=r"without a word on Paddle 2\.6"):
        paddle.jit.to_static(model, full_graph=True)(paddle.ones([2, WIDTH]))


def test_offload_and_level_o2_are_refused() -> None:
    offload = {"checkpoints": [], "enable_offload": True}
    with pytest.raises(StaticGraphError, match="enable_offload"):
        train(encoder_loss, recompute=True, recompute_configs=offload)
    with pytest.raises(StaticGraphError, match="use_pure_bf16, level O2"):
        train(encoder_loss, recompute=True, amp=True, amp_configs={"use_pure_bf16": True})


def test_marks_survive_a_clone() -> None:
    from paddle_recompute._paddle.static import old_ir

    with training.static_mode():
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            encoder_loss(paddle.static.data("x", [BATCH, LENGTH, WIDTH]))
        assert list(old_ir.checkpoints(main.clone())) == [f"block.{i}" for i in range(3)]
