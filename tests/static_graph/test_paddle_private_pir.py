"""One test for each private name of Paddle that `_paddle_static` uses for PIR and `to_static`.

Each says what the name is relied on for, so that a release that moves or changes it is noticed.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_recompute._paddle import static as _paddle_static
from paddle_recompute._paddle.static import pir, pir_exchange
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program.pir.operators import only_shares_memory
from tests.static_graph.models import IS_26, needs_pir, static_mode


def fed(name: str = "x", dtype: str = "float32") -> Any:
    value = paddle.static.data(name, [2, 3], dtype)
    value.stop_gradient = False
    return value


def names(program: paddle.static.Program) -> list[str]:
    return [one.name().partition(".")[2] for one in program.global_block().ops]


def run(program: paddle.static.Program, wanted: list[Any], **feed: Any) -> list[Any]:
    return list(paddle.static.Executor().run(program, feed=feed, fetch_list=wanted))


# ------------------------------------------------------------------------- the guard of versions


@pytest.mark.parametrize("version", [(2, 5, 2), (3, 0, 0), (3, 4, 0), (4, 0, 0)])
def test_a_paddle_that_is_not_known_is_refused(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_paddle_static, "paddle_version", lambda: version)
    told = r"\.".join(map(str, version))
    with pytest.raises(
        StaticGraphError, match=rf"Paddle {told} is not known .* of Paddle 2\.6 and 3"
    ):
        _paddle_static.representation()


def test_the_installed_paddle_is_known() -> None:
    assert _paddle_static.representation() == ("old_ir" if IS_26 else "pir")


@needs_pir
def test_use_pir_api(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paddle.framework.use_pir_api()
    monkeypatch.setattr(paddle.framework, "use_pir_api", lambda: False)
    with pytest.raises(StaticGraphError, match=r"FLAGS_enable_pir_api=0.*unset that flag"):
        _paddle_static.representation()


# --------------------------------------------------------------------------- reading a Program


@needs_pir
def test_operation_and_value(program: paddle.static.Program) -> None:
    x = fed()
    y = paddle.exp(x)
    z = paddle.tanh(y) + y
    definer = y.get_defining_op()
    assert names(program) == ["data", "exp", "tanh", "add"]
    assert definer.name() == "pd_op.exp" and definer.num_results() == 1
    assert definer.id() == program.global_block().ops[1].id()
    assert [v.id for v in definer.operands_source()] == [x.id] == [definer.operand_source(0).id]
    assert definer.result(0).id == definer.results()[0].id == y.id
    assert {one.name() for one in y.all_used_ops_in_same_block()} == {"pd_op.tanh", "pd_op.add"}
    assert y.block.program == program and definer.get_parent_block() == program.global_block()
    assert y.is_dense_tensor_type() and y.element_size() == 4 and str(y.dtype).endswith("float32")
    assert z.initialized() and definer.num_regions() == 0


@needs_pir
def test_value_equality_appends_an_operator(program: paddle.static.Program) -> None:
    """Why values are compared by ``Value.id``; if this fails, `pir.key` may go."""
    x = fed()
    assert isinstance(x == x, paddle.pir.Value) and names(program)[-1] == "equal"


@needs_pir
def test_missing_operands_and_results_are_not_initialized(program: paddle.static.Program) -> None:
    dropout = paddle.nn.functional.dropout(fed(), 0.5).get_defining_op()
    assert dropout.name() == "pd_op.dropout"
    assert [value.initialized() for value in dropout.operands_source()] == [True, False, True]
    assert [value.initialized() for value in dropout.results()] == [True, True]


@needs_pir
def test_bodies(program: paddle.static.Program) -> None:
    x = fed()
    paddle.static.nn.cond(x.mean() > 0, lambda: paddle.exp(x), lambda: x * 2)
    branch = next(one for one in program.global_block().ops if one.name() == "pd_op.if")
    inside = [inner.name() for block in branch.blocks() for inner in block.ops]
    assert "pd_op.exp" in inside and "pd_op.scale" in inside and branch.num_regions() == 2
    users = x.all_used_ops()
    assert any(user.get_parent_block() != program.global_block() for user in users)
    assert branch.id() in {user.id() for user in x.all_used_ops_in_same_block()}


@needs_pir
def test_is_no_need_buffer(program: paddle.static.Program) -> None:
    """The backward of an addition wants the shapes of its operands, that of exp its numbers."""
    x = fed()
    y = paddle.nn.Linear(3, 3)(x) * 1.0
    loss = (paddle.exp(y + fed("z"))).mean()
    paddle.static.append_backward(loss)
    users = {one.name(): one for one in y.all_used_ops()}
    assert users["pd_op.add_grad"].is_no_need_buffer(y)
    exp = next(one for one in program.global_block().ops if one.name() == "pd_op.exp_grad")
    assert not exp.is_no_need_buffer(exp.operand_source(0))


@needs_pir
def test_get_op_inplace_info(program: paddle.static.Program) -> None:
    total = fed()
    paddle._C_ops.add_(total, fed("y"))
    inplace, ordinary = program.global_block().ops[-1], (total * 2).get_defining_op()
    [(operand, result)] = pir.in_place(inplace)
    assert operand.id == total.id and result.id == inplace.result(0).id
    assert pir.in_place(ordinary) == []


@needs_pir
def test_detach_shares_memory(program: paddle.static.Program) -> None:
    """``share_data_`` is in place and changes nothing; the list of `only_shares_memory`."""
    operation = fed().detach().get_defining_op()
    assert operation.name() == "pd_op.share_data_" and only_shares_memory(operation)
    assert len(pir.in_place(operation)) == 1


@needs_pir
def test_what_follows_an_assignment_takes_the_old_value(program: paddle.static.Program) -> None:
    """Why `Memory` exists: the Program does not say that ``exp`` comes after the assignment."""
    x = paddle.tanh(fed())
    x[:, 0] = 1.0
    after = paddle.exp(x).get_defining_op()
    assert after.operand_source(0).get_defining_op().name() == "pd_op.tanh"


# --------------------------------------------------------------------------- changing a Program


@needs_pir
def test_attributes_of_our_own(program: paddle.static.Program) -> None:
    operation = paddle.exp(fed()).get_defining_op()
    operation.set_str_attr("ours", "text")
    operation.set_bool_attr("flag", True)
    clone = program.clone()  # its operators do not keep it alive
    [copy] = [one for one in clone.global_block().ops if one.name() == "pd_op.exp"]
    for one in (operation, copy):  # attributes survive a clone
        assert one.has_attr("ours") and one.str_attr("ours") == "text" and one.attrs()["flag"]
    operation.erase_attr("ours")
    assert not operation.has_attr("ours")


@needs_pir
def test_insertion_point_clone_and_replacement_of_uses(program: paddle.static.Program) -> None:
    x, other = fed(), fed("other")
    y = paddle.exp(x)
    first, second = paddle.tanh(y), paddle.sigmoid(y)
    with pir.editing(program):
        pir.insert_before(second.get_defining_op())
        copy = pir.clone(y.get_defining_op(), {pir.key(x): other})
    assert paddle.pir.get_current_insertion_point().block() == program.global_block()
    pir.replace_uses(y, copy.result(0), [second.get_defining_op()])
    assert names(program) == ["data", "data", "exp", "tanh", "exp", "sigmoid"]
    assert first.get_defining_op().operand_source(0).id == y.id
    assert second.get_defining_op().operand_source(0).id == copy.result(0).id
    paddle.abs(x)
    assert names(program)[-1] == "abs"  # reset_insertion_point_to_end
    a, b = np.zeros([2, 3], "float32"), np.ones([2, 3], "float32")
    values = run(program, [first, second], x=a, other=b)
    np.testing.assert_allclose(values[0], np.tanh(np.exp(a)), rtol=1e-6)
    np.testing.assert_allclose(values[1], 1 / (1 + np.exp(-np.exp(b))), rtol=1e-6)


@needs_pir
@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int64", "uint8"])
def test_what_waits_keeps_its_bits(program: paddle.static.Program, dtype: str) -> None:
    """``_C_ops.numel``, ``scale``, ``cast``, ``subtract`` and ``bitwise_or``."""
    x, gradient = fed("x", dtype), fed("gradient")
    waiting = pir.after(x, pir.zero_after(gradient))
    odd = np.array([[-0.0, 0.0, np.nan], [np.inf, -np.inf, 1e-45]])
    value = odd.astype(dtype) if dtype.startswith("float") else np.arange(6).reshape(2, 3) % 2
    value = value.astype(dtype)
    [out] = run(program, [waiting], x=value, gradient=np.full([2, 3], np.nan, "float32"))
    assert out.tobytes() == value.tobytes()


@needs_pir
def test_the_depend_operator_fails_on_the_cpu(program: paddle.static.Program) -> None:
    """Paddle's own way to let one operator wait for another; if this passes, use it in `after`."""
    if not hasattr(paddle._C_ops, "depend"):
        pytest.skip("this Paddle has no depend operator for Programs")
    waiting = paddle._C_ops.depend(fed(), [fed("y")])
    ones = np.ones([2, 3], "float32")
    with pytest.raises(Exception, match=r"should be the same"):
        run(program, [paddle.tanh(waiting)], x=ones, y=ones)


@needs_pir
@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
def test_dropout_grad_is_dropout_with_a_mask(program: paddle.static.Program, mode: str) -> None:
    y = paddle.nn.functional.dropout(fed(), 0.3, mode=mode)
    again = pir.dropout_again(y.get_defining_op(), {})
    x = np.random.RandomState(0).randn(2, 3).astype("float32")
    first, second = run(program, [y, again], x=x)
    np.testing.assert_array_equal(first, second)


@needs_pir
def test_persistable_values_and_writing_in_place(program: paddle.static.Program) -> None:
    """``create_persistable_value``, ``_C_ops.add_``, ``increment_`` and ``full_``."""
    startup = paddle.static.default_startup_program()
    total = pir.persistable("total", fed(), startup, program)
    counter = pir.persistable("counter", None, startup, program)
    pir.add_in_place(total, fed("y"))
    pir.count_up_in_place(counter)
    ones = np.ones([2, 3], "float32")
    with paddle.static.scope_guard(paddle.static.Scope()):
        paddle.static.Executor().run(startup)
        for step in (1, 2):
            sums, count = run(program, [total, counter], x=ones, y=ones)
            assert (sums == step).all() and count == step
        pir.fill_in_place(total, 0.0)
        assert (run(program, [total], x=ones, y=ones)[0] == 0).all()


# -------------------------------------------------------------------------------------- training


@needs_pir
def test_halves_of_minimize(program: paddle.static.Program) -> None:
    """``minimize`` is made of ``backward``, with ``_parameter_list``, and ``_apply_optimize``."""
    source = inspect.getsource(paddle.optimizer.Optimizer.minimize)
    assert "self._parameter_list" in source
    assert "self.backward(" in source and "self._apply_optimize(" in source
    optimizer = paddle.optimizer.SGD(0.1)
    loss = paddle.nn.Linear(3, 3)(fed()).mean()
    startup = paddle.static.default_startup_program()
    pairs = pir.append_backward(optimizer, loss, startup)
    assert len(pairs) == 2
    pir.append_update(optimizer, loss, startup, pairs)
    assert names(program).count("sgd_") == 2


@needs_pir
def test_create_global_learning_rate_is_done_once(program: paddle.static.Program) -> None:
    optimizer = paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.5, 1))
    loss = paddle.nn.Linear(3, 3)(fed()).mean()
    pir.append_backward(optimizer, loss, paddle.static.default_startup_program())
    pir.create_learning_rate(optimizer)
    before = len(program.global_block().ops)
    pir.create_learning_rate(optimizer)
    assert len(program.global_block().ops) == before and program.lr_scheduler() == 0.5


@needs_pir
def test_set_parameter_operators_set_parameters(program: paddle.static.Program) -> None:
    layer = paddle.nn.Linear(3, 3)
    startup = paddle.static.default_startup_program()
    found = pir_exchange.initial_values(startup, program)
    assert [pir.attribute(one, "parameter_name") for one, _ in found] == [
        layer.weight.name,
        layer.bias.name,
    ]
    with pir.editing(startup):
        for operation, value in found:
            pir_exchange.set_instead(operation, paddle.full(list(value.shape), 4.0))
    scope = paddle.static.Scope()
    paddle.static.Executor().run(startup, scope=scope)
    for parameter in (layer.weight, layer.bias):
        assert (np.array(scope.find_var(parameter.name).get_tensor()) == 4.0).all()


@needs_pir
def test_collectives_and_their_context() -> None:
    """Their results are held by ``test_pir_ranks.py``, on two ranks."""
    from paddle.distributed import collective

    source = inspect.getsource(collective._init_parallel_env)
    assert "create_or_get_global_tcp_store" in source
    assert "core.CommContextManager.create_gloo_comm_context(" in source
    assert hasattr(core.CommContextManager, "create_gloo_comm_context")
    assert callable(paddle._C_ops.all_reduce) and callable(paddle._C_ops.broadcast)


@needs_pir
def test_calc_gradient_helper_is_looked_up_at_each_call(
    program: paddle.static.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paddle.autograd import ir_backward

    original, calls = ir_backward.calc_gradient_helper, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(ir_backward, "calc_gradient_helper", counted)
    x = fed()
    loss = paddle.nn.Linear(3, 3)(x).mean()
    paddle.static.append_backward(loss)
    paddle.static.gradients(loss, x)
    assert len(calls) == 2


def test_what_frees_a_train_step() -> None:
    """``Scope._remove_from_pool``, and the caches of ``Executor._executor_cache``."""
    from paddle_recompute._paddle.static import training

    executor, scope = paddle.static.Executor(), paddle.static.Scope()
    cached = executor._executor_cache
    names = [name for name in vars(cached) if name.startswith("_get_cached_program_and_executor")]
    assert len(names) == 2  # one of them for PIR
    assert all(hasattr(getattr(cached, name), "cache_clear") for name in names)
    training._free(executor, scope)


@needs_pir
def test_hooks_of_to_static() -> None:
    """``partial_program_from``, ``PartialProgramLayerHook`` and ``add_hooker``."""
    from paddle.jit.dy2static import pir_partial_program

    hook = pir_partial_program.PartialProgramLayerHook
    arguments = list(inspect.signature(hook.after_append_backward).parameters)[1:]
    assert arguments == [
        "whole_program",
        "inputs",
        "src_vars",
        "grad_outputs",
        "forward_end_idx",
        "backward_start_idx",
    ]
    assert list(inspect.signature(hook.before_append_backward).parameters)[1:] == [
        "forward_program",
        "src_vars",
    ]
    assert callable(pir_partial_program.partial_program_from)
    assert callable(pir_partial_program.PartialProgramLayer.add_hooker)


@needs_pir
def test_scope_local_var_names() -> None:
    """`pir.variables_after`: what a start-up Program has made."""
    with static_mode():
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            paddle.nn.Linear(2, 2)
        scope = paddle.static.Scope()
        with paddle.static.scope_guard(scope):
            paddle.static.Executor().run(startup)
        assert len(pir.variables_after(startup, scope)) == 2


def test_register_buffer_refuses_variables_and_fills_buffers(
    program: paddle.static.Program,
) -> None:
    """`static.buffers` replaces it while it does, and then writes ``Layer._buffers``."""
    layer = paddle.nn.Layer()
    with pytest.raises(TypeError):
        layer.register_buffer("count", paddle.arange(8))
    layer.register_buffer("none", None)
    assert layer._buffers == {"none": None}
