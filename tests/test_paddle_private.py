"""One test for each private name of Paddle that `_paddle` uses: a release that moves it is noticed.

Each says what the name is relied on for, not only that it is there.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import math
import os
import re
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core, framework
from paddle.jit.sot.opcode_translator.custom_code import CustomCode

from paddle_recompute._paddle import (
    amp,
    backward,
    distributed,
    flat,
    fleet_recompute,
    gradients,
    guarded,
    layers,
    memory,
    random_streams,
    saved_tensors,
    translation,
    travelling,
    updates,
    writes,
)
from paddle_recompute.errors import DependencyError
from tests.processes import python
from tests.ranks import run_ranks

IS_26 = paddle.__version__.startswith("2.6")


def needs_grad(*shape: int) -> paddle.Tensor:
    tensor = paddle.ones(list(shape))
    tensor.stop_gradient = False
    return tensor


# -------------------------------------------------------------------------------------- tensors


def test_tensor_grad_ivar_is_the_gradient() -> None:
    """What ``Tensor.grad`` reads; it does not copy."""
    x = needs_grad(2)
    assert x._grad_ivar() is None
    (x * 3).sum().backward()
    assert x._grad_ivar().tolist() == [3, 3]
    assert x._grad_ivar().data_ptr() == x.grad.data_ptr()


def test_supports_bfloat16_asks_the_cpu_for_avx_512() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert core.supports_bfloat16() == bool(re.search(r"\bavx512bw\b", flags))


def test_shares_memory_has_an_identity_of_its_own() -> None:
    """By ``_new_shared_tensor``; on 2.6 by ``_share_buffer_to`` and ``_share_data_with``."""
    x = needs_grad(3) * 2
    shared = saved_tensors.shares_memory(x)
    assert shared is not x and shared.data_ptr() == x.data_ptr()
    assert shared.stop_gradient == x.stop_gradient  # PyLayers see it: ctx.saved_tensor()
    assert shared.is_leaf
    with paddle.no_grad():
        shared.add_(paddle.ones([3]))
    assert x.tolist() == [3, 3, 3]


VIEWS = {
    "transposed": lambda x: x.transpose([1, 0, 2]),
    "tail": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "real part": lambda x: paddle.real(paddle.complex(x, -x)),
    "imaginary part": lambda x: paddle.imag(paddle.complex(x, -x)),
    "diagonal": lambda x: paddle.diagonal(x, axis1=1, axis2=2),
    "transposed booleans": lambda x: (x > 9).transpose([1, 0, 2]),
    "one number": lambda x: x[1, 2, 3],
    "nothing": lambda x: x[:, 3:],
}


@pytest.mark.parametrize("view", list(VIEWS))
def test_shares_memory_takes_strides_and_offset_along(view: str) -> None:
    x = VIEWS[view](paddle.arange(24, dtype="float32").reshape([2, 3, 4]))
    shared = saved_tensors.shares_memory(x)
    assert (shared.shape, shared.strides, shared.dtype) == (x.shape, x.strides, x.dtype)
    assert shared.data_ptr() == x.data_ptr()
    assert shared.numpy().tobytes() == x.numpy().tobytes()


def test_shares_memory_of_a_tensor_that_has_none() -> None:
    """On 2.6 by the constructor with a ``core.VarDesc.VarType``."""
    empty = paddle.zeros([0, 3])
    shared = saved_tensors.shares_memory(empty)
    assert shared is not empty and not shared._is_initialized() and shared.shape == [0, 3]


def test_memory_for_the_engine_is_that_of_the_tensor() -> None:
    x, empty = paddle.ones([2, 3]), paddle.zeros([0, 3])
    memory = saved_tensors.memory_for_engine(x)
    assert memory is not x and memory.data_ptr() == x.data_ptr()
    assert not saved_tensors.memory_for_engine(empty)._is_initialized()


@pytest.mark.parametrize("views", [["tail", "one number"], ["tail", "transposed"]])
def test_many_looks_are_those_of_each(views: list[str]) -> None:
    x = paddle.arange(24, dtype="float32").reshape([2, 3, 4])
    tensors = [VIEWS[view](x) for view in views]
    assert [*zip(*saved_tensors.looks_of(tensors), strict=True)] == [
        *map(saved_tensors.look_of, tensors)
    ]


def test_the_engine_of_26_takes_the_memory_of_what_is_unpacked() -> None:
    given = []

    def unpack(tensor: paddle.Tensor) -> paddle.Tensor:
        given.append(tensor)
        return tensor

    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        y = needs_grad(3).exp()
    y.sum().backward()
    assert [one._is_initialized() for one in given] == [not saved_tensors.ENGINE_TAKES_MEMORY]
    assert saved_tensors.ENGINE_TAKES_MEMORY == IS_26


def test_a_dtype_is_one_object_from_3_on() -> None:
    x, y = paddle.ones([1]), paddle.ones([2])
    assert (x.dtype is y.dtype) == (not IS_26)
    assert (
        saved_tensors.look_of(x)[0] is saved_tensors.look_of(y)[0]
        and saved_tensors.look_of(x)[0] == paddle.float32
    )


def test_tensor_is_initialized() -> None:
    assert paddle.ones([1])._is_initialized()
    uninitialized = [b for b in paddle.nn.LSTM(2, 2, dropout=0.5).buffers()]
    assert uninitialized and not any(buffer._is_initialized() for buffer in uninitialized)


def test_framework_eager_param_base() -> None:
    layer = paddle.nn.Linear(2, 2)
    assert isinstance(layer.weight, framework.EagerParamBase)
    assert isinstance(paddle.create_parameter([2], "float32"), framework.EagerParamBase)
    assert not isinstance(layer.weight * 1, framework.EagerParamBase)


@pytest.mark.parametrize("grouped", [False, True])
def test_optimizer_parameter_list(grouped: bool) -> None:
    layer = paddle.nn.Linear(2, 2)
    given = [{"params": [p]} for p in layer.parameters()] if grouped else layer.parameters()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=given)
    assert hasattr(optimizer, "_parameter_list")
    found = layers.parameters_of_optimizer(optimizer)
    assert [id(p) for p in found] == [id(p) for p in layer.parameters()]
    assert layers.parameters_of_optimizer(object()) == []


def test_tensor_inplace_version() -> None:
    """Public, but relied on: what raises it and what does not (`_layer_state` says so)."""
    x = paddle.ones([3])
    x.add_(paddle.ones([3]))
    x[0] = 5.0
    raised = x.inplace_version
    x.set_value(paddle.zeros([3]))
    assert raised >= 2 and x.inplace_version == raised
    assert x.detach().inplace_version == raised


def written_by(write: Any) -> list[int]:
    """The ids of the tensors that `watch_writes` is told about while `write` runs."""
    told: list[int] = []

    def written(tensor: paddle.Tensor) -> None:
        told.append(id(tensor))

    writes.watch_writes(written)
    write()
    return told


@pytest.mark.parametrize("how", ["set_value", "copy_", "assign_value_", "exponential_"])
def test_writes_that_raise_no_version(how: str) -> None:
    """One that raises it is counted twice from then on, and can leave the list."""
    x = paddle.zeros([3])
    writes = {
        "set_value": lambda: x.set_value(paddle.ones([3])),
        "copy_": lambda: x.copy_(paddle.ones([3]), True),
        "assign_value_": lambda: paddle.assign(np.ones(3, "float32"), x),
        "exponential_": lambda: x.exponential_(),
    }
    version = x.inplace_version
    assert written_by(writes[how]) == [id(x)]
    assert x.inplace_version == version and float(x.sum()) > 0


def test_batch_norm_writes_statistics_and_raises_no_version() -> None:
    x, mean, variance = paddle.randn([4, 3]), paddle.zeros([3]), paddle.ones([3])
    versions = mean.inplace_version, variance.inplace_version

    def normalize(training: bool) -> None:
        paddle.nn.functional.batch_norm(x, mean, variance, training=training)

    assert written_by(lambda: normalize(True)) == [id(mean), id(variance)]
    assert (mean.inplace_version, variance.inplace_version) == versions
    assert float(mean.abs().sum()) > 0
    assert written_by(lambda: normalize(False)) == []


@pytest.mark.parametrize(
    ("use_global_stats", "in_training", "in_evaluation"),
    [(None, False, True), (False, False, False), (True, True, True)],
)
def test_batch_norm_use_global_stats(
    use_global_stats: bool | None, in_training: bool, in_evaluation: bool
) -> None:
    """``_use_global_stats`` and the mode decide whether the kernel reads the statistics.

    With False, evaluation reads those of the batch too; it is treated as if it did not.
    """
    norm = paddle.nn.BatchNorm1D(3, use_global_stats=use_global_stats)
    x = paddle.randn([4, 3])
    assert norm._use_global_stats is use_global_stats
    for mode, reads in ((norm.train, in_training), (norm.eval, in_evaluation)):
        mode()
        assert layers.kernel_reads_statistics(norm) is (reads or not norm.training)
        norm._mean.set_value(paddle.zeros([3]))
        before = norm(x)
        norm._mean.set_value(paddle.full([3], 5.0))
        assert (before.numpy() != norm(x).numpy()).any() == reads


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW"])
def test_optimizer_create_param_lr(kind: str) -> None:
    """At rate 0, with a gradient of 0, these optimizers leave a parameter as it is, bit by bit."""
    layer = paddle.nn.Linear(3, 3)
    optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=layer.parameters())
    assert updates.keeps_parameters_at_rate_0(optimizer)

    def step(rate: float, gradient: float) -> Any:
        for parameter in layer.parameters():
            parameter.grad = paddle.full_like(parameter, gradient)
        with updates.learning_rate_times(optimizer, paddle.to_tensor(rate)):
            optimizer.step()
        return [parameter.numpy().tobytes() for parameter in layer.parameters()]

    moved, stood = step(1.0, 0.5), step(0.0, 0.0)
    assert moved == stood
    assert step(1.0, 0.0) != stood or kind == "SGD"
    assert "_create_param_lr" not in vars(optimizer)
    assert not updates.keeps_parameters_at_rate_0(
        paddle.optimizer.RMSProp(0.1, parameters=[layer.bias])
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_update_loss_scaling(dtype: str) -> None:
    """Zeros into all tensors where a condition of one element is true; else nothing."""
    tensors = [paddle.to_tensor([1.0, math.nan, -2.0]).astype(dtype) for _ in range(2)]
    before = [tensor.astype("float32").numpy().tobytes() for tensor in tensors]
    updates.zero_if(paddle.to_tensor(False), flat.by_dtype(tensors))
    assert [tensor.astype("float32").numpy().tobytes() for tensor in tensors] == before
    updates.zero_if(paddle.to_tensor(True), flat.by_dtype(tensors))
    assert all(not tensor.astype("float32").numpy().any() for tensor in tensors)


def test_optimizer_create_optimization_pass() -> None:
    """Every optimizer of Paddle comes through it, parameter groups too, and raises no version."""
    layers = [paddle.nn.Linear(2, 2) for _ in range(3)]
    groups = [{"params": layer.parameters()} for layer in layers]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=groups)
    layers[0](paddle.ones([1, 2])).sum().backward()
    layers[2](paddle.ones([1, 2])).sum().backward()
    parameters = {id(p) for layer in layers for p in layer.parameters()}
    told = [one for one in written_by(optimizer.step) if one in parameters]  # moments are made, too
    assert told == [id(p) for layer in (layers[0], layers[2]) for p in layer.parameters()]
    assert all(p.inplace_version == 0 for layer in layers for p in layer.parameters())
    for name, kind in vars(paddle.optimizer).items():
        if isinstance(kind, type) and issubclass(kind, paddle.optimizer.Optimizer):
            own = kind._create_optimization_pass
            assert own is paddle.optimizer.Optimizer._create_optimization_pass, name


def test_address_of() -> None:
    x = paddle.ones([3])
    assert writes.address_of(x) == writes.address_of(x.detach()) == x.data_ptr()
    for placeholder in paddle.nn.LSTM(2, 2, dropout=0.5).buffers():
        assert writes.address_of(placeholder) is None
    sparse = paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])
    assert writes.address_of(sparse) is None


# --------------------------------------------------------------------------------------- layers


def test_layer_dicts_and_hooks() -> None:
    """They are where a Layer looks things up, and a `_parameters` of another class will do."""
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2))
    (linear,) = model
    assert layers.own_sublayers(model) == {"0": linear}
    assert list(layers.own_parameters(linear)) == ["weight", "bias"]
    layers.set_own_parameters(linear, {"weight": "another"})
    assert linear.weight == "another"
    before, behind = layers.forward_pre_hooks(model), layers.forward_post_hooks(model)
    assert before is model._forward_pre_hooks and behind is model._forward_post_hooks
    model.register_forward_pre_hook(print)
    model.register_forward_post_hook(repr)
    assert list(before.values()) == [print] and list(behind.values()) == [repr]


def test_attributes_of_every_layer() -> None:
    name = paddle.nn.Layer().full_name()
    known = layers.attributes_of_every_layer()
    layers.attributes_of_every_layer.cache_clear()
    assert {"training", "_parameters", "_buffers", "_sub_layers"} <= known
    assert "in_features" not in known and known <= vars(paddle.nn.Linear(2, 2)).keys()
    assert layers.attributes_of_every_layer() == known
    following = paddle.nn.Layer().full_name()
    assert int(following.rpartition("_")[2]) == int(name.rpartition("_")[2]) + 1


def test_layer_buffers_and_parameters() -> None:
    norm = paddle.nn.BatchNorm1D(3)
    norm.register_buffer("extra", paddle.zeros([1]))
    assert "extra" in norm._buffers
    assert {"_mean", "_variance", "weight", "bias"} <= {*norm._buffers, *norm._parameters}
    slots = {name for _, names in layers.non_trained_state(norm) for name in names}
    assert {"extra", "_mean", "_variance"} <= slots and "weight" not in slots
    for kind in layers.BATCH_NORMS:
        other = kind(3)
        assert {"_mean", "_variance"} <= {*other._parameters, *other._buffers}, kind
        assert other._mean.stop_gradient and other._variance.stop_gradient, kind


def test_layers_below_are_those_of_sublayers() -> None:
    model = paddle.nn.Sequential(paddle.nn.Sequential(*map(paddle.nn.Linear, [2, 2], [2, 2])))
    model.add_sublayer("again", model[0][1])
    model.add_sublayer("none", None)
    below = model.sublayers(include_self=True)
    assert sorted(map(id, layers.layers_below(model))) == sorted(map(id, below))


def test_layer_sub_layers() -> None:
    model = paddle.nn.Layer()
    model.first = model.second = paddle.nn.Linear(2, 2)
    assert list(model._sub_layers) == ["first", "second"]
    assert [name for name, _ in model.named_children()] == ["first"]


# ---------------------------------------------------------------------------- random generators


def test_core_default_cpu_generator() -> None:
    state = core.default_cpu_generator().get_state()
    first = paddle.rand([3]).tolist()
    core.default_cpu_generator().set_state(state)
    assert paddle.rand([3]).tolist() == first
    paddle.rand([3])
    assert paddle.rand([3]).tolist() != first
    generator = core.Generator()
    generator.set_state(state)
    core.default_cpu_generator().set_state(state)
    random_streams.generator_states()  # a look leaves the stream alone
    assert generator.random() == core.default_cpu_generator().random()
    mark, now = random_streams.mark_of, core.default_cpu_generator().get_state()
    assert mark(state) == mark(state) != mark(now)


def test_fleet_get_rng_state_tracker() -> None:
    tracker = random_streams.hybrid_parallel_tracker()
    tracker.reset()
    tracker.add("name", 5)
    states = tracker.get_states_tracker()
    with tracker.rng_state("name"):
        first = paddle.rand([3]).tolist()
    with tracker.rng_state("name"):
        assert paddle.rand([3]).tolist() != first
    tracker.set_states_tracker(states)
    with tracker.rng_state("name"):
        assert paddle.rand([3]).tolist() == first
    tracker.reset()


# ------------------------------------------------------------------------------------ AMP state


def test_tracer_attributes() -> None:
    assert core.AmpLevel.O0 != core.AmpLevel.O1
    tracer = framework._dygraph_tracer()
    for name in ("_amp_level", "_amp_dtype", "_use_promote", "_has_grad"):
        now = getattr(tracer, name)
        setattr(tracer, name, now)
        assert getattr(tracer, name) == now
    before = tracer._get_amp_op_list()
    tracer._set_amp_op_list({"matmul"}, {"exp"})
    assert [set(ops) for ops in tracer._get_amp_op_list()] == [{"matmul"}, {"exp"}]
    tracer._set_amp_op_list(*before)
    with paddle.no_grad():
        assert not tracer._has_grad
        tracer._has_grad = True
        assert paddle.is_grad_enabled()
    assert tracer._has_grad


def test_auto_cast_works_on_the_attributes_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto_cast` itself is off on a CPU, so its source is read: it must set these and no other."""
    source = inspect.getsource(sys.modules["paddle.amp.auto_cast"].amp_guard)
    assigned = set(re.findall(r"tracer\.(_\w+) = ", source))
    assert {"_amp_level", "_amp_dtype"} <= assigned
    assert assigned <= {"_amp_level", "_amp_dtype", "_use_promote"}
    assert "_set_amp_op_list(" in source


# ----------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize(
    ("partial", "call"),
    [
        (False, lambda y, x, retain: y.backward(retain_graph=retain)),
        (False, lambda y, x, retain: paddle.autograd.backward([y], retain_graph=retain)),
        (True, lambda y, x, retain: paddle.grad(y, [x], retain_graph=retain)),
    ],
    ids=["Tensor.backward", "autograd.backward", "paddle.grad"],
)
def test_what_the_engine_was_asked_for_stands_where_it_is_read(
    partial: bool, call: Any, retain: bool
) -> None:
    """Each looks up ``core.eager.run_backward`` or ``run_partial_grad`` when it is called."""
    backward.watch_backward()
    x, seen = needs_grad(3), []
    y = (x * 2).sum()
    y.register_hook(lambda gradient: seen.append(backward.current_backward()))
    call(y, x, retain)
    assert [(one.retain_graph, one.partial) for one in seen] == [(retain, partial)]
    assert backward.current_backward() is None


def test_an_exception_of_an_unpack_hook_becomes_an_os_error() -> None:
    """The reason for `watch_backward`; when it arrives as itself, the wrapping can go."""

    def fails(packed: Any) -> Any:
        raise KeyError("lost")

    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, fails):
        y = needs_grad(3).exp()
    with pytest.raises(OSError, match="lost"):
        y.sum().backward()
    framework._dygraph_tracer()._has_grad = True  # the engine forgets it: see `_watched`


def test_saved_tensors_hooks_allow_one_pair() -> None:
    """The reason for `_hooks`: with nesting allowed, its dispatcher could go."""
    hooks = paddle.autograd.saved_tensors_hooks
    with hooks(lambda t: t, lambda t: t), pytest.raises(ValueError, match="one pair"):
        hooks(lambda t: t, lambda t: t).__enter__()


def test_what_a_pack_hook_returns_is_held_once_or_forgotten() -> None:
    """Paddle 2.6 keeps a reference too many for ever; `_paddle` gives it back."""

    class Packed:
        pass

    gc.disable()
    references = []

    def pack(tensor: paddle.Tensor) -> Packed:
        packed = Packed()
        references.append(weakref.ref(packed))
        return packed

    with paddle.autograd.saved_tensors_hooks(pack, lambda packed: None):
        y = needs_grad(3).exp()
    del y
    left = [reference() is not None for reference in references]
    gc.enable()
    assert left == [IS_26] * len(references) and references


def test_a_hook_on_what_is_frozen_fires_once_it_is_trained() -> None:
    layer, seen = paddle.nn.Linear(2, 2), []
    layer.weight.stop_gradient = True
    with pytest.raises(ValueError, match="Cannot register backward hook"):
        layer.weight._register_backward_hook(lambda: None)
    gradients.on_gradient_added(layer.weight, lambda: seen.append(layer.weight.grad.sum().item()))
    assert layer.weight.stop_gradient
    layer(paddle.ones([1, 2])).sum().backward()
    assert seen == [] and layer.weight.grad is None
    layer.weight.stop_gradient = False
    layer(paddle.ones([1, 2])).sum().backward()
    assert seen == [4]


def test_flat_tensors_share_memory_with_tensors_of_another_shape() -> None:
    """``_share_buffer_to``, ``_C_ops.reshape``, ``_C_ops.concat`` and ``_C_ops.split``."""
    one, other = paddle.randn([2, 3]), paddle.randn([4])
    wanted = np.concatenate([one.numpy().ravel(), other.numpy()])
    shells: list[paddle.Tensor] = []
    for _ in range(2):
        whole = flat.joined([one, other], shells)
        assert np.array_equal(whole.numpy(), wanted)
        assert len(shells) == 2 and not one._is_shared_buffer_with(shells[0])
    pieces = flat.parted(whole, (6, 4))
    assert [tensor.numpy().tolist() for tensor in pieces] == [*map(list, np.split(wanted, [6]))]
    flat.replace_memory([one, other], pieces)
    assert one.data_ptr() == pieces[0].data_ptr() and one.shape == [2, 3]
    turned = paddle.randn([2, 3]).transpose([1, 0])
    assert np.array_equal(flat.joined([turned, other], shells)[:6].numpy(), turned.numpy().ravel())


@pytest.mark.parametrize("dtypes", ["", "aa", "aba", "bba"])
def test_tensors_by_their_dtypes(dtypes: str) -> None:
    kinds = {"a": "float32", "b": "float64"}
    tensors = [paddle.zeros([1], kinds[one]) for one in dtypes]
    found = {str(dtype): [*map(id, alike)] for dtype, alike in flat.by_dtype(tensors).items()}
    assert found == {
        f"paddle.{kind}": [id(t) for t, one in zip(tensors, dtypes, strict=True) if one == letter]
        for letter, kind in kinds.items()
        if letter in dtypes
    }


def test_a_hook_that_has_ended_calls_nothing() -> None:
    """``_register_backward_hook`` calls, after the addition, what has a partial that can be
    changed.
    """
    layer, seen = paddle.nn.Linear(2, 2), []
    call = functools.partial(lambda _: seen.append(layer.weight.grad.sum().item()))
    gradients.on_gradient_added(layer.weight, types.MethodType(call, 1))
    for _ in range(3):
        layer(paddle.ones([1, 2])).sum().backward()
        if len(seen) == 2:
            gradients.end_call(call)
    assert seen == [4, 8]


def test_unscaling_raises_the_version_when_it_is_made_visible() -> None:
    """``_legacy_C_ops.check_finite_and_unscale`` and ``_bump_inplace_version``."""
    gradients.make_unscaling_visible()
    layer = paddle.nn.Linear(2, 2)
    layer(paddle.ones([1, 2])).sum().backward()
    gradient, before = layer.weight.grad, layer.weight.grad.inplace_version
    address = gradient.data_ptr()
    scale, found = paddle.to_tensor([2.0]), paddle.to_tensor([False])
    paddle._legacy_C_ops.check_finite_and_unscale([gradient], scale, [gradient], found)
    assert gradient.inplace_version > before
    assert (gradient.data_ptr(), gradient.sum().item()) == (address, 2.0)


def test_additions_are_told_in_the_order_of_registration_and_the_end_once_per_backward() -> None:
    backward.watch_backward()
    layer, seen = paddle.nn.Linear(2, 2), []
    for told in ("first", "second"):
        gradients.on_gradient_added(layer.weight, functools.partial(seen.append, told))
    stop = backward.after_each_backward(lambda: seen.append(layer.weight.grad.sum().item()))
    recompute = paddle.distributed.fleet.utils.recompute
    x = needs_grad(1, 2)
    (recompute(layer, x, use_reentrant=True) + recompute(layer, x, use_reentrant=True)).backward(
        paddle.ones([1, 2])
    )
    stop()
    assert seen == ["first", "second"] * 2 + [8.0]


def test_fleets_mixed_precision_layer_keeps_main_grad() -> None:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    layer = paddle.nn.Linear(2, 2)
    assert not gradients.keeps_main_grad(layer.weight)
    MixPrecisionLayer(layer, dtype="bfloat16")(paddle.ones([1, 2])).sum().backward()
    assert gradients.keeps_main_grad(layer.weight) and layer.weight.main_grad is not None


def on_two_ranks() -> dict[str, Any]:
    from paddle_recompute.distributed import scope_of
    from paddle_recompute.distributed.groups import make_gloo_group

    rank = paddle.distributed.get_rank()
    number = paddle.ones([1]) * (rank + 1)
    group = make_gloo_group(scope_of(None), "test")
    paddle.distributed.all_reduce(number, group=group)
    if rank == 0:
        distributed.store_publish("tests/key", "17 é")
    return {
        "sum": number.tolist(),
        "reduced": [
            distributed.all_reduce_numbers(group, [rank, 2.0**53 - 2], how)
            for how in ("sum", "min", "max")
        ],
        "told": distributed.store_await("tests/key", 60.0),
        "number": distributed.make_device_group((0, 1), 2**20 + 7).id,
        "counted": paddle.distributed.new_group([0, 1]).id,
    }


def test_groups_and_the_store_of_two_ranks() -> None:
    """``core.ProcessGroupGloo.create`` over a ``core.TCPStore``, in `_paddle.make_gloo_group`;
    ``core.create_or_get_global_tcp_store`` hands a value to the other ranks;
    ``collective._set_custom_gid``, in `_paddle.make_device_group`, and Paddle counts on;
    ``core.ReduceOp`` and, without an operator, a ``core.eager.Tensor`` in `all_reduce_numbers`,
    at ``_current_expected_place`` or on the CPU (``core.CPUPlace``).
    """
    assert {"add", "get", "set", "wait"} <= set(dir(core.TCPStore))
    one, other = run_ranks(on_two_ranks, 2)
    assert one == other
    assert (one["sum"], one["told"], one["number"]) == ([3.0], "17 é", 2**20 + 7)
    assert one["counted"] < 2**20
    large = 2.0**53 - 2
    assert one["reduced"] == [[1.0, 2 * large], [0.0, large], [1.0, large]]


# ----------------------------------------------------------------------- fleet, store and memory


def flags_and_bytes() -> tuple[list[tuple[Any, ...]], list[tuple[int, int]]]:
    """The flags that Paddle has modified, and what its counters say before and after 4 MiB."""
    from paddle.distributed import parallel

    os.environ.pop("FLAGS_enable_pir_in_executor", None)
    reads = [core.host_memory_stat_current_value, core.host_memory_stat_peak_value]
    before = [read("Allocated", 0) for read in reads]
    kept = paddle.ones([1 << 20])
    after = [read("Allocated", 0) for read in reads]
    assert kept.shape == [1 << 20]
    flags = [tuple(flag) for flag in parallel._get_modified_flags()]
    return flags, list(zip(before, after, strict=True))


def test_flags_and_bytes_of_a_new_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``init_parallel_env`` writes the list by ``_print_modified_flags``, from
    ``_get_modified_flags``. Fleet's static graph sets more of them (2.6), for good; and 2.6 counts
    bytes by threads, which other tests have.
    """
    from paddle.distributed import parallel

    make = collections.namedtuple("FLAGS", "name value default")
    [(flags, [(before, after), (_, peak)])] = run_ranks(flags_and_bytes, 1)
    assert after - before == 4 << 20 <= peak
    listed = [make(*flag) for flag in flags]
    assert {flag.name for flag in listed} <= distributed.FLAGS_SET_BY_PADDLE
    parallel._print_modified_flags(listed)
    assert distributed.without_own_flags("before\n" + capsys.readouterr().err) == "before\n"
    by_launch = make("FLAGS_use_stride_kernel", False, True)
    parallel._print_modified_flags([*listed, by_launch, make("FLAGS_mine", 1, 0)])
    shown = distributed.without_own_flags(capsys.readouterr().err)
    assert shown.count("FLAGS(") == 1 and "FLAGS_mine" in shown and shown.count("===\n") == 2


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"PADDLE_MASTER": "node0:1234", "PADDLE_TRAINER_ENDPOINTS": "other:1"}, "node0"),
        ({"PADDLE_TRAINER_ENDPOINTS": "first:1,second:2"}, "first"),
        ({"MASTER_ADDR": "torch", "MASTER_PORT": "1", "PADDLE_MASTER": "node0:1234"}, "torch"),
    ],
)
def test_master_host_is_found_where_init_parallel_env_looks(
    variables: dict[str, str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS")
    source = inspect.getsource(paddle.distributed.init_parallel_env)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        assert name in source
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.master_host() == host


def test_core_memory_stat_reset_peak_value() -> None:
    assert hasattr(core, "device_memory_stat_current_value")
    assert hasattr(core, "device_memory_stat_peak_value")
    assert hasattr(core, "device_memory_stat_reset_peak_value") is not IS_26
    assert memory.can_reset_peak() is not IS_26
    if not IS_26:
        paddle.ones([1 << 20])
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        assert memory.peak_bytes() == memory.current_bytes()


def test_memory_of_a_device_that_is_not_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a GPU's peak cannot be reset on 2.6, which has no function for it."""
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    assert memory.can_reset_peak() is not IS_26
    assert memory.current_bytes() == 0  # of a GPU that is not there
    monkeypatch.setattr(paddle, "get_device", lambda: "other_device:0")
    assert memory.is_counted() is not IS_26
    if IS_26:
        assert not memory.can_reset_peak()
        with pytest.raises(DependencyError, match="does not count the memory of 'other_device:0'"):
            memory.peak_bytes()


def test_tensor_copy_into_memory_that_is_there() -> None:
    """``Tensor.copy_(source, blocking)`` keeps the memory (`device.Arriving`)."""
    x = paddle.zeros([3])
    address = x.data_ptr()
    x.copy_(paddle.ones([3]), False)
    assert x.tolist() == [1.0, 1.0, 1.0] and x.data_ptr() == address


def test_memory_of_a_parameter_is_released_and_taken() -> None:
    """``_clear_data`` and ``_share_buffer_to`` leave all else of a parameter as it is, also what
    an operator has saved (`_paddle.travelling`)."""
    weight = paddle.nn.Linear(2, 3).weight
    x = paddle.ones([1, 2])
    x.stop_gradient = False
    y, values = paddle.matmul(x, weight), paddle.to_tensor(weight.numpy())
    travelling.release_memory(weight)
    assert not travelling.has_memory(weight)
    assert list(weight.shape) == [2, 3] and not weight.stop_gradient
    travelling.take_memory(weight, values)
    y.sum().backward()
    assert weight.inplace_version == 0 and x.grad.tolist() == [values.numpy().sum(1).tolist()]


def test_the_memory_of_a_parameter_is_left_to_its_graph() -> None:
    """``_share_underline_tensor_to`` gives a parameter another C++ tensor; the graph keeps the old
    one, and its backward still reaches the parameter (`travelling.leave_memory`)."""
    weight = paddle.nn.Linear(2, 2, bias_attr=False).weight
    expected = 2 * weight.numpy()
    loss = (weight * weight).sum()
    travelling.leave_memory(weight)
    assert not travelling.has_memory(weight) and list(weight.shape) == [2, 2]
    loss.backward()
    assert np.array_equal(guarded.gradient_of(weight).numpy(), expected)
    travelling.take_memory(weight, paddle.ones([2, 2]))
    assert weight.tolist() == [[1.0, 1.0]] * 2


def test_every_operator_of_paddle_asks_for_a_guarded_parameter() -> None:
    """``parameter.__class__`` can be set; ``_C_ops``, ``_legacy_C_ops`` and the methods of
    ``EagerParamBase`` are all there is to wrap (`_paddle.guarded`). In a process of its own."""
    code = """
import types
import paddle
from paddle_recompute._paddle import guarded

def refuse(name, function, args, kwargs):
    raise LookupError(name)

guarded.guard_methods_and_operators(refuse, (property(lambda p: None), lambda p, zero=True: None))
weight = paddle.nn.Linear(2, 2).weight
guarded.guard(weight)
assert isinstance(weight, paddle.base.framework.EagerParamBase) and weight.shape == [2, 2]
x = paddle.ones([2, 2])
calls = [
    lambda: paddle.sum(weight), lambda: weight.sum(), lambda: x + weight, lambda: x @ weight,
    lambda: paddle.concat([x, weight]), lambda: x.copy_(weight, True), lambda: weight.detach(),
    lambda: x.__setitem__(0, weight), lambda: paddle.abs(weight), lambda: weight.T,
    lambda: paddle.add_n([x, weight]), lambda: paddle.to_tensor(weight), lambda: weight[0],
    lambda: x.set_value(weight), lambda: paddle.add(x, y=weight), lambda: weight.zero_(),
]
for number, call in enumerate(calls):
    try:
        call()
    except LookupError:
        continue
    raise AssertionError(number)
for operators in (paddle._C_ops, paddle._legacy_C_ops):
    left = [n for n, f in vars(operators).items() if isinstance(f, types.BuiltinFunctionType)]
    assert not left, left
guarded.unguard(weight)
assert type(weight) is paddle.base.framework.EagerParamBase
assert weight.sum().shape in ([], [1])

# To wait for a parameter does not get at a guarded one beside it.
guarded.wait_before_use(guarded.unguard)
away, coming = (paddle.nn.Linear(2, 2).weight for _ in range(2))
guarded.guard(away)
for call in (lambda: coming + away, lambda: away + coming, lambda: paddle.add(coming, y=away),
             lambda: paddle.concat([coming, away]), lambda: coming.matmul(away),
             lambda: coming.__setitem__(0, away)):
    guarded.wait_for(coming)
    try:
        call()
    except LookupError:
        continue
    raise AssertionError("got at the memory of a guarded parameter")
"""
    python("-c", code, timeout=300)


def test_a_piece_of_flat_memory_is_no_copy() -> None:
    """``Tensor._slice`` and ``_set_dims`` do not ask ``FLAGS_use_stride_kernel``, as an index and
    ``reshape`` do (`travelling.piece_of`). Here it is on, in a process of its own it is off."""
    code = """
import paddle
from paddle_recompute._paddle.travelling import piece_of
memory = paddle.arange(12, dtype="float32")
piece, number = piece_of(memory, 4, [2, 3]), piece_of(memory, 11, [])
none = piece_of(memory, 2, [0])
assert (piece.tolist(), float(number), list(none.shape)) == ([[4, 5, 6], [7, 8, 9]], 11.0, [0])
assert piece.is_contiguous() and piece.data_ptr() == memory.data_ptr() + 16
piece.set_value(paddle.zeros([2, 3]))
assert memory.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 10, 11]
"""
    exec(code, {})
    python("-c", code, env={**os.environ, "FLAGS_use_stride_kernel": "0"})


def test_a_gradient_is_taken_with_its_memory() -> None:
    """``get_tensor()._share_data_with`` keeps what ``clear_gradient`` frees (`_paddle.travelling`),
    and a gradient of another dtype can be put where none is."""
    weight = paddle.nn.Linear(2, 3).weight
    (weight.t() * 2).sum().backward()
    taken = travelling.take_gradient(weight)
    assert weight.grad is None and taken is not None and taken.tolist() == [[2.0] * 3] * 2
    travelling.set_gradient(weight, taken.astype("float64"))
    assert weight.grad.dtype == paddle.float64


# -------------------------------------------------------------------------- translated bytecode


def test_core_set_eval_frame() -> None:
    """It returns the function that translated before, of this thread."""
    seen = []

    def translator(frame: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return CustomCode(None, False)  # run the frame as it is

    def called() -> None:
        pass

    assert translation.set_translator(translator) is None
    try:
        called()
        assert translation.set_translator(None) is translator
        called()
    finally:
        translation.set_translator(None)
    assert seen.count("called") == 1


def test_core_eval_frame_skip_file_prefix(tmp_path: Path) -> None:
    path = tmp_path / "skipped.py"
    path.write_text("def called():\n    pass\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    seen = []

    def translator(frame: Any) -> Any:
        seen.append(frame.f_code.co_filename)
        return CustomCode(None, False)

    translation.never_translate_files_below(str(tmp_path))
    translation.set_translator(translator)
    try:
        names["called"]()
    finally:
        translation.set_translator(None)
    assert str(path) not in seen


@pytest.mark.skipif(IS_26, reason="exists from Paddle 3.0 on")
def test_jit_marker_force_dynamic() -> None:
    """`never_translate` relies on it for functions and for Layer classes."""
    calls = []

    def untranslatable(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(bool(paddle.in_dynamic_mode()))
        return x * 2

    translation.never_translate(untranslatable)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        return untranslatable(x + 1) + 1

    static = paddle.jit.to_static(function, full_graph=False)
    assert static(paddle.ones([1])).tolist() == [5]
    assert static(paddle.ones([1])).tolist() == [5]
    assert calls == [True, True]  # a translated function would run once, to be traced


# ------------------------------------------------------------------------- names of operators


def test_core_get_all_op_names_and_C_ops() -> None:
    """`operator_names`: of the old representation, of dygraph and PIR, of Paddle's AMP lists."""
    names = amp.operator_names()
    assert {"matmul_v2", "elementwise_add"} <= {*core.get_all_op_names()} <= names
    assert hasattr(paddle._C_ops, "add")
    assert {"matmul", "softmax", "gelu", "layer_norm", "add", "linear"} <= names
    assert "fused_gemm_epilogue" in names
    assert not {"matmull", "", "None"} & names


def test_places_by_kind_and_number() -> None:
    """``core.CUDAPlace``, ``core.XPUPlace`` and ``core.CustomPlace``, which streams take."""
    assert core.CUDAPlace is paddle.CUDAPlace and core.XPUPlace is paddle.XPUPlace
    assert isinstance(core.CustomPlace, type)  # to make one needs the device: tests/fake_device
    place = framework._current_expected_place_()
    assert isinstance(place, paddle.CPUPlace) == (paddle.get_device() == "cpu")


def test_where_fleets_recompute_lives() -> None:
    """The package attribute is the function; the module of the same name has it, too."""
    from paddle.distributed import fleet

    inner = sys.modules["paddle.distributed.fleet.recompute.recompute"]
    assert fleet.recompute.recompute is inner.recompute is fleet_recompute.fleet_recompute
    assert (
        fleet.utils.recompute
        is fleet_recompute.FORWARDS_TO_FLEET
        is not fleet_recompute.fleet_recompute
    )
    assert inner.recompute.__module__ == inner.__name__
    assert fleet_recompute.fleet_recompute_hybrid is fleet.recompute.recompute_hybrid
    assert hasattr(inner, "custom_state_manager") != IS_26
    if not IS_26:
        manager = inner.custom_state_manager
        assert manager.custom_get_state_func is manager.custom_set_state_func is None
    assert fleet_recompute.custom_state_functions() is None
    assert (inner, "recompute") in list(fleet_recompute.holders_of(fleet_recompute.fleet_recompute))


def test_errors_are_known_by_their_text() -> None:
    with pytest.raises(ValueError) as caught:
        paddle.ones([2, 3]) + paddle.ones([4])
    assert backward.is_raised_by_an_operator(caught.value)
    assert not backward.is_raised_by_an_operator(ValueError("(my) own words"))
    # As `tests/distributed/test_mortal_ranks.py` sees it from a collective whose peer has died.
    text = "[/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:576] Read error: reset by peer"
    assert distributed.is_from_gloo(RuntimeError(text))
    assert not distributed.is_from_gloo(RuntimeError("out of memory"))


# --------------------------------------------------------------------------------- nothing else


def test_every_private_name_has_a_test_here() -> None:
    """Names with an underscore, and everything of ``core``, in the code of `_paddle`."""
    modules = Path(memory.__file__).parent.glob("*.py")
    source = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    code = re.sub(r'""".*?"""', "", source, flags=re.S)
    code = "\n".join(line.partition("  # ")[0] for line in code.splitlines())
    own = set(re.findall(r"^(?:def |class )?(_[a-z]\w+)", code, flags=re.M)) | {"_paddle"}
    own |= set(re.findall(r"\bself\.(_\w+)", code))
    names = set(re.findall(r"\.(_[a-z]\w+)", code)) | set(re.findall(r"\bcore\.(\w+)", code))
    tests = [Path(__file__), *Path(__file__).parent.glob("fake_device/test_*.py")]
    here = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    untested = {name for name in names - own if name not in here}
    assert not untested


def test_no_other_module_reaches_into_paddle() -> None:
    room = Path(memory.__file__).parent
    for path in room.parent.rglob("*.py"):
        if room not in path.parents:
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"paddle\.(base|fluid)\b(?!``)", source), path
            assert "paddle.__version__" not in source or path.name == "_installed.py", path


def test_core_eager_register_saved_tensors_hooks() -> None:
    """It is looked up at each use, so that a pair that waits can give way."""
    register, calls = core.eager.register_saved_tensors_hooks, []
    core.eager.register_saved_tensors_hooks = lambda *pair: calls.append(pair) or register(*pair)
    try:
        with paddle.autograd.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert len(calls) == 1
    finally:
        core.eager.register_saved_tensors_hooks = register


# -------------------------------------------------------------------------------- hooks of leaves


def test_tensor_register_grad_hook_is_what_register_hook_calls() -> None:
    """Numbered from 0 on for each tensor, also when some are removed."""
    parameter = paddle.create_parameter([2], "float32")
    assert gradients._register_grad_hook(parameter, lambda gradient: None) == 0
    assert parameter._remove_grad_hook(0) and not parameter._remove_grad_hook(0)
    assert gradients.has_unwatched_hooks(parameter)
    other = paddle.create_parameter([2], "float32")
    assert not gradients.has_unwatched_hooks(other)
    gradients.watch_hooks()
    handle = other.register_hook(lambda gradient: gradient * 2)
    with gradients.muted_leaf_hooks([other]):
        other.sum().backward()
    other.sum().backward()
    assert other.grad.tolist() == [3.0, 3.0] and handle.remove()
    other.sum().backward()
    assert other.grad.tolist() == [4.0, 4.0] and not gradients.has_unwatched_hooks(other)


def test_the_backward_of_a_leaf_alone_runs_its_hooks_and_adds() -> None:
    """So `GradCache` hands the sum of chunks to a parameter; the hook is before the addition."""
    parameter = paddle.create_parameter([2], "float32")
    seen: list[Any] = []
    parameter.register_hook(lambda gradient: (seen.append(gradient.tolist()), gradient * 2)[1])
    gradients.on_gradient_added(parameter, lambda: seen.append("added"))
    for _ in range(2):
        paddle.autograd.backward([parameter], [paddle.ones([2])])
    assert seen == [[1.0, 1.0], "added"] * 2 and parameter.grad.tolist() == [4.0, 4.0]


def test_optimizer_grad_clip_and_multi_precision() -> None:
    layer = paddle.nn.Linear(2, 2)
    plain = paddle.optimizer.AdamW(parameters=layer.parameters())
    assert hasattr(plain, "_grad_clip") and hasattr(plain, "_multi_precision")
    assert not layers.clip_of_optimizer(plain) and not updates.keeps_master_weights(plain)
    other = paddle.optimizer.AdamW(
        parameters=layer.parameters(),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
        multi_precision=True,
    )
    assert layers.clip_of_optimizer(other) and updates.keeps_master_weights(other)


def test_init_parallel_env_makes_its_group_by_new_process_group_impl() -> None:
    """`_paddle.start` puts its own in this place."""
    source = inspect.getsource(paddle.distributed.parallel.init_parallel_env)
    assert "_new_process_group_impl" in source or "_new_process_group_impl" in inspect.getsource(
        paddle.distributed.collective
    )
    assert callable(paddle.distributed.parallel._new_process_group_impl)


# ------------------------------------------------------------------------------------- to_static


def test_a_static_function_makes_its_program_when_asked() -> None:
    """``compiled.CompiledForward``, ``compiled.Program``."""
    from paddle.jit.dy2static.program_translator import ASTStaticFunction, ProgramCache
    from paddle.jit.dy2static.utils import Dygraph2StaticException

    layer = paddle.nn.Linear(2, 2)
    spec = [paddle.static.InputSpec([-1, 2], "float32", stop_gradient=True)]
    paddle.jit.to_static(layer, input_spec=spec, full_graph=True)
    assert type(layer.forward) is ASTStaticFunction  # its class is replaced by one below it
    program, runner = layer.forward.get_concrete_program(*spec, is_train=True)
    assert runner.program is runner.train_program if not IS_26 else runner.program is not None
    assert not any(one.has_attr("fwd_recompute_id") for one in program.main_program.blocks[0].ops)
    assert callable(layer.forward._perform_call) and layer.forward.get_traced_count() == 1
    layer(paddle.ones([3, 2]))
    assert layer.forward.get_traced_count() == 1
    assert issubclass(Dygraph2StaticException, Exception)

    forward = layer.forward
    assert type(forward._program_cache) is ProgramCache and callable(ProgramCache._build_once)
    assert forward._program_trans.enable_to_static is True
    assert callable(forward._call_dygraph_function) and callable(forward._is_train_mode)
    args, kwargs = forward._function_spec.unified_args_and_kwargs([paddle.ones([3, 2])], {})
    assert len(args) == 1 and not kwargs
    assert {id(one) for one in runner._params} == {id(one) for one in layer.parameters()}
    layer.weight.grad = paddle.ones([2, 2])
    runner._set_grad_type(runner._params, runner.program)
    # What a conversion keeps: Paddle empties the gradient here.
    assert layer.weight.grad is None or not layer.weight.grad._is_initialized()


def test_layer_non_persistable_buffer_names_set() -> None:
    """The buffers that a Layer does not save."""
    layer = paddle.nn.BatchNorm1D(2)
    layer.register_buffer("kept", paddle.ones([1]))
    layer.register_buffer("left", paddle.ones([1]), persistable=False)
    assert layer._non_persistable_buffer_names_set == {"left"}
    saved = layers.saved_buffers(layer)
    assert {*saved} == {*layer.state_dict()} - {"weight", "bias"} == {"kept", "_mean", "_variance"}
