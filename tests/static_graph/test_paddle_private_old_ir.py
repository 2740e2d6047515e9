"""A test for each private name of Paddle that `old_ir`, `old_ir_fleet`, `training` and `ranks` use.

Each says what the name is relied on for. Those of `old_ir` and `old_ir_fleet` can go, with the
modules, when Paddle 2.6 is no longer supported; of the others each test says what they wait for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import backward, core, framework
from paddle.base.layer_helper import LayerHelper

from paddle_recompute._paddle.static import old_ir, ranks, training
from tests.bfloat16 import needs_bfloat16
from tests.processes import python
from tests.ranks import run_ranks
from tests.static_graph.models import IS_26, needs_old_ir, static_mode

FORWARD, BACKWARD, OPTIMIZE, LOSS = 0, 1, 2, 256


def fed() -> Any:
    value = paddle.static.data("x", [2, 3])
    value.stop_gradient = False
    return value


def kinds(program: paddle.static.Program) -> list[str]:
    return [one.type for one in program.global_block().ops]


def run(program: paddle.static.Program, wanted: list[Any], x: Any = None) -> list[Any]:
    feed = {"x": np.ones([2, 3], "float32") if x is None else x}
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    return list(executor.run(program, feed=feed, fetch_list=wanted))


# --------------------------------------------------------------------------- reading a Program


@needs_old_ir
def test_roles_of_operators(program: paddle.static.Program) -> None:
    loss = paddle.nn.Linear(3, 1)(fed()).mean()
    assert {one.attr("op_role") for one in program.global_block().ops} == {FORWARD}
    paddle.optimizer.SGD(0.1).minimize(loss)
    roles = [one.attr("op_role") for one in program.global_block().ops]
    assert FORWARD | LOSS in roles and BACKWARD in roles and OPTIMIZE in roles
    assert BACKWARD | LOSS in roles


@needs_old_ir
def test_the_name_of_what_nobody_wants() -> None:
    assert core.empty_var_name() == old_ir.EMPTY
    assert framework.grad_var_name("Out") == "Out@GRAD"


@needs_old_ir
def test_bodies(program: paddle.static.Program) -> None:
    x = fed()
    paddle.static.nn.cond(x.mean() > 0, lambda: paddle.exp(x), lambda: x * 2)
    branch = next(one for one in program.global_block().ops if one.has_attr("sub_block"))
    body = program.block(branch._block_attr_id("sub_block"))
    assert branch.type == "conditional_block" and body.idx != 0
    assert "exp" in [one.type for one in body.ops]


@needs_old_ir
def test_infer_no_need_buffer_slots(program: paddle.static.Program) -> None:
    """An operator that reads the shape of an input alone does not keep it alive."""
    loss = (fed() + paddle.ones([3])).mean()
    (loss * 1.0).sum()
    paddle.static.append_backward(loss, parameter_list=["x"])
    gradient = next(one for one in program.global_block().ops if one.type.endswith("add_grad"))
    assert not old_ir.reads_values_of(gradient, gradient.input("X")[0])
    assert old_ir.reads_values_of(gradient, gradient.input("Out@GRAD")[0])


@needs_old_ir
def test_attributes_of_our_own_survive_a_clone(program: paddle.static.Program) -> None:
    y = paddle.exp(fed())
    operator = program.global_block().ops[-1]
    operator._set_attr("recompute_of_ours", "layer.0")
    copy = program.clone().global_block().ops[-1]
    assert copy.attr("recompute_of_ours") == "layer.0"
    assert "recompute_of_ours" in copy.attr_names
    assert run(program, [y])[0] == pytest.approx(np.e)  # the executor does not mind


# -------------------------------------------------------------------------- changing a Program


@needs_old_ir
def test_insertion_of_a_copy_and_renaming(program: paddle.static.Program) -> None:
    block = program.global_block()
    y = paddle.exp(fed())
    z = paddle.tanh(y)
    block.create_var(name="copy", shape=y.shape, dtype=y.dtype)
    description = block.desc._insert_op(1)
    description.copy_from(block.ops[0].desc)
    description._rename_output(y.name, "copy")
    description._set_attr("op_role", BACKWARD)
    block.ops.insert(1, framework.Operator(block, description))
    block.ops[2]._rename_input(y.name, "copy")
    program._sync_with_cpp()
    assert kinds(program) == ["exp", "exp", "tanh"]
    assert block.ops[1].output_arg_names == ["copy"] == block.ops[2].input_arg_names
    np.testing.assert_allclose(run(program, [z])[0], np.tanh(np.e), rtol=1e-6)


@needs_old_ir
@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
def test_dropout_grad_is_dropout_with_a_mask(program: paddle.static.Program, mode: str) -> None:
    """So a dropout is repeated from its mask, without a random number."""
    block = program.global_block()
    y = paddle.nn.functional.dropout(paddle.tanh(fed()), 0.5, mode=mode)
    dropout = block.ops[-1]
    assert dropout.output_names == ["Mask", "Out"] and dropout.attr("is_test") is False
    block.create_var(name="again", shape=y.shape, dtype=y.dtype)
    old_ir.dropout_again_before(block, 2, dropout, {y.name: "again"})
    program._sync_with_cpp()
    first, again = run(program, [y, block.var("again")])
    np.testing.assert_array_equal(first, again)


@needs_old_ir
def test_depend_orders_and_computes_nothing(program: paddle.static.Program) -> None:
    block = program.global_block()
    x = fed()
    y, z = paddle.exp(x), paddle.tanh(x)
    old_ir.hold_back_before(block, 2, y.name, [z.name])
    w = paddle.log(y)
    program._sync_with_cpp()
    depend = block.ops[2]
    assert depend.type == "depend" and depend.input_arg_names == [z.name, y.name]
    np.testing.assert_allclose(run(program, [w])[0], 1.0, rtol=1e-6)


@needs_old_ir
def test_remove_op(program: paddle.static.Program) -> None:
    y = paddle.exp(fed())
    paddle.tanh(y)
    program.global_block()._remove_op(1, sync=False)
    program._sync_with_cpp()
    assert kinds(program) == ["exp"] and run(program, [y])[0] == pytest.approx(np.e)


# ------------------------------------------------------------------------ whose backward it is


@needs_old_ir
def test_find_op_path_is_looked_up_at_each_call(
    program: paddle.static.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All backwards go by it, so one over recomputed Layers that nobody claims can be refused."""
    called = []
    original = backward._find_op_path_

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(backward, "_find_op_path_", watched)
    loss = paddle.nn.Linear(3, 1)(fed()).mean()
    paddle.static.append_backward(loss)
    assert len(called) == 1
    paddle.static.gradients([loss], [program.global_block().var("x")])
    assert len(called) > 1


SEEN: list[bool] = []


@paddle.jit.not_to_static
def ask(x: Any) -> Any:
    SEEN.append(paddle.base.dygraph.base.in_to_static_mode())
    return x * 2


def calls_ask(x: Any) -> Any:
    return ask(x)


def test_in_to_static_mode() -> None:
    SEEN.clear()
    paddle.jit.to_static(calls_ask, full_graph=True)(paddle.ones([2]))
    assert SEEN[0] is True
    calls_ask(paddle.ones([2]))
    assert SEEN[-1] is False


# ------------------------------------------------------------------------------------- fleet


@needs_old_ir
def test_role_maker_is_none_until_fleet_is_initialized() -> None:
    from paddle.distributed.fleet.fleet import Fleet

    with static_mode():
        fleet = Fleet()
        assert fleet._role_maker is None
        fleet.init(is_collective=True)
        assert fleet._role_maker is not None


@needs_old_ir
def test_init_communicator() -> None:
    """What starts NCCL in the startup program, and raises on a CPU; nothing else is left out."""
    from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper

    assert callable(CollectiveHelper._init_communicator)


@needs_old_ir
def test_lists_and_casts_of_mixed_precision(program: paddle.static.Program) -> None:
    from paddle.static.amp import CustomOpLists, fp16_utils

    lists = CustomOpLists({"matmul_v2"}, {"tanh"}, set(), dtype="bfloat16")
    assert "matmul_v2" in lists.white_list and "tanh" in lists.black_list
    lists.unsupported_list = {"softmax"}
    paddle.tanh(paddle.matmul(fed(), paddle.ones([3, 2])))
    bfloat16 = core.VarDesc.VarType.BF16
    fp16_utils.cast_model_to_fp16(
        program, lists, use_fp16_guard=False, dest_type=bfloat16, level="O1"
    )
    block = program.global_block()
    product = next(one for one in block.ops if one.type == "matmul_v2")
    assert block.var(product.output("Out")[0]).dtype == bfloat16
    assert kinds(program).count("cast") == 3


@needs_bfloat16
@needs_old_ir
def test_the_crash_of_onednn_is_refused_by_nobody_else() -> None:
    """`complete_bfloat16_gradients` can go if this exits with 0."""
    script = (
        "import paddle; paddle.enable_static(); x = paddle.static.data('x', [2, 3])\n"
        "w = paddle.create_parameter([3, 2], 'float32')\n"
        "from paddle.base import core\n"
        "y = paddle.matmul(x.astype('bfloat16'), w.astype('bfloat16'))\n"
        "[o._set_attr('use_mkldnn', True) for o in y.block.ops if o.type == 'matmul_v2']\n"
        "paddle.optimizer.SGD(0.1).minimize(y.astype('float32').mean())\n"
        "e = paddle.static.Executor(); e.run(paddle.static.default_startup_program())\n"
        "e.run(feed={'x': [[1, 2, 3], [4, 5, 6]]})\n"
    )
    done = python("-c", script, fails=True)
    assert done.returncode < 0, done.stderr[-500:]


# --------------------------------------------------------------------- of a train step, and ranks


def test_convert_dtype_names_any_dtype(program: paddle.static.Program) -> None:
    spec = paddle.static.InputSpec([1], "int64")
    assert training.dtype_name(spec.dtype) == "int64"
    assert training.dtype_name(fed().dtype) == "float32"
    assert training.dtype_name(paddle.bfloat16) in ("uint16", "bfloat16")


@needs_old_ir
def test_optimized_guard_marks_the_update(program: paddle.static.Program) -> None:
    """Fleet goes by roles: what computes the norm belongs to the update, not to the backward."""
    x = fed()
    with program._optimized_guard([]):
        paddle.exp(x)
    assert program.global_block().ops[-1].attr("op_role") == OPTIMIZE


def test_accumulators_name_the_moments(program: paddle.static.Program) -> None:
    """Can go when ``Optimizer.state_dict`` works in static mode."""
    layer = paddle.nn.Linear(3, 1)
    optimizer = paddle.optimizer.AdamW(0.1)
    optimizer.minimize(layer(fed()).mean())
    found = training.accumulators(optimizer)
    kinds_found = {kind for parameter, kind in found if parameter == layer.weight.name}
    assert kinds_found == {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}


@pytest.mark.skipif(IS_26, reason="works on Paddle 2.6")
def test_create_global_var_fails_in_pir(program: paddle.static.Program) -> None:
    """If this fails, `pir.persistable` can do with it."""
    with pytest.raises(TypeError):
        paddle.static.create_global_var([], 0.0, "float32", True, name="norm")


def sums_on_ranks() -> dict[str, Any]:
    rank = paddle.distributed.get_rank()
    found: dict[str, Any] = {}
    with static_mode():
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [2])
            x.stop_gradient = False
            assert not ranks.has_sums(main)
            total = ranks.sum_over_ranks(x)
            assert ranks.has_sums(main) and total.stop_gradient
            feed = {"x": np.array([rank, 1.0], "float32")}
            values = paddle.static.Executor().run(main, feed=feed, fetch_list=[total])
            found["sum"] = values[0].tolist()
            if IS_26:
                helper = LayerHelper("c_identity")
                same = helper.create_variable_for_type_inference(x.dtype)
                attributes = {"ring_id": 0, "use_calc_stream": True, "use_model_parallel": True}
                helper.append_op(
                    type="c_identity",
                    inputs={"X": [x]},
                    outputs={"Out": [same]},
                    attrs=attributes,
                )
                with pytest.raises(Exception, match="Do not support c_identity for cpu"):
                    paddle.static.Executor().run(main, feed=feed, fetch_list=[same])
            else:
                summed = paddle._C_ops.all_reduce(x * 1.0, 0, 0)
                same = paddle._C_ops.c_identity(x * 1.0, 0, True, True)
                for one in (summed, same):
                    assert paddle.static.gradients([one.sum()], [x]) == [None]
    return found


def test_sums_over_ranks_which_have_no_gradient() -> None:
    """If a rank fails here, rows can be gathered with their gradients, and each rank can score its
    own rows alone: `contrastive._gather_static`."""
    assert [one["sum"] for one in run_ranks(sums_on_ranks, 2)] == [[1.0, 2.0]] * 2


@needs_old_ir
def test_a_variable_has_no_truth(program: paddle.static.Program) -> None:
    """`old_ir.refusing_truth` sets ``Variable.__bool__``, which 2.6 lacks."""
    assert not hasattr(framework.Variable, "__bool__")
    assert bool(fed())
    with old_ir.refusing_truth(), pytest.raises(TypeError, match="has no value while a Program"):
        bool(fed())
    assert not hasattr(framework.Variable, "__bool__")
