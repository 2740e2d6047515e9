"""Everything that differs between Paddle versions, and every private Paddle name that we use.

No other module of the package looks at a version number or reaches into ``paddle.base``. Each
function names the Paddle versions that it serves, why a public API does not, and when it can go.
``tests/test_paddle_private.py`` names each private symbol, so a release that moves one is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core, framework
from paddle.distributed.communication.group import Group

from paddle_recompute.errors import DependencyError

BATCH_NORMS = (
    paddle.nn.BatchNorm,
    paddle.nn.BatchNorm1D,
    paddle.nn.BatchNorm2D,
    paddle.nn.BatchNorm3D,
    paddle.nn.SyncBatchNorm,
)
OLDEST_SUPPORTED = (2, 6, 2)
NEWEST_KNOWN = (3, 3)


def paddle_version() -> tuple[int, int, int]:
    """``(major, minor, patch)`` of the installed Paddle."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", paddle.__version__)
    if match is None:  # a development build calls itself 0.0.0
        raise DependencyError(f"cannot read the Paddle version {paddle.__version__!r}")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def is_dygraph() -> bool:
    """False while a Program is being built, under ``paddle.enable_static`` or ``jit.to_static``.

    ``framework.in_dygraph_mode`` (2.6, 3.x) is what ``paddle.in_dynamic_mode`` calls; inside a
    function that ``paddle.jit.to_static`` traces both are False.
    """
    return bool(paddle.in_dynamic_mode())


# ---------------------------------------------------------------------------------- tensors


def shares_memory(tensor: paddle.Tensor) -> paddle.Tensor:
    """A new tensor over the same memory, with no gradient history and an identity of its own.

    ``Tensor.detach`` does not serve: it shares the C++ tensor itself, and on 2.6 the engine moves
    the memory *out of* the tensor that an unpack hook returns, which would empty the original.
    ``_new_shared_tensor`` exists from 3.0; on 2.6 ``get_tensor()._share_data_with`` does the same:
    it takes strides and offset along, which ``_share_buffer_to`` leaves out. Can go when a public
    shallow copy exists in every supported version.
    """
    if hasattr(tensor, "_new_shared_tensor"):
        shared = tensor._new_shared_tensor().detach()
    else:
        shared = core.eager.Tensor(
            tensor.dtype, tensor.shape, "", core.VarDesc.VarType.LOD_TENSOR, False
        )
        shared.get_tensor()._share_data_with(tensor.get_tensor())
    shared.stop_gradient = tensor.stop_gradient  # a PyLayer may ask what it saved
    return shared


Layout = tuple[tuple[int, ...], int]
"""Strides (in elements) of a tensor, and its offset in its memory (in bytes)."""


def layout_of(tensor: paddle.Tensor) -> Layout | None:
    """How `tensor` lies in its memory (``strides``, ``offset``; 2.6, 3.x); None if it has none.

    ``nn.LSTM`` in eval mode saves a tensor without memory; 3.3 aborts where its strides are asked.
    """
    return (tuple(tensor.strides), tensor.offset) if is_initialized(tensor) else None


def with_layout(tensor: paddle.Tensor, layout: Layout | None) -> paddle.Tensor:
    """`tensor`, or a copy of it that lies in its memory as `layout` says.

    The engine (2.6, 3.x) takes the bare memory from what an unpack hook returns, and reads it with
    the strides and the offset of the tensor that the operator had saved. Can go when the engine
    takes the tensor itself.
    """
    if layout is None or layout_of(tensor) in (None, layout):
        return tensor
    strides, offset = layout
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    with paddle.no_grad(), amp_state_of(replace(amp_state(), level=core.AmpLevel.O0)):
        memory = paddle.zeros([offset // tensor.element_size() + last + 1], tensor.dtype)
        copy = paddle.as_strided(memory, tensor.shape, strides, offset)
        paddle.assign(tensor, output=copy)
    copy.stop_gradient = tensor.stop_gradient
    return copy


@functools.cache
def before_saved_tensors_hooks(call: Callable[[], None]) -> None:
    """From now on, `call` is called before a pair of saved-tensor hooks comes into force.

    So that a pair of ours that only waits can give way to a user's.
    ``core.eager.register_saved_tensors_hooks`` (2.6, 3.x) is what
    ``paddle.autograd.saved_tensors_hooks`` looks up at each use. Can go when Paddle allows several
    pairs, or one per thread.
    """
    register = core.eager.register_saved_tensors_hooks

    @functools.wraps(register)
    def registered(*args: Any, **kwargs: Any) -> Any:
        call()
        return register(*args, **kwargs)

    core.eager.register_saved_tensors_hooks = registered


PACK_LEAKS_A_REFERENCE = paddle_version() < (3, 0, 0)
"""Paddle 2.6 never drops the reference that a pack hook returns: each saved tensor would leak."""


def give_back_pack_references(tickets: list[Any]) -> None:
    """Drop the reference to each of `tickets` that Paddle 2.6 forgets; empties the list.

    To be called when the recording is over and the graph holds references of its own. A ticket
    that a PyLayer saved has one holder and none too many, so it is left alone. Can go with 2.6.
    """
    while tickets:
        ticket = tickets.pop()
        own = 2  # the name `ticket`, and the argument of getrefcount
        if sys.getrefcount(ticket) - own >= 2:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(ticket))


def is_parameter(value: object) -> bool:
    """Whether `value` is a dygraph parameter (``EagerParamBase``; 2.6, 3.x)."""
    return isinstance(value, framework.EagerParamBase)


def parameters_of_optimizer(optimizer: Any) -> list[paddle.Tensor]:
    """The parameters that `optimizer` updates; none where it cannot be told, as with a wrapper.

    ``Optimizer._parameter_list`` (2.6, 3.x) holds parameters, or one dict per group of them. Can go
    when an optimizer says it publicly.
    """
    listed = getattr(optimizer, "_parameter_list", None) or []
    groups = [entry["params"] if isinstance(entry, dict) else [entry] for entry in listed]
    return [parameter for group in groups for parameter in group]


def address_of(tensor: paddle.Tensor) -> int | None:
    """Where the memory of `tensor` begins; None if it has none, or is sparse.

    ``data_ptr`` is public; what it says of tensors without memory differs: None, 0 or, for the
    placeholder buffers of ``nn.LSTM`` on 3.x, a RuntimeError.
    """
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None


@functools.cache
def watch_writes(written: Callable[[paddle.Tensor], None]) -> None:
    """From now on, call ``written(tensor)`` for each write that no ``inplace_version`` counts.

    These are (2.6, 3.x) the update of every optimizer, whose subclasses all come through
    ``Optimizer._create_optimization_pass``; ``Tensor.set_value``, through which ``set_state_dict``
    goes; ``Tensor.copy_``; ``_C_ops.assign_value_`` (``paddle.assign`` of an array into a tensor)
    and ``_C_ops.exponential_``. Paddle offers no callback for any of them. Nothing changes for
    whoever calls them. Can go when Paddle raises ``inplace_version`` there.
    """
    update = paddle.optimizer.Optimizer._create_optimization_pass

    @functools.wraps(update)
    def reported_update(self: Any, parameters_and_grads: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, parameters_and_grads, *args, **kwargs)
        if isinstance(parameters_and_grads, dict):
            parameters_and_grads = parameters_and_grads["params"]
        for parameter, gradient in parameters_and_grads:
            if gradient is not None and isinstance(parameter, paddle.Tensor):
                written(parameter)
        return result

    def reported(write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = write(tensor, *args, **kwargs)
            if isinstance(tensor, paddle.Tensor):
                written(tensor)
            return result

        return call

    paddle.optimizer.Optimizer._create_optimization_pass = reported_update
    for owner, name in _UNCOUNTED_WRITES:
        setattr(owner, name, reported(getattr(owner, name)))


_UNCOUNTED_WRITES = (
    (paddle.Tensor, "set_value"),
    (paddle.Tensor, "copy_"),
    (paddle._C_ops, "assign_value_"),
    (paddle._C_ops, "exponential_"),
)


# ----------------------------------------------------------------------------------- layers


@functools.cache
def attributes_of_every_layer() -> frozenset[str]:
    """What ``Layer.__init__`` itself (2.6, 3.x) puts into the ``__dict__`` of a Layer."""
    with paddle.utils.unique_name.guard():  # or the names of the user's Layers would shift
        return frozenset(vars(paddle.nn.Layer()))


def own_parameters(layer: paddle.nn.Layer) -> dict[str, Any]:
    """The dict in which `layer` itself (not its sublayers) keeps its parameters (2.6, 3.x)."""
    return layer.__dict__["_parameters"]  # type: ignore[no-any-return]


def set_own_parameters(layer: paddle.nn.Layer, parameters: dict[str, Any]) -> None:
    """Let `layer` look its parameters up in another dict; ``setattr`` would refuse one."""
    layer.__dict__["_parameters"] = parameters


def own_sublayers(layer: paddle.nn.Layer) -> dict[str, Any]:
    """The dict in which `layer` keeps its direct sublayers (2.6, 3.x)."""
    return layer.__dict__["_sub_layers"]  # type: ignore[no-any-return]


def forward_pre_hooks(layer: paddle.nn.Layer) -> dict[Any, Any]:
    """The hooks before the forward of `layer` itself (2.6, 3.x)."""
    return layer._forward_pre_hooks  # type: ignore[no-any-return]


def forward_post_hooks(layer: paddle.nn.Layer) -> dict[Any, Any]:
    """The hooks behind the forward of `layer` itself (2.6, 3.x)."""
    return layer._forward_post_hooks  # type: ignore[no-any-return]


def non_trained_state(layer: paddle.nn.Layer) -> list[tuple[dict[str, Any], list[str]]]:
    """Where `layer` itself (not its sublayers) keeps tensors that a forward may write to.

    Dicts of the Layer with the keys in question, so that a caller can put another tensor there;
    ``Layer.register_buffer`` (public) refuses a name that exists. BatchNorms keep their statistics
    among the parameters, with ``stop_gradient`` set (2.6, 3.x).
    """
    slots = [(layer._buffers, list(layer._buffers))]
    statistics = statistics_among_parameters(layer)
    if statistics:
        slots.append((layer._parameters, statistics))
    return slots


def statistics_among_parameters(layer: paddle.nn.Layer) -> list[str]:
    """The names under which a BatchNorm keeps its statistics among its parameters (2.6, 3.x)."""
    return ["_mean", "_variance"] if isinstance(layer, BATCH_NORMS) else []


def children_of(layer: paddle.nn.Layer) -> list[tuple[str, paddle.nn.Layer]]:
    """The direct sublayers of `layer` under every name that it has for them.

    ``Layer.named_children`` (public) gives a Layer that has two names there under the first only.
    """
    return [(name, child) for name, child in layer._sub_layers.items() if child is not None]


def is_initialized(tensor: object) -> bool:
    """Whether `tensor` is a tensor that has memory; ``nn.LSTM`` keeps a buffer that has none.

    ``_is_initialized`` (2.6, 3.x); the public ``is_initialized`` is deprecated.
    """
    return isinstance(tensor, paddle.Tensor) and bool(tensor._is_initialized())


# ------------------------------------------------------------------------- random generators


def generator_states() -> tuple[Any, Any]:
    """The states of Paddle's generators: the CPU's, and the current device's if it is another.

    The CPU's is read through ``core.default_cpu_generator`` because ``paddle.set_rng_state`` with
    a device raises AttributeError on 2.6.2. Can go with 2.6.
    """
    on_cpu = paddle.get_device() == "cpu"
    return core.default_cpu_generator().get_state(), None if on_cpu else paddle.get_rng_state()


def set_generator_states(states: tuple[Any, Any]) -> None:
    """Put Paddle's generators back to `states` (from `generator_states`)."""
    cpu, device = states
    core.default_cpu_generator().set_state(cpu)
    if device is not None:
        paddle.set_rng_state(device)


class _Probe(threading.local):
    """A generator of nobody's, to look into the states of others."""

    def __init__(self) -> None:
        self.generator = core.Generator()


_probe = _Probe()


def mark_of_generator_state(state: Any) -> object:
    """Something that is equal for equal `state` (of a generator, a list of such, or None).

    A ``GeneratorState`` (2.6, 3.x) does not compare. On the CPU the mark is the number that is
    drawn next; a GPU's stream is told by the offset, which only the state's text shows. Can go
    when states compare.
    """
    if state is None:
        return None
    if isinstance(state, list):  # of the devices, from ``paddle.get_rng_state``
        return [mark_of_generator_state(one) for one in state]
    if paddle.get_device() != "cpu":
        return re.sub(r"0x[0-9a-f]+", "", str(state))
    _probe.generator.set_state(state)
    return _probe.generator.random()


def hybrid_parallel_tracker() -> Any:
    """Fleet's tracker of the named streams of tensor parallelism.

    ``get_rng_state_tracker`` (2.6, 3.x) has no public spelling; its two methods
    ``get_states_tracker``/``set_states_tracker`` are what fleet's own recompute uses.
    """
    from paddle.distributed.fleet.meta_parallel.parallel_layers.random import (
        get_rng_state_tracker,
    )

    return get_rng_state_tracker()


# ---------------------------------------------------------------------------------- AMP state


@dataclass(frozen=True)
class AmpState:
    """What ``paddle.amp.auto_cast`` leaves on the tracer; ops read it as they are recorded."""

    level: Any
    dtype: str
    lists: tuple[Any, Any]
    use_promote: bool


def amp_state() -> AmpState:
    """The AMP state in force (2.6, 3.x).

    ``paddle.amp`` can enter a state but not read one, hence the tracer. It is written directly
    too, not through a second ``auto_cast``: that warns and does nothing on CPU, and would not
    give back lists that were changed after the first one was entered.
    """
    tracer = framework._dygraph_tracer()
    white, black = tracer._get_amp_op_list()
    return AmpState(tracer._amp_level, tracer._amp_dtype, (white, black), tracer._use_promote)


@contextlib.contextmanager
def amp_state_of(state: AmpState) -> Iterator[None]:
    """Inside, `state` is in force; afterwards what was before."""
    before = amp_state()
    _set_amp_state(state)
    try:
        yield
    finally:
        _set_amp_state(before)


def _set_amp_state(state: AmpState) -> None:
    tracer = framework._dygraph_tracer()
    tracer._amp_level = state.level
    tracer._set_amp_op_list(*state.lists)
    tracer._amp_dtype = state.dtype
    tracer._use_promote = state.use_promote


@functools.cache
def operator_names() -> frozenset[str]:
    """Every name that this Paddle has for an operator, in dygraph and in either kind of Program.

    The lists of ``auto_cast`` take any word and look for it in vain. There is no public list:
    ``core.get_all_op_names`` has those of the old representation, ``paddle._C_ops`` those of
    dygraph and PIR, ``paddle.amp.amp_lists`` fused ones (2.6, 3.x). Can go when ``auto_cast``
    refuses what it does not know.
    """
    lists = [value for value in vars(paddle.amp.amp_lists).values() if isinstance(value, set)]
    operators = [name for name in dir(paddle._C_ops) if not name.startswith("_")]
    return frozenset(core.get_all_op_names()).union(operators, *lists)


# --------------------------------------------------------------------------- the backward pass


@dataclass
class Backward:
    """One call of the autograd engine.

    Attributes:
        retain_graph: What the caller asked for.
        partial: True under ``paddle.grad``, False under ``backward()``.
        error: The Python exception that a hook raised, for `watch_backward` to hand on.
        at_end: Called, each once, when the engine has ended.
    """

    retain_graph: bool
    partial: bool
    error: BaseException | None = None
    at_end: dict[int, Callable[[], None]] = field(default_factory=dict)


class _Running(threading.local):
    """The engine calls of a thread. The engine calls hooks in the thread that called it."""

    def __init__(self) -> None:
        self.calls: list[Backward] = []


_running = _Running()


def current_backward() -> Backward | None:
    """The innermost engine call that is running in this thread; None outside of any, or before
    `watch_backward` was called.
    """
    return _running.calls[-1] if _running.calls else None


def hand_on(error: BaseException) -> None:
    """Let `error`, raised inside the engine, reach the engine's caller as itself."""
    backward = current_backward()
    if backward is not None and backward.error is None:
        backward.error = error


@functools.cache
def watch_backward() -> None:
    """From now on, a Python exception inside the engine reaches the caller as itself.

    Paddle's C++ engine (2.6, 3.x) turns an exception of a saved-tensor hook or a PyLayer into an
    ``OSError`` whose text alone remembers it. All public ways into the engine (``Tensor.backward``,
    ``paddle.autograd.backward``, ``paddle.grad``) look up ``core.eager.run_backward`` or
    ``run_partial_grad`` at each call, so these two are wrapped, once. They also tell what was
    asked for (`Backward`), which no public API does. Can go when the engine lets Python exceptions
    through.
    """
    core.eager.run_backward = _watched(core.eager.run_backward, partial=False, position=2)
    core.eager.run_partial_grad = _watched(core.eager.run_partial_grad, partial=True, position=3)


def _watched(engine: Callable[..., Any], *, partial: bool, position: int) -> Callable[..., Any]:
    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        retain = kwargs.get("retain_graph", args[position] if len(args) > position else False)
        call = Backward(bool(retain), partial)
        grad_enabled = paddle.is_grad_enabled()
        _running.calls.append(call)
        try:
            return engine(*args, **kwargs)
        except OSError as opaque:
            # Taken out of `call`, and deleted: the traceback holds this frame, so a name here
            # would be a reference cycle through everything that the error has passed.
            error, call.error = call.error, None
            if error is None:
                raise
            # The engine leaves the grad mode of the hook that failed (seen on 2.6.2 and 3.3.1).
            framework._dygraph_tracer()._has_grad = grad_enabled
            try:
                raise error from error.__cause__ or opaque
            finally:
                del error
        finally:
            _running.calls.pop()
            for end in call.at_end.values():
                end()

    return run


# ---------------------------------------------------------------------------- hooks of leaves


@dataclass
class _HookedLeaf:
    """A leaf that has, or had, hooks; `number` is the id of the next one."""

    tensor: weakref.ref[paddle.Tensor]
    number: int = 0
    has_hooks: bool = False
    has_unwatched: bool = False


_register_grad_hook = core.eager.Tensor._register_grad_hook
_hooked: dict[int, _HookedLeaf] = {}
_muted = threading.local()


@functools.cache
def watch_leaf_hooks() -> None:
    """From now on, hooks that are registered on leaves can be made to wait (`muted_leaf_hooks`).

    Paddle (2.6, 3.x) runs them at the end of each backward, and has no way to list them or to hold
    them back. ``Tensor.register_hook`` and fleet both end in ``_register_grad_hook`` of
    ``core.eager.Tensor``, which is wrapped, once. Can go when a backward through several graphs can
    add up before a parameter's hooks run.
    """
    register = _register_grad_hook

    @functools.wraps(register)
    def watched(tensor: paddle.Tensor, hook: Callable[[Any], Any]) -> int:
        if tensor.stop_gradient or not tensor.is_leaf:
            return int(register(tensor, hook))
        key = id(tensor)

        def unless_muted(gradient: Any) -> Any:
            return None if key in getattr(_muted, "keys", ()) else hook(gradient)

        leaf = _hooked_leaf(tensor)
        leaf.number, leaf.has_hooks = leaf.number + 1, True
        return int(register(tensor, unless_muted))

    core.eager.Tensor._register_grad_hook = watched


def _hooked_leaf(tensor: paddle.Tensor) -> _HookedLeaf:
    key = id(tensor)
    if key not in _hooked:
        _hooked[key] = _HookedLeaf(weakref.ref(tensor, lambda _: _hooked.pop(key, None)))
    return _hooked[key]


def has_unwatched_hooks(tensor: paddle.Tensor) -> bool:
    """Whether `tensor` has had a hook before `watch_leaf_hooks` was called, even if it is gone.

    Paddle numbers the hooks of a tensor from 0 on (2.6, 3.x), so the number of one more tells.
    """
    leaf = _hooked_leaf(tensor)
    number = int(_register_grad_hook(tensor, lambda gradient: None))
    tensor._remove_grad_hook(number)
    leaf.has_unwatched = leaf.has_unwatched or number > leaf.number
    leaf.number = number + 1
    return leaf.has_unwatched


def leaves_with_hooks() -> list[paddle.Tensor]:
    """The leaves that have had a hook since `watch_leaf_hooks`, in the order of the first ones."""
    found = [leaf.tensor() for leaf in list(_hooked.values()) if leaf.has_hooks]
    return [one for one in found if one is not None and one.is_leaf and not one.stop_gradient]


@contextlib.contextmanager
def muted_leaf_hooks(tensors: list[paddle.Tensor]) -> Iterator[None]:
    """Inside, in this thread, no hook of `tensors` runs: gradients are added up as they are."""
    before: frozenset[int] = getattr(_muted, "keys", frozenset())
    _muted.keys = before | {id(tensor) for tensor in tensors}
    try:
        yield
    finally:
        _muted.keys = before


# ------------------------------------------------------------------------------- distributed


def init_parallel_env() -> None:
    """``dist.init_parallel_env`` without a list of flags that nobody has modified.

    It writes every flag that differs from its default to ``sys.stderr`` (2.6, 3.x), and 3.x sets
    one itself as it is imported, so each rank of each run shows a block about it. Flags that the
    user has set are still shown. Can go when Paddle leaves its own out.
    """
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            dist.init_parallel_env()
    finally:
        sys.stderr.write(without_own_flags(written.getvalue()))


def without_own_flags(text: str) -> str:
    """`text` less what it says about flags that Paddle has modified itself."""
    for name in FLAGS_SET_BY_PADDLE - os.environ.keys():
        text = re.sub(rf"^FLAGS\(name='{name}'.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^=+ Modified FLAGS detected =+\n=+\n", "", text, flags=re.MULTILINE)


FLAGS_SET_BY_PADDLE = {"FLAGS_enable_pir_in_executor"}


def on_gradient_added(parameter: paddle.Tensor, call: Callable[[], None]) -> None:
    """Call `call` after each time that a backward has added to ``parameter.grad``.

    ``_register_backward_hook`` (2.6, 3.x) is what Paddle's own sharding uses; the public
    ``register_hook`` runs *before* the addition and never for the PyLayer form's inner backward.
    Such a hook cannot be removed: it lives as long as the parameter.
    """

    def added(*_: object) -> None:
        call()

    parameter._register_backward_hook(added)


@functools.cache
def make_unscaling_visible() -> None:
    """From now on, what `paddle.amp.GradScaler` unscales in place has another ``inplace_version``.

    ``_legacy_C_ops.check_finite_and_unscale`` (2.6, 3.x; fleet's scaler calls it too) writes to the
    gradients without raising it, unlike other operators, so nobody could tell. It is looked up at
    each call, so it is wrapped, once. Can go when the kernel raises the version.
    """
    unscale = paddle._legacy_C_ops.check_finite_and_unscale

    @functools.wraps(unscale)
    def run(gradients: list[paddle.Tensor], *args: Any, **kwargs: Any) -> Any:
        result = unscale(gradients, *args, **kwargs)
        for gradient in gradients:
            gradient._bump_inplace_version()
        return result

    paddle._legacy_C_ops.check_finite_and_unscale = run


def at_end_of_backward(owner: object, call: Callable[[], None]) -> None:
    """Have `call` called, once for each `owner`, when the outermost running backward has ended.

    Does nothing outside of any. Needs `watch_backward`.
    """
    if _running.calls:
        _running.calls[0].at_end.setdefault(id(owner), call)


def keeps_main_grad(parameter: paddle.Tensor) -> bool:
    """Whether fleet's ``MixPrecisionLayer`` (2.6, 3.x) keeps the gradient of `parameter` in its
    attribute ``main_grad``, and ``.grad`` None.
    """
    return hasattr(parameter, "main_grad")


def make_gloo_group(ranks: tuple[int, ...], number: int) -> Group:
    """A gloo group of `ranks`, made by them alone, who meet under `number`; called on each of them.

    ``core.ProcessGroupGloo.create`` (2.6, 3.x) is what ``dist.new_group`` calls with a number that
    it counts up on each rank, for which every rank of the run must call it. Waits for the others,
    without the GIL. Can go when a group can be made by its members.
    """
    store = core.create_or_get_global_tcp_store()
    place = ranks.index(dist.get_rank())
    made = core.ProcessGroupGloo.create(store, place, len(ranks), number)
    return Group(place, number, list(ranks), pg=made, name=f"paddle_recompute_{number}")


def is_from_gloo(error: BaseException) -> bool:
    """Whether a gloo collective has raised `error`.

    It is a RuntimeError or ValueError like others (2.6, 3.x); what tells it apart is the source
    file that its text begins with.
    """
    return "gloo/transport/" in str(error)


def master_host() -> str:
    """Name or address of the machine of rank 0, where the launch's TCP store listens.

    What ``init_parallel_env`` (2.6, 3.x) reads; the store itself does not tell where it is.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = f"{address}:{port}" if address and port else os.environ.get("PADDLE_MASTER")
    if endpoint is None:
        endpoint = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    return endpoint.split(":")[0]


def store_publish(key: str, value: str) -> None:
    """Put `value` under `key` into the launch's TCP store, for `store_await` on other ranks.

    ``core.create_or_get_global_tcp_store`` (2.6, 3.x) is how Paddle itself reaches the store; there
    is no public way. One operation takes 43 ms, so it is for what is told once.
    """
    store = core.create_or_get_global_tcp_store()
    store.set(key, value)
    store.add(f"{key}/published", 1)


def store_await(key: str) -> str:
    """What a rank has published under `key`; waits for it, for ever.

    Polls: the store's own ``wait`` and ``get`` (2.6, 3.x) end the process after 15 minutes. A
    RuntimeError says that the store, which is in rank 0, is gone.
    """
    store = core.create_or_get_global_tcp_store()
    while not store.add(f"{key}/published", 0):
        time.sleep(0.05)
    return str(store.get(key).decode())


# ------------------------------------------------------------------- translated bytecode


def never_translate(what: Any) -> None:
    """Keep `paddle.jit.to_static` (``full_graph=False``) from looking into `what`.

    Its bytecode translator follows every call, and cannot follow the machinery of recompute. At a
    call of `what`, a function or a Layer class, the graph ends: `what` runs as Python, and a new
    graph begins behind it. ``jit.marker.force_dynamic`` (3.x); 2.6 has nothing for user classes,
    and there the translator fails over our code with an error of its own.
    """
    marker = getattr(paddle.jit, "marker", None)
    if marker is not None:
        marker.force_dynamic(what)


@functools.cache
def never_translate_files_below(directory: str) -> None:
    """The same for every function whose file is below `directory`.

    ``core.eval_frame_skip_file_prefix`` (2.6, 3.x) is how Paddle keeps its own files out; it adds
    to the prefixes that are known already.
    """
    core.eval_frame_skip_file_prefix((directory,))


set_translator: Callable[[Any], Any] = core.set_eval_frame
"""Make another function translate bytecode in this thread, None: nobody; returns the one before.

What `to_static` would compile inside a recomputed function keeps its activations in a scope of its
own, where no saved-tensor hook sees them. ``core.set_eval_frame`` (2.6, 3.x) is what the translator
itself begins and ends with. An alias, not a function: a Python frame of its own would be
translated, and the translator is back in place when such a frame ends.
"""


# ---------------------------------------------------------------------------------- memory


def host_memory(kind: str) -> int:
    """Bytes that Paddle's CPU allocator holds: `kind` is ``"current"`` or ``"peak"``.

    ``host_memory_stat_*`` (2.6, 3.x) are the only counters for the CPU; the public
    ``paddle.device.cuda.max_memory_allocated`` is for GPUs alone.
    """
    read = getattr(core, f"host_memory_stat_{kind}_value")
    return int(read("Allocated", 0))


def can_reset_host_memory_peak() -> bool:
    """Whether the CPU's peak can start anew: from 3.0 on, not on 2.6."""
    return hasattr(core, "host_memory_stat_reset_peak_value")


def reset_host_memory_peak() -> None:
    """Start a new peak at the bytes held now (``host_memory_stat_reset_peak_value``; 3.x)."""
    core.host_memory_stat_reset_peak_value("Allocated", 0)
