"""The loops of `leaks`: what people do around a recomputed model, step after step."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer

from benchmarks.memory._leak_blocks import (
    ROWS,
    WIDTH,
    Block,
    Cached,
    Failing,
    Model,
    Router,
    SavesBoth,
    SavesInput,
    SavesOutput,
    Smooth,
    entropy,
)
from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    GradientSync,
    OffloadSequential,
    RecomputeConfig,
    TrainStep,
    apply_recompute,
    compile_model,
    estimate,
    plan,
    recompute,
    recompute_wrapper,
)
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import OffloadError

Step = Callable[[], object]
Run = Callable[..., Any]
LOOPS: dict[str, Callable[[bool], Step | None]] = {}
"""By title: ``make(ours)`` returns the step, plain or ours; None where there is none."""


def loop(title: str) -> Callable[[Callable[[bool], Step | None]], Callable[[bool], Step | None]]:
    """Add a loop."""

    def add(make: Callable[[bool], Step | None]) -> Callable[[bool], Step | None]:
        LOOPS[title] = make
        return make

    return add


def plainly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The plain call, in the place of `recompute`."""
    del options
    return function(*args)


def of(ours: bool) -> Run:
    """What calls a function."""
    return recompute if ours else plainly


def rows(*shape: int) -> paddle.Tensor:
    """A leaf that needs a gradient."""
    tensor = paddle.randn([*(shape or (ROWS, WIDTH))])
    tensor.stop_gradient = False
    return tensor


def wrapped(ours: bool, model: Any, **options: Any) -> Any:
    """`model`, its blocks recomputed if `ours`."""
    if ours:
        apply_recompute(model, RecomputeConfig(checkpoints=["blocks.*"], **options))
    return model


def trained(model: paddle.nn.Layer, *args: paddle.Tensor) -> None:
    """A forward and a backward of `model`."""
    model(*(args or (rows(),))).square().mean().backward()
    model.clear_gradients()


# ------------------------------------------------------------------------- what a block computes

STATISTICS: dict[str, Callable[[paddle.Tensor], Any]] = {
    "float(h.abs().max())": lambda h: float(h.abs().max()),
    "float(h.std())": lambda h: float(h.std()),
    "float(h.norm())": lambda h: float(h.norm()),
    "an entropy": lambda h: float(entropy(h)),
    "a histogram of h.detach()": lambda h: paddle.histogram(h.detach(), 8).numpy(),
    "float(einsum(h, h))": lambda h: float(paddle.einsum("ij,ij->", h, h)),
    "the output of an LSTM": None,  # type: ignore[dict-item]
}


def _logging(title: str, statistic: Callable[[paddle.Tensor], Any] | None) -> None:
    @loop(f"a block logs {title}")
    def make(ours: bool) -> Step:
        block, run = Block(), of(ours)
        lstm = paddle.nn.LSTM(WIDTH, WIDTH)
        log = statistic or (lambda h: float(lstm(h.unsqueeze(0))[0].max()))

        def function(x: paddle.Tensor) -> paddle.Tensor:
            h = block(x)
            log(h)
            return h

        def step() -> None:
            run(function, rows() * 2).square().mean().backward()
            block.clear_gradients()

        return step


for _title, _statistic in STATISTICS.items():
    _logging(_title, _statistic)


def _of_block(title: str, make_block: Callable[[], Any], *, backward: bool = True) -> None:
    @loop(title)
    def make(ours: bool) -> Step:
        block, run = make_block(), of(ours)

        def step() -> None:
            y = run(block, rows() * 2)
            if backward:
                y.square().mean().backward()
                block.clear_gradients()

        return step


class _OfSequence(paddle.nn.Layer):
    def __init__(self, kind: type[paddle.nn.Layer]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.inner(x.reshape([8, -1, WIDTH]))[0]


class _OfPyLayer(paddle.nn.Layer):
    def __init__(self, kind: type[PyLayer]) -> None:
        super().__init__()
        self.inner, self.kind = Block(), kind

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.kind.apply(self.inner(x))


class _OfNorm(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.nn.Sequential(
            paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.BatchNorm1D(WIDTH), paddle.nn.Dropout(0.1)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.inner(x)


_of_block("a block, forward and backward", Block)
_of_block("a forward without a backward", Block, backward=False)
_of_block("BatchNorm and Dropout", _OfNorm)
_of_block("LSTM", lambda: _OfSequence(paddle.nn.LSTM))
_of_block("GRU", lambda: _OfSequence(paddle.nn.GRU))
_of_block("LSTM, without a backward", lambda: _OfSequence(paddle.nn.LSTM), backward=False)
_of_block("a PyLayer saves its input", lambda: _OfPyLayer(SavesInput))
_of_block("a PyLayer saves its output", lambda: _OfPyLayer(SavesOutput))
_of_block("a PyLayer saves both", lambda: _OfPyLayer(SavesBoth))
_of_block(
    "a PyLayer saves its output, without a backward",
    lambda: _OfPyLayer(SavesOutput),
    backward=False,
)


@loop("a block stores a loss that is looked at")
def _stores_looked_at(ours: bool) -> Step:
    model = paddle.nn.Sequential(Router(), Router())
    if ours:
        for block in model:
            recompute_wrapper(block)
    return lambda: trained(model)


@loop("a block stores a loss that is trained on")
def _stores_trained(ours: bool) -> Step:
    model = paddle.nn.Sequential(Router(), Router())
    if ours:
        for block in model:
            recompute_wrapper(block)

    def step() -> None:
        y = model(rows())
        (y.mean() + model[0].loss + model[1].loss).backward()
        model.clear_gradients()

    return step


# ------------------------------------------------------------------------- how gradients are asked


def _asking(
    title: str, make_block: Callable[[], Any] = Block
) -> Callable[[Callable[[Any, Run], object]], object]:
    def add(step: Callable[[Any, Run], object]) -> object:
        @loop(title)
        def make(ours: bool) -> Step:
            block = make_block()

            def stepped() -> None:
                step(block, of(ours))
                block.clear_gradients()

            return stepped

        return make

    return add


@_asking("paddle.grad")
def _grad(block: Block, run: Run) -> None:
    x = rows()
    paddle.grad(run(block, x * 2).square().sum(), [x])


@_asking("paddle.grad of the last of three blocks")
def _grad_inside(block: Block, run: Run) -> None:
    h = run(block, run(block, rows() * 2))
    paddle.grad(run(block, h).square().sum(), [h])


@_asking("paddle.grad(retain_graph=True), then backward")
def _grad_then_backward(block: Block, run: Run) -> None:
    x = rows()
    y = run(block, x * 2).square().sum()
    paddle.grad(y, [x], retain_graph=True)
    y.backward()


@_asking("paddle.grad(create_graph=True), then backward", Smooth)
def _create_graph(block: Block, run: Run) -> None:
    x = rows()
    (gradient,) = paddle.grad(run(block, x * 2).square().sum(), [x], create_graph=True)
    gradient.square().sum().backward()


@_asking("paddle.grad(create_graph=True), without a backward", Smooth)
def _create_graph_dropped(block: Block, run: Run) -> None:
    x = rows()
    paddle.grad(run(block, x * 2).square().sum(), [x], create_graph=True)


@_asking("backward(retain_graph=True), then backward")
def _retain(block: Block, run: Run) -> None:
    y = run(block, rows() * 2).square().sum()
    y.backward(retain_graph=True)
    y.backward()


@_asking("backward(retain_graph=True) alone")
def _retain_alone(block: Block, run: Run) -> None:
    run(block, rows() * 2).square().sum().backward(retain_graph=True)


@_asking("two outputs, one of them dropped")
def _two_outputs(block: Block, run: Run) -> None:
    y, z = run(lambda x: (block(x).exp(), block(x).tanh()), rows() * 2)
    del z
    y.mean().backward()


@_asking("an exception in the forward")
def _fails(block: Block, run: Run) -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        block(x)
        raise KeyError

    with contextlib.suppress(KeyError):
        run(function, rows() * 2)


@_asking("an exception in the backward")
def _fails_later(block: Block, run: Run) -> None:
    with contextlib.suppress(KeyError, OSError):
        run(lambda x: block(Failing.apply(block(x))), rows() * 2).mean().backward()


@_asking("an exception in the second forward")
def _fails_again(block: Block, run: Run) -> None:
    calls = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        h = block(x)
        if len(calls) == 2:
            raise KeyError
        return h

    with contextlib.suppress(KeyError, OSError):
        y = run(function, rows() * 2)
        (Failing.apply(y) if run is plainly else y).mean().backward()


@_asking("nested")
def _nested(block: Block, run: Run) -> None:
    run(lambda x: run(block, x).tanh(), rows() * 2).mean().backward()


@_asking("nested, the inner one logs float(h.std())")
def _nested_logging(block: Block, run: Run) -> None:
    def inner(x: paddle.Tensor) -> paddle.Tensor:
        h = block(x)
        float(h.std())
        return h

    run(lambda x: run(inner, x).tanh(), rows() * 2).mean().backward()


@_asking("hooks on activations")
def _hooks(block: Block, run: Run) -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = block(x)
        h.register_hook(lambda gradient: gradient * 2)
        return h.tanh()

    y = run(function, rows() * 2)
    y.register_hook(lambda gradient: None)
    y.mean().backward()


@_asking("hooks of Layers and parameters, added and removed")
def _layer_hooks(block: Block, run: Run) -> None:
    after = block.register_forward_post_hook(lambda layer, inputs, output: output * 2)
    ofp = block.linear.weight.register_hook(lambda gradient: gradient * 2)
    run(block, rows() * 2).mean().backward()
    after.remove()
    ofp.remove()


@_asking("auto_cast O1 and GradScaler")
def _amp(block: Block, run: Run) -> None:
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        y = run(block, rows() * 2).mean()
    scaler.scale(y).backward()


@_asking("inputs on disk")
def _on_disk(block: Block, run: Run) -> None:
    run(block, rows() * 2, offload="disk").mean().backward()


@_asking('determinism_check="values"')
def _values(block: Block, run: Run) -> None:
    run(block, rows() * 2, determinism_check="values").mean().backward()


@_asking("in another thread")
def _in_thread(block: Block, run: Run) -> None:
    def work() -> None:
        y = run(block, rows() * 2)
        float(y.std())
        y.mean().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# ------------------------------------------------------------------------------- a model's life


@loop("an output that stays until the next step")
def _output_stays(ours: bool) -> Step:
    model, kept = wrapped(ours, Model()), []

    def step() -> None:
        kept[:] = [model(rows()).square().mean()]
        kept[0].backward()
        model.clear_gradients()

    return step


@loop("a model, parts of its blocks")
def _parts(ours: bool) -> Step:
    model = Model()
    if ours:
        apply_recompute(model, RecomputeConfig(checkpoints=["blocks.*.act", "blocks.*.norm"]))
    return lambda: trained(model)


@loop("apply_recompute and unwrap in each step")
def _wraps(ours: bool) -> Step:
    model = Model()

    def step() -> None:
        wrapped(ours, model)
        trained(model)
        if ours:
            for block in model.blocks:
                block.unwrap()

    return step


@loop("apply_recompute and unwrap, without a step")
def _wraps_alone(ours: bool) -> Step:
    model = Model()

    def step() -> None:
        wrapped(ours, model)
        if ours:
            for block in model.blocks:
                block.unwrap()

    return step


@loop("deepcopy of a model, which is trained")
def _copies(ours: bool) -> Step:
    model = wrapped(ours, Model())

    def step() -> None:
        trained(model)
        trained(copy.deepcopy(model))

    return step


@loop("state_dict and set_state_dict")
def _state(ours: bool) -> Step:
    model = wrapped(ours, Model())

    def step() -> None:
        trained(model)
        model.set_state_dict(copy.deepcopy(model.state_dict()))

    return step


@loop("eval() and no_grad in the middle of a step")
def _evaluates(ours: bool) -> Step:
    model = wrapped(ours, Model())

    def step() -> None:
        y = model(rows())
        model.eval()
        with paddle.no_grad():
            model(rows())
        model(rows())
        model.train()
        y.mean().backward()
        model.clear_gradients()

    return step


@loop("generation with a cache under no_grad")
def _generates(ours: bool) -> Step:
    model = Cached()
    if ours:
        recompute_wrapper(model)

    def step() -> None:
        cache: list[paddle.Tensor] = []
        with paddle.no_grad():
            for _ in range(4):
                model(rows(2, WIDTH), cache)
        trained(model, rows(), [])

    return step


@loop("freezing and unfreezing")
def _freezes(ours: bool) -> Step:
    model = wrapped(ours, Model())

    def step() -> None:
        for flag in (True, False):
            for parameter in model.blocks[0].parameters():
                parameter.stop_gradient = flag
            trained(model)

    return step


@loop("a new model in each step")
def _builds(ours: bool) -> Step:
    return lambda: trained(wrapped(ours, Model()))


# ------------------------------------------------------------------------ the other parts of ours


def _optimizer(model: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(1e-3, parameters=model.parameters())


@loop("TrainStep, two micro-batches")
def _train_step(ours: bool) -> Step:
    model = wrapped(ours, Model())
    optimizer = _optimizer(model)
    if ours:
        loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
        step = TrainStep(model, optimizer, loss_fn=loss_fn, accumulate_steps=2)
        return lambda: step([rows(), rows()])

    def plain() -> None:
        for _ in range(2):
            (model(rows()).square().mean() / 2).backward()
        optimizer.step()
        optimizer.clear_grad()

    return plain


@loop("TrainStep, its state saved and loaded")
def _train_step_state(ours: bool) -> Step | None:
    if not ours:
        return None
    model = wrapped(ours, Model())
    step = TrainStep(model, _optimizer(model), loss_fn=lambda model, x: model(x).square().mean())

    def stepped() -> None:
        step([rows()])
        step.set_state_dict(copy.deepcopy(step.state_dict()))

    return stepped


@loop("GradCache")
def _grad_cache(ours: bool) -> Step:
    model, loss = wrapped(ours, Model()), ContrastiveLoss(0.05, normalize=True)
    cache = GradCache(model, loss, chunk_size=ROWS // 2)
    query, positive = paddle.randn([ROWS, WIDTH]), paddle.randn([ROWS, WIDTH])

    def step() -> None:
        if ours:
            cache.backward(query, positive)
        else:
            loss(model(query), model(positive)).backward()
        model.clear_gradients()

    return step


@loop("GradientSync on one process, its state saved and loaded")
def _sync(ours: bool) -> Step:
    model = wrapped(ours, Model())
    sync = GradientSync(model) if ours else None

    def step() -> None:
        with sync.last_backward() if sync else contextlib.nullcontext():
            model(rows()).mean().backward()
        if sync:
            sync.set_state_dict(sync.state_dict())
        model.clear_gradients()

    return step


def _chain(ours: bool) -> Any:
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return OffloadSequential(layers, num_shards=2) if ours else paddle.nn.Sequential(*layers)


@loop("OffloadSequential, forward and backward")
def _offload(ours: bool) -> Step:
    model = _chain(ours)
    optimizer = model.optimizer(lambda ps: paddle.optimizer.SGD(1e-3, ps)) if ours else None
    optimizer = optimizer or paddle.optimizer.SGD(1e-3, model.parameters())

    def step() -> None:
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    return step


@loop("OffloadSequential, without a backward")
def _offload_dropped(ours: bool) -> Step:
    model = _chain(ours)
    return lambda: model(rows())


@loop("OffloadSequential.state_dict()")
def _offload_state(ours: bool) -> Step:
    model = _chain(ours)
    return lambda: copy.deepcopy(model.state_dict()) if not ours else model.state_dict()


@loop("OffloadSequential.set_state_dict()")
def _offload_set_state(ours: bool) -> Step:
    model = _chain(ours)
    return lambda: model.set_state_dict(model.state_dict())


@loop("deepcopy of an OffloadSequential, which is refused")
def _offload_copied(ours: bool) -> Step:
    model = _chain(ours)

    def step() -> None:
        with contextlib.suppress(OffloadError):
            copy.deepcopy(model)

    return step


@loop("a new OffloadSequential in each step")
def _offload_new(ours: bool) -> Step:
    return lambda: trained(_chain(ours))


@loop("a compiled model")
def _compiled(ours: bool) -> Step:
    model = wrapped(ours and paddle_version() >= (3, 0, 0), Model())
    if ours:
        compile_model(model, [paddle.static.InputSpec([-1, WIDTH], "float32")])
    else:
        model = paddle.jit.to_static(model, full_graph=True)
    return lambda: trained(model, paddle.randn([ROWS, WIDTH]))


def _planned(title: str, step: Callable[..., object]) -> None:
    @loop(title)
    def make(ours: bool) -> Step | None:
        if not ours or paddle_version() < (3, 0, 0):
            return None  # 2.6 cannot start a peak anew
        model, x = Model(SavesOutput), paddle.randn([ROWS, WIDTH])
        return lambda: step(model, x, lambda model, x: model(x).square().mean())


_planned("estimate, a PyLayer saves its output", estimate)
_planned(
    "plan, a PyLayer saves its output",
    lambda *job: plan(*job, memory_budget="1GiB", verify=False),
)
