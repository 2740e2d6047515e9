"""The loops of `leaks`: what people do around a recomputed model, step after step."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import paddle

from benchmarks.memory._leak_blocks import (
    ROWS,
    WIDTH,
    Block,
    Cached,
    Failing,
    Model,
    Norm,
    Router,
    SavesBoth,
    SavesInput,
    SavesOutput,
    Sequence,
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
Make = Callable[[bool], Step | None]
Run = Callable[..., Any]
LOOPS: dict[str, Make] = {}
"""By title: ``make(ours)`` returns the step, plain or ours; None where there is none."""


def loop(title: str) -> Callable[[Make], Make]:
    """Add a loop."""

    def add(make: Make) -> Make:
        LOOPS[title] = make
        return make

    return add


def loop_of(
    title: str, make: Callable[[bool], Any], *, clear: bool = True
) -> Callable[[Callable[[Any, Any], object]], None]:
    """Add a loop over ``step(model, of ours)``, which may leave gradients.

    The model of ``make(ours)`` stays, and `of ours` is what calls a function: `recompute` or
    `plainly`.
    """

    def add(step: Callable[[Any, Any], object]) -> None:
        @loop(title)
        def made(ours: bool) -> Step:
            model = make(ours)

            def stepped() -> None:
                step(model, recompute if ours else plainly)
                if clear:
                    model.clear_gradients()

            return stepped

    return add


def asking(title: str, make_block: Callable[[], Any] = Block) -> Any:
    """`loop_of` a block that the step itself recomputes."""
    return loop_of(title, lambda ours: make_block())


def modelled(title: str, make_block: Callable[[], Any] = Block) -> Any:
    """`loop_of` a model whose blocks are wrapped."""
    return loop_of(title, lambda ours: wrapped(ours, Model(make_block)))


def plainly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The plain call, in the place of `recompute`."""
    del options
    return function(*args)


def rows(*shape: int) -> paddle.Tensor:
    """A leaf that needs a gradient."""
    tensor = paddle.randn([*(shape or (ROWS, WIDTH))])
    tensor.stop_gradient = False
    return tensor


def wrapped(ours: bool, model: Any, *checkpoints: str) -> Any:
    """`model`, its blocks recomputed if `ours`."""
    if ours:
        apply_recompute(model, RecomputeConfig(checkpoints=[*(checkpoints or ("blocks.*",))]))
    return model


def mean_square(model: Any, x: paddle.Tensor) -> paddle.Tensor:
    """A loss."""
    return model(x).square().mean()


def trained(model: paddle.nn.Layer, *args: Any) -> None:
    """A forward and a backward of `model`."""
    model(*(args or (rows(),))).square().mean().backward()
    model.clear_gradients()


# ------------------------------------------------------------------------- what a block computes


def _logging(title: str, log: Callable[[paddle.Tensor], Any]) -> None:
    @asking(f"a block logs {title}")
    def step(block: Block, run: Run) -> None:
        def function(x: paddle.Tensor) -> paddle.Tensor:
            h = block(x)
            log(h)
            return h

        run(function, rows() * 2).square().mean().backward()


_logging("float(h.abs().max())", lambda h: float(h.abs().max()))
_logging("float(h.std())", lambda h: float(h.std()))
_logging("float(h.norm())", lambda h: float(h.norm()))
_logging("an entropy", lambda h: float(entropy(h)))
_logging("a histogram of h.detach()", lambda h: paddle.histogram(h.detach(), 8).numpy())
_logging("float(einsum(h, h))", lambda h: float(paddle.einsum("ij,ij->", h, h)))


class _LogsAnLSTM(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = paddle.nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = super().forward(x)
        float(self.lstm(h.unsqueeze(0))[0].max())
        return h


def _of_block(title: str, make_block: Callable[[], Any], *, backward: bool = True) -> None:
    @asking(title, make_block)
    def step(block: Any, run: Run) -> None:
        y = run(block, rows() * 2)
        if backward:
            y.square().mean().backward()


_of_block("a block logs the output of an LSTM", _LogsAnLSTM)
_of_block("a block, forward and backward", Block)
_of_block("a forward without a backward", Block, backward=False)
_of_block("BatchNorm and Dropout", Norm)
_of_block("LSTM", partial(Sequence, paddle.nn.LSTM))
_of_block("GRU", partial(Sequence, paddle.nn.GRU))
_of_block("LSTM, without a backward", partial(Sequence, paddle.nn.LSTM), backward=False)
_of_block("a PyLayer saves its input", partial(Block, SavesInput))
_of_block("a PyLayer saves its output", partial(Block, SavesOutput))
_of_block("a PyLayer saves both", partial(Block, SavesBoth))
_of_block(
    "a PyLayer saves its output, without a backward", partial(Block, SavesOutput), backward=False
)


@modelled("a block stores a loss that is looked at", Router)
def _stores_looked_at(model: Model, run: Run) -> None:
    trained(model)


@modelled("a block stores a loss that is trained on", Router)
def _stores_trained(model: Model, run: Run) -> None:
    y = model(rows())
    (y.mean() + sum(block.loss for block in model.blocks)).backward()


# ------------------------------------------------------------------------- how gradients are asked


@asking("paddle.grad")
def _grad(block: Block, run: Run) -> None:
    x = rows()
    paddle.grad(run(block, x * 2).square().sum(), [x])


@asking("paddle.grad of the last of three blocks")
def _grad_inside(block: Block, run: Run) -> None:
    h = run(block, run(block, rows() * 2))
    paddle.grad(run(block, h).square().sum(), [h])


@asking("paddle.grad(retain_graph=True), then backward")
def _grad_then_backward(block: Block, run: Run) -> None:
    x = rows()
    y = run(block, x * 2).square().sum()
    paddle.grad(y, [x], retain_graph=True)
    y.backward()


@asking("paddle.grad(create_graph=True), then backward", Smooth)
def _create_graph(block: Block, run: Run) -> None:
    x = rows()
    (gradient,) = paddle.grad(run(block, x * 2).square().sum(), [x], create_graph=True)
    gradient.square().sum().backward()


@asking("paddle.grad(create_graph=True), without a backward", Smooth)
def _create_graph_dropped(block: Block, run: Run) -> None:
    x = rows()
    paddle.grad(run(block, x * 2).square().sum(), [x], create_graph=True)


@asking("backward(retain_graph=True), then backward")
def _retain(block: Block, run: Run) -> None:
    y = run(block, rows() * 2).square().sum()
    y.backward(retain_graph=True)
    y.backward()


@asking("backward(retain_graph=True) alone")
def _retain_alone(block: Block, run: Run) -> None:
    run(block, rows() * 2).square().sum().backward(retain_graph=True)


@asking("two outputs, one of them dropped")
def _two_outputs(block: Block, run: Run) -> None:
    y, z = run(lambda x: (block(x).exp(), block(x).tanh()), rows() * 2)
    del z
    y.mean().backward()


@asking("an exception in the forward")
def _fails(block: Block, run: Run) -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        block(x)
        raise KeyError

    with contextlib.suppress(KeyError):
        run(function, rows() * 2)


@asking("an exception in the backward")
def _fails_later(block: Block, run: Run) -> None:
    with contextlib.suppress(KeyError, OSError):
        run(lambda x: block(Failing.apply(block(x))), rows() * 2).mean().backward()


@asking("an exception in the second forward")
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


@asking("nested")
def _nested(block: Block, run: Run) -> None:
    run(lambda x: run(block, x).tanh(), rows() * 2).mean().backward()


@asking("nested, the inner one logs float(h.std())")
def _nested_logging(block: Block, run: Run) -> None:
    def inner(x: paddle.Tensor) -> paddle.Tensor:
        h = block(x)
        float(h.std())
        return h

    run(lambda x: run(inner, x).tanh(), rows() * 2).mean().backward()


@asking("hooks on activations")
def _hooks(block: Block, run: Run) -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = block(x)
        h.register_hook(lambda gradient: gradient * 2)
        return h.tanh()

    y = run(function, rows() * 2)
    y.register_hook(lambda gradient: None)
    y.mean().backward()


@asking("hooks of Layers and parameters, added and removed")
def _layer_hooks(block: Block, run: Run) -> None:
    after = block.register_forward_post_hook(lambda layer, inputs, output: output * 2)
    of_weight = block.linear.weight.register_hook(lambda gradient: gradient * 2)
    run(block, rows() * 2).mean().backward()
    after.remove()
    of_weight.remove()


@asking("auto_cast O1 and GradScaler")
def _amp(block: Block, run: Run) -> None:
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        y = run(block, rows() * 2).mean()
    scaler.scale(y).backward()


@asking("inputs on disk")
def _on_disk(block: Block, run: Run) -> None:
    run(block, rows() * 2, offload="disk").mean().backward()


@asking('determinism_check="values"')
def _values(block: Block, run: Run) -> None:
    run(block, rows() * 2, determinism_check="values").mean().backward()


@asking("in another thread")
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
        kept[:] = [mean_square(model, rows())]
        kept[0].backward()
        model.clear_gradients()

    return step


@loop_of(
    "a model, parts of its blocks",
    lambda ours: wrapped(ours, Model(), "blocks.*.act", "blocks.*.norm"),
)
def _parts(model: Model, run: Run) -> None:
    trained(model)


@asking("apply_recompute and unwrap in each step", Model)
def _wraps(model: Model, run: Run) -> None:
    wrapped(run is recompute, model)
    trained(model)
    _unwrap(model, run)


@asking("apply_recompute and unwrap, without a step", Model)
def _wraps_alone(model: Model, run: Run) -> None:
    wrapped(run is recompute, model)
    _unwrap(model, run)


def _unwrap(model: Model, run: Run) -> None:
    if run is recompute:
        for block in model.blocks:
            block.unwrap()


@modelled("deepcopy of a model, which is trained")
def _copies(model: Model, run: Run) -> None:
    trained(model)
    trained(copy.deepcopy(model))


@modelled("state_dict and set_state_dict")
def _state(model: Model, run: Run) -> None:
    trained(model)
    model.set_state_dict(copy.deepcopy(model.state_dict()))


@modelled("eval() and no_grad in the middle of a step")
def _evaluates(model: Model, run: Run) -> None:
    y = model(rows())
    model.eval()
    with paddle.no_grad():
        model(rows())
    model(rows())
    model.train()
    y.mean().backward()


@loop_of(
    "generation with a cache under no_grad",
    lambda ours: recompute_wrapper(Cached()) if ours else Cached(),
)
def _generates(model: Cached, run: Run) -> None:
    cache: list[paddle.Tensor] = []
    with paddle.no_grad():
        for _ in range(4):
            model(rows(2, WIDTH), cache)
    trained(model, rows(), [])


@modelled("freezing and unfreezing")
def _freezes(model: Model, run: Run) -> None:
    for flag in (True, False):
        for parameter in model.blocks[0].parameters():
            parameter.stop_gradient = flag
        trained(model)


@loop("a new model in each step")
def _builds(ours: bool) -> Step:
    return lambda: trained(wrapped(ours, Model()))


# ------------------------------------------------------------------------ the other parts of ours


def _train_step_of(model: Any, **options: Any) -> TrainStep:
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    return TrainStep(model, optimizer, loss_fn=mean_square, **options)


@loop("TrainStep, two micro-batches")
def _train_step(ours: bool) -> Step:
    model = wrapped(ours, Model())
    if ours:
        step = _train_step_of(model, accumulate_steps=2)
        return lambda: step([rows(), rows()])
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())

    def plain() -> None:
        for _ in range(2):
            (mean_square(model, rows()) / 2).backward()
        optimizer.step()
        optimizer.clear_grad()

    return plain


@loop("TrainStep, its state saved and loaded")
def _train_step_state(ours: bool) -> Step | None:
    if not ours:
        return None
    step = _train_step_of(wrapped(ours, Model()))

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
        mean_square(model, rows()).backward()
        optimizer.step()
        optimizer.clear_grad()

    return step


@loop_of("OffloadSequential, without a backward", _chain, clear=False)
def _offload_dropped(model: Any, run: Run) -> None:
    model(rows())


@loop_of("OffloadSequential.state_dict()", _chain, clear=False)
def _offload_state(model: Any, run: Run) -> None:
    state = model.state_dict()
    if run is plainly:
        copy.deepcopy(state)


@loop_of("OffloadSequential.set_state_dict()", _chain, clear=False)
def _offload_set_state(model: Any, run: Run) -> None:
    model.set_state_dict(model.state_dict())


@loop_of("deepcopy of an OffloadSequential, which is refused", _chain, clear=False)
def _offload_copied(model: Any, run: Run) -> None:
    with contextlib.suppress(OffloadError):
        copy.deepcopy(model)


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
        model, x = Model(partial(Block, SavesOutput)), paddle.randn([ROWS, WIDTH])
        return lambda: step(model, x, mean_square)


_planned("estimate, a PyLayer saves its output", estimate)
_planned("plan, a PyLayer saves its output", partial(plan, memory_budget="1GiB", verify=False))
