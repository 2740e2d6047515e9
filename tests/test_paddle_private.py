"""The private names of Paddle that `_paddle` uses, and what it relies on beyond what users see.

A release that moves a name is noticed by `PRIVATE`. What a name does is tested by what uses it.
Here are the facts for which `_paddle` has a way around, and those that nothing else would show.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.base import core, framework
from paddle.jit.sot.opcode_translator.custom_code import CustomCode

from paddle_recompute._paddle import (
    backward,
    counting,
    distributed,
    endpoint,
    flat,
    fleet_recompute,
    gradients,
    guarded,
    layers,
    memory,
    saved_tensors,
    translation,
    updates,
    writes,
)
from paddle_recompute.errors import DependencyError
from paddle_recompute.recompute import function as recompute_function
from tests.processes import python

IS_26 = paddle.__version__.startswith("2.6")

PRIVATE: list[tuple[Any, str]] = [
    (
        core.eager.Tensor,
        "_bump_inplace_version _grad_ivar _inplace_version _is_initialized "
        "_register_backward_hook _register_grad_hook _remove_grad_hook _share_buffer_to "
        "_share_underline_tensor_to _slice _new_shared_tensor",
    ),
    (paddle.ones([1]).get_tensor(), "_clear _set_dims _share_data_with"),
    (paddle, "_C_ops _legacy_C_ops"),
    (paddle._C_ops, "add assign_value_ update_loss_scaling_"),
    (paddle._legacy_C_ops, "check_finite_and_unscale"),
    (
        paddle.nn.BatchNorm1D(1),
        "_buffers _forward_post_hooks _forward_pre_hooks _non_persistable_buffer_names_set "
        "_parameters _sub_layers _use_global_stats _mean _variance",
    ),
    (
        paddle.optimizer.Optimizer,
        "_add_accumulator _create_optimization_pass _create_param_lr",
    ),
    (
        paddle.optimizer.AdamW(parameters=paddle.nn.Linear(1, 1).parameters()),
        "_accumulators_holder _grad_clip _multi_precision _name _param_groups _parameter_list",
    ),
    (translation.psdb, "in_sot"),
    (framework, "EagerParamBase _current_expected_place _current_expected_place_ _dygraph_tracer"),
    (
        framework._dygraph_tracer(),
        "_amp_dtype _amp_level _get_amp_op_list _has_grad _set_amp_op_list _use_promote",
    ),
    (
        core,
        "AmpLevel CPUPlace CUDAPlace CustomPlace Generator ProcessGroup ProcessGroupGloo ReduceOp "
        "TCPStore VarDesc XPUPlace create_or_get_global_tcp_store default_cpu_generator "
        "device_memory_stat_current_value device_memory_stat_peak_value eager "
        "eval_frame_skip_file_prefix get_all_op_names host_memory_stat_current_value "
        "host_memory_stat_peak_value set_eval_frame supports_bfloat16 "
        "device_memory_stat_reset_peak_value host_memory_stat_reset_peak_value",
    ),
    (
        paddle.amp.auto_cast.__globals__["amp_global_state"](),
        "amp_dtype model_parameters use_master_grad",
    ),
    (core.eager, "register_saved_tensors_hooks run_backward run_partial_grad"),
    (paddle.distributed.parallel, "_new_process_group_impl"),
    (paddle.distributed.collective, "_set_custom_gid"),
    *((sys.modules[module], name) for module, name in counting.COUNTERS),
]
NOT_ON_26 = {
    "_new_shared_tensor",
    "device_memory_stat_reset_peak_value",
    "host_memory_stat_reset_peak_value",
}


class Saves(PyLayer):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient


def test_private_names_are_there() -> None:
    missing = {
        name for owner, names in PRIVATE for name in names.split() if not hasattr(owner, name)
    }
    assert missing == (NOT_ON_26 if IS_26 else set())


def test_every_private_name_is_in_the_table() -> None:
    """Names with an underscore, and everything of ``core``, in the code of `_paddle`."""
    modules = Path(memory.__file__).parent.glob("*.py")
    source = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    code = re.sub(r'""".*?"""', "", source, flags=re.S)
    code = "\n".join(line.partition("  # ")[0] for line in code.splitlines())
    own = set(re.findall(r"^(?:def |class )?(_[a-z]\w+)", code, flags=re.M)) | {"_paddle", "_exit"}
    own |= set(re.findall(r"\bself\.(_\w+)", code))
    names = set(re.findall(r"\.(_[a-z]\w+)", code)) | set(re.findall(r"\bcore\.(\w+)", code))
    assert names - own <= {name for _, listed in PRIVATE for name in listed.split()}


def needs_grad(*shape: int) -> paddle.Tensor:
    tensor = paddle.ones(list(shape))
    tensor.stop_gradient = False
    return tensor


# -------------------------------------------------------------------------------------- tensors


VIEWS = {
    "transposed": lambda x: x.transpose([1, 0, 2]),
    "columns": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "imaginary part": lambda x: paddle.imag(paddle.complex(x, -x)),
    "diagonal": lambda x: paddle.diagonal(x, axis1=1, axis2=2),
    "transposed booleans": lambda x: (x > 9).transpose([1, 0, 2]),
    "one number": lambda x: x[1, 2, 3],
    "nothing": lambda x: x[:, 3:],
}


@pytest.mark.parametrize("view", list(VIEWS))
def test_memory_is_shared_with_strides_and_offset_by_another_tensor(view: str) -> None:
    x = VIEWS[view](paddle.arange(24, dtype="float32").reshape([2, 3, 4]))
    x.stop_gradient = False
    shared = saved_tensors.shares_memory(x)
    assert shared is not x and shared.is_leaf
    assert shared.stop_gradient == x.stop_gradient  # PyLayers see it: ctx.saved_tensor()
    assert shared.data_ptr() == x.data_ptr()
    if saved_tensors.ENGINE_TAKES_MEMORY:
        assert saved_tensors.memory_for_engine(x).data_ptr() == x.data_ptr()
    assert shared.numpy().tobytes() == x.numpy().tobytes()
    look = saved_tensors.metadata_of(x)
    assert saved_tensors.metadata_of(shared) == look
    assert saved_tensors.each_metadata(saved_tensors.metadata_lists_of([x, shared])) == [look, look]


def test_what_has_no_memory_is_shared_without() -> None:
    """On 2.6 by the constructor with a ``core.VarDesc.VarType``."""
    empty = paddle.zeros([0, 3])
    shared = saved_tensors.shares_memory(empty)
    assert shared is not empty and not shared._is_initialized() and shared.shape == [0, 3]
    assert not saved_tensors.memory_for_engine(empty)._is_initialized()


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


def test_references_of_26_to_what_is_packed() -> None:
    """One for the graph, and on 2.6 one for each copy of what holds it; none of them is dropped.

    The graph holds the unpack hook, and lets it go.
    """

    class Handle:
        def __init__(self, tensor: paddle.Tensor) -> None:
            self.tensor = tensor.detach()

    handles: list[weakref.ref[Handle]] = []

    def pack(tensor: paddle.Tensor) -> Handle:
        handle = Handle(tensor)
        handles.append(weakref.ref(handle))
        return handle

    def references() -> list[int]:
        own = 2  # the name `one`, and the argument of getrefcount
        found = [handle() for handle in handles]
        found.reverse()
        counts = []
        while found:
            one = found.pop()
            counts.append(0 if one is None else sys.getrefcount(one) - own)
        return counts

    hooks = paddle.autograd.saved_tensors_hooks(pack, functools.partial(lambda one: one.tensor))
    kept = weakref.ref(hooks.unpack_hook)
    x = needs_grad(2, 2)
    with hooks:
        y = Saves.apply(x.exp())
        z = paddle.einsum("ij,ij->", x, x)
        x.tanh()
    del hooks
    copies = int(IS_26)
    in_graph = [1 + copies, 1]
    of_list = [1 + 2 * copies, 1 + copies]
    assert references()[:4] == in_graph + of_list
    assert references()[-1] == copies  # nothing has it
    paddle.grad(y.sum(), [x], retain_graph=True)
    assert references()[:4] == [1 + 2 * copies, 1, *of_list]
    assert kept() is not None
    del y, z
    assert references()[:4] == [2 * copies, 0, 2 * copies, copies]
    assert kept() is None
    assert saved_tensors.PACK_LEAKS_A_REFERENCE == IS_26


def test_an_update_of_groups_of_parameters_is_a_write() -> None:
    """``Optimizer._create_optimization_pass`` gets a dict of each group, and raises no version."""
    linears = [paddle.nn.Linear(2, 2) for _ in range(3)]
    groups = [{"params": linear.parameters()} for linear in linears]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=groups)
    for linear in (linears[0], linears[2]):
        linear(paddle.ones([1, 2])).sum().backward()
    told: list[int] = []
    writes.watch_writes(lambda tensor: told.append(id(tensor)))
    optimizer.step()
    parameters = [id(p) for linear in linears for p in linear.parameters()]
    assert [one for one in told if one in parameters] == [*parameters[:2], *parameters[4:]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_update_loss_scaling(dtype: str) -> None:
    """Zeros into all tensors where a condition of one element is true; else nothing."""
    tensors = [paddle.to_tensor([1.0, math.nan, -2.0]).astype(dtype) for _ in range(2)]
    before = [tensor.astype("float32").numpy().tobytes() for tensor in tensors]
    updates.zero_if(paddle.to_tensor(False), flat.by_dtype(tensors))
    assert [tensor.astype("float32").numpy().tobytes() for tensor in tensors] == before
    updates.zero_if(paddle.to_tensor(True), flat.by_dtype(tensors))
    assert all(not tensor.astype("float32").numpy().any() for tensor in tensors)


def test_address_of() -> None:
    x = paddle.ones([3])
    assert writes.address_of(x) == writes.address_of(x.detach()) == x.data_ptr()
    for placeholder in paddle.nn.LSTM(2, 2, dropout=0.5).buffers():
        assert writes.address_of(placeholder) is None
    sparse = paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])
    assert writes.address_of(sparse) is None


# --------------------------------------------------------------------------------------- layers


def test_attributes_of_every_layer() -> None:
    name = paddle.nn.Layer().full_name()
    known = layers.attributes_of_every_layer()
    layers.attributes_of_every_layer.cache_clear()
    assert {"training", "_parameters", "_buffers", "_sub_layers"} <= known
    assert "in_features" not in known and known <= vars(paddle.nn.Linear(2, 2)).keys()
    assert layers.attributes_of_every_layer() == known
    following = paddle.nn.Layer().full_name()
    assert int(following.rpartition("_")[2]) == int(name.rpartition("_")[2]) + 1


def test_layers_below_are_those_of_sublayers() -> None:
    model = paddle.nn.Sequential(paddle.nn.Sequential(*map(paddle.nn.Linear, [2, 2], [2, 2])))
    model.add_sublayer("again", model[0][1])
    model.add_sublayer("none", None)
    below = model.sublayers(include_self=True)
    assert sorted(map(id, layers.layers_below(model))) == sorted(map(id, below))


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


def test_only_a_py_layer_gives_a_pack_hook_the_object_itself() -> None:
    """`saved_tensors.without_graph` keeps a parameter as it is where a hook gets one."""
    parameter, packed = paddle.create_parameter([2], "float32"), []

    def pack(tensor: paddle.Tensor) -> paddle.Tensor:
        packed.append(tensor is parameter)
        assert tensor is parameter or type(tensor) is paddle.Tensor
        return tensor

    with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        parameter.exp() * parameter
        assert packed and not any(packed)
        Saves.apply(parameter)
    assert packed[-1]


def test_an_exception_of_an_unpack_hook_becomes_an_os_error() -> None:
    """The reason for `watch_backward`; when it arrives as itself, the wrapping can go."""

    def fails(packed: Any) -> Any:
        raise KeyError("lost")

    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, fails):
        y = needs_grad(3).exp()
    with pytest.raises(OSError, match="lost"):
        y.sum().backward()
    framework._dygraph_tracer()._has_grad = True  # the engine forgets it: see `_watched`


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


# ----------------------------------------------------------------------- fleet, store and memory


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"PADDLE_MASTER": "node0:1234", "PADDLE_TRAINER_ENDPOINTS": "other:1"}, "node0"),
        ({"PADDLE_TRAINER_ENDPOINTS": "first:1,second:2"}, "first"),
        ({"MASTER_ADDR": "torch", "MASTER_PORT": "1", "PADDLE_MASTER": "node0:1234"}, "torch"),
    ],
)
def test_master_is_found_where_init_parallel_env_looks(
    variables: dict[str, str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS")
    source = inspect.getsource(paddle.distributed.init_parallel_env)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        assert name in source
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert endpoint.master_endpoint().rpartition(":")[0] == host


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


def test_a_parameter_takes_another_class() -> None:
    weight = paddle.nn.Linear(2, 2).weight
    guarded.guard(weight)
    assert guarded.is_guarded(weight) and weight.shape == [2, 2]
    assert isinstance(weight, paddle.base.framework.EagerParamBase)
    guarded.unguard(weight)
    assert type(weight) is paddle.base.framework.EagerParamBase
    assert {"add_", "copy_", "fill_"} <= {*guarded.in_place_methods()}


def test_no_operator_of_paddle_is_replaced() -> None:
    """Nor the reference of any module of Paddle to one, by a model with everything."""
    code = """
import sys
import types
import paddle

def operators():
    modules = [m for n, m in sys.modules.items() if n.partition(".")[0] == "paddle"]
    return {
        (module.__name__, name): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, types.BuiltinFunctionType)
    }

before = operators()
import paddle_recompute as ours

model = ours.OffloadSequential([paddle.nn.Linear(4, 4) for _ in range(2)], num_shards=2)
optimizer = model.optimizer(lambda p: paddle.optimizer.AdamW(parameters=p))
ours.TrainStep(model, optimizer, loss_fn=lambda m, x: m(x).mean())([paddle.ones([2, 4])])
plain = paddle.nn.Linear(4, 4)
ours.ShardedOptimizer(lambda p: paddle.optimizer.SGD(parameters=p), plain)
after = operators()
changed = {key for key, value in before.items() if after.get(key) is not value}
written = {name for _, name in changed}
assert {"run_backward", "run_partial_grad"} >= {*written}, changed
"""
    python("-c", code, timeout=300)


@pytest.mark.skipif(
    not IS_26 or sys.platform != "linux", reason="a zlib of Paddle 2.6.2; asks the loader of glibc"
)
def test_zlib_is_not_bound_to_paddles_own() -> None:
    """Paddle 2.6.2 has a zlib of its own, with which the system's must not be mixed."""
    code = "from paddle_recompute.app.encoder import build_model; import PIL._imaging, zlib"
    run = python("-c", code, env={**os.environ, "LD_DEBUG": "bindings"})
    bound = [line for line in run.stderr.splitlines() if "symbol `deflateReset'" in line]
    of_libz = [line for line in bound if "/libz." in line.partition(" to ")[0]]
    assert of_libz
    assert not [line for line in of_libz if "libpaddle" in line.partition(" to ")[2]]


# -------------------------------------------------------------------------- translated bytecode


def test_translator_is_set_and_leaves_files_out(tmp_path: Path) -> None:
    """``core.set_eval_frame`` returns the function that translated before, of this thread."""
    seen = []

    def translator(frame: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return CustomCode(None, False)  # run the frame as it is

    def called() -> None:
        pass

    skipped = tmp_path / "skipped.py"
    names: dict[str, Any] = {}
    exec(compile("def left_out():\n    pass\n", str(skipped), "exec"), names)
    translation.skip_sot_in_files_below(str(tmp_path))
    assert translation.set_eval_frame(translator) is None
    try:
        called()
        names["left_out"]()
        assert translation.set_eval_frame(None) is translator
        called()
    finally:
        translation.set_eval_frame(None)
    assert seen.count("called") == 1 and "left_out" not in seen


@pytest.mark.skipif(IS_26, reason="exists from Paddle 3.0 on")
def test_jit_marker_force_dynamic() -> None:
    """`skip_sot` relies on it for functions and for Layer classes."""
    calls = []

    def untranslatable(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(bool(paddle.in_dynamic_mode()))
        return x * 2

    translation.skip_sot(untranslatable)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        return untranslatable(x + 1) + 1

    static = paddle.jit.to_static(function, full_graph=False)
    assert static(paddle.ones([1])).tolist() == [5]
    assert static(paddle.ones([1])).tolist() == [5]
    assert calls == [True, True]  # a translated function would run once, to be traced


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


def test_no_other_module_reaches_into_paddle() -> None:
    room = Path(memory.__file__).parent
    for path in room.parent.rglob("*.py"):
        if room not in path.parents:
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"paddle\.(base|fluid)\b(?!``)", source), path
            assert "paddle.__version__" not in source or path.name == "_installed.py", path


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
    with gradients.muted_leaf_hooks({id(other): lambda gradient: None}):
        other.sum().backward()
    other.sum().backward()
    assert other.grad.tolist() == [3.0, 3.0] and handle.remove()
    other.sum().backward()
    assert other.grad.tolist() == [4.0, 4.0] and not gradients.has_unwatched_hooks(other)


def test_the_options_of_fleets_recompute_are_all_known() -> None:
    """It pops them from ``kwargs``; those of a pipeline are read in ``ctx``. Ours have each."""
    found = fleet_recompute.options_of(fleet_recompute.fleet_recompute, "kwargs.pop")
    assert {"preserve_rng_state", "use_reentrant"} <= found <= recompute_function._SHARED_WITH_FLEET
    found = fleet_recompute.options_of(fleet_recompute.fleet_recompute_hybrid, "ctx.get")
    assert found == {"mp_group", "offload", "partition"}
