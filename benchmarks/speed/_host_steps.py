"""Host time of whole steps, for `benchmarks.speed.host`: GradientSync, TrainStep, and Programs.

Each form has a model of its own, and every round runs each form once, one after the other. A
synchronized step is timed twice: the main thread, which launches what a device computes, and all
threads of the process. With gloo the exchange itself takes host time, so the floor is a plain step
with bare all-reduces of the same buckets.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from benchmarks.harness.network import loopback
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import table, write_record
from benchmarks.harness.timing import in_turn, timed
from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, TrainStep, compile_model
from paddle_recompute.grad_sync._buckets import plan_buckets
from paddle_recompute.grad_sync._options import BUCKET_BYTES, FIRST_BUCKET_BYTES
from paddle_recompute.options import AmpConfigs, RecomputeConfig
from paddle_recompute.static_graph import StaticConfig, StaticTrainStep
from tests.train_step.half_precision import pretended_gpu

WIDTH, LAYERS, WARM_UP = 8, 12, 6
CLIP = 1e-3
"""Below the norm of each gradient here: every step clips."""
Step = Callable[[], object]
Seconds = dict[str, list[tuple[float, ...]]]
"""CPU seconds of the main thread and of all threads, by step, of each round."""


def measured(steps: dict[str, Step], rounds: int, between: Step = lambda: None) -> Seconds:
    """`between` is called before each step and not on its clocks."""
    run = {name: timed(step, time.thread_time, time.process_time) for name, step in steps.items()}
    return in_turn(run, warm_up=WARM_UP, rounds=rounds, between=between)


def ratio(seconds: Seconds, form: str, to: str, part: int = 0) -> float:
    """The median over the rounds of the time of `form` in that of `to`."""
    pairs = zip(seconds[form], seconds[to], strict=True)
    return statistics.median(one[part] / other[part] for one, other in pairs)


def milliseconds(seconds: Seconds, form: str, part: int = 0) -> float:
    """The median over the rounds."""
    return statistics.median(taken[part] for taken in seconds[form]) * 1e3


def encoder() -> paddle.nn.Layer:
    """As many Layers and parameters (192) as ERNIE-base has in its own, post-norm, tiny."""
    paddle.seed(1)
    layer = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, activation="gelu")
    return paddle.nn.TransformerEncoder(layer, LAYERS)


def mean_square(model: Any, x: Any) -> Any:
    """A loss."""
    return model(x).square().mean()


# --------------------------------------------------------------------------------- gradient sync

SYNCS = (
    "no synchronization",
    "floor",
    "DataParallel",
    "no_sync + fused_allreduce_gradients",
    "ours, overlap",
    "ours, fused",
)
NUMBERS = (20, 200, 1000)


def sync_on_rank(numbers: tuple[int, ...], rounds: int) -> dict[int, Seconds]:
    """By number of parameters; called on each rank."""
    found = {}
    for number in numbers:
        models: list[paddle.nn.Layer] = []
        steps = {form: _sync_step(form, number, models) for form in SYNCS}
        found[number] = measured(steps, rounds, functools.partial(clear, models))
        print(number, flush=True)
    return found


def clear(models: list[paddle.nn.Layer]) -> None:
    """No gradient is left, as after ``optimizer.clear_grad(set_to_zero=False)``."""
    for model in models:
        for parameter in model.parameters():
            parameter.clear_gradient(False)


def _sync_step(form: str, number: int, models: list[paddle.nn.Layer]) -> Step:
    """A forward, a backward and a synchronization of Linear Layers of two parameters each."""
    paddle.seed(1)
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(number // 2)]
    model = paddle.nn.Sequential(*layers)
    models.append(model)
    x, parameters = paddle.ones([2, WIDTH]), model.parameters()
    called = paddle.DataParallel(model) if form == "DataParallel" else model
    sync = GradientSync(model, mode=form.split()[-1]) if form.startswith("ours") else None  # type: ignore[arg-type]
    sizes = {"bucket_bytes": BUCKET_BYTES, "first_bucket_bytes": FIRST_BUCKET_BYTES}
    planned = plan_buckets(parameters, range(number), **sizes) if form == "floor" else []
    flats = [paddle.zeros([sum(one.sizes)]) for one in planned]

    def step() -> None:
        with sync.last_backward() if sync is not None else contextlib.nullcontext():
            called(x).sum().backward()
        for flat in flats:
            dist.all_reduce(flat)
        if form.startswith("no_sync"):
            fused_allreduce_gradients(parameters, None)

    return step


def synchronized_steps(rounds: int) -> dict[int, Seconds]:
    """Of rank 0 of two, by number of parameters."""
    arguments = {"numbers": NUMBERS, "rounds": rounds}
    found: dict[int, Seconds] = run_ranks(sync_on_rank, loopback(2), timeout=900, **arguments)[0]
    return found


SYNC_HEADER = ["parameters", "step", "main thread, ms", "all threads, ms"]
SYNC_HEADER += ["main thread, of DataParallel", "all threads, of DataParallel"]

# ------------------------------------------------------------------------------------ train step


class Scaler:
    """A loss scale that works on a CPU, where ``paddle.amp.GradScaler`` is off: Paddle's kernel,
    and its one read of the host.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._scale = optimizer, paddle.full([1], 1024.0)

    def step(self) -> None:
        """Unscale, look, and update."""
        gradients = [p.grad for p in self._optimizer._parameter_list if p.grad is not None]
        found = paddle.zeros([1], "bool")
        paddle._legacy_C_ops.check_finite_and_unscale(gradients, self._scale, gradients, found)
        if not found:
            self._optimizer.step()


def _bare_step(clip: float | None, count: int, amp: bool) -> Step:
    model = encoder()
    limit = paddle.nn.ClipGradByGlobalNorm(clip) if clip is not None else None
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), grad_clip=limit)
    scaler, x = Scaler(optimizer), paddle.ones([2, 4, WIDTH])

    def step() -> None:
        for _ in range(count):
            if amp:
                with paddle.amp.auto_cast(level="O1", dtype="float16"):
                    loss = mean_square(model, x) / count
                (loss * 1024.0).backward()
            else:
                (mean_square(model, x) / count).backward()
        scaler.step() if amp else optimizer.step()
        optimizer.clear_grad(set_to_zero=False)

    return step


def _our_step(clip: float | None, count: int, amp: bool) -> Step:
    model = encoder()
    step = TrainStep(
        model,
        paddle.optimizer.AdamW(1e-4, parameters=model.parameters()),
        loss_fn=mean_square,
        accumulate_steps=count,
        clip_grad_norm=clip,
        amp=AmpConfigs(dtype="float16", init_loss_scaling=1024.0) if amp else None,
    )
    batches = [paddle.ones([2, 4, WIDTH])] * count
    return lambda: step(batches)


TRAIN_STEPS = {
    f"{'float16, ' if amp else ''}K = {count}{', clipped' if clip else ''}": (clip, count, amp)
    for amp in (False, True)
    for count in ((1,) if amp else (1, 4))
    for clip in (None, CLIP)
}


def train_steps(rounds: int) -> Seconds:
    """One process."""
    steps: dict[str, Step] = {}
    with pretended_gpu():
        for name, options in TRAIN_STEPS.items():
            steps[f"{name}: bare"], steps[f"{name}: ours"] = (
                _bare_step(*options),
                _our_step(*options),
            )
        return measured(steps, rounds)


# -------------------------------------------------------------------------------------- Programs


def _program_steps() -> dict[str, Step]:
    x = np.ones([2, 4, WIDTH], "float32")
    config = StaticConfig(recompute=RecomputeConfig(enable=False))
    ours = StaticTrainStep(config, encoder, mean_square, model=encoder())
    ours([x])
    built: Any = ours._built
    feed = {**built.fed(x), "micro_batch_weight": np.ones([1], "float32")}

    def bare() -> None:
        paddle.enable_static()
        built.state.executor.run(
            built.main, feed=feed, fetch_list=built.fetched, scope=built.state.scope
        )
        paddle.disable_static()

    return {"StaticTrainStep: bare": bare, "StaticTrainStep: ours": lambda: ours([x])}


def _compiled_steps() -> dict[str, Step]:
    x = paddle.ones([2, 4, WIDTH])
    spec = [paddle.static.InputSpec([-1, 4, WIDTH], "float32", stop_gradient=True)]
    theirs, ours, trusting = encoder(), encoder(), encoder()
    theirs = paddle.jit.to_static(theirs, input_spec=spec, full_graph=True)
    compile_model(ours, spec)
    compile_model(trusting, spec, verify=False)

    def step_of(model: Any) -> Step:
        def step() -> None:
            mean_square(model, x).backward()
            clear([model])

        return step

    return {
        "compile_model: bare": step_of(theirs),
        "compile_model: ours": step_of(ours),
        "compile_model, verify=False: ours": step_of(trusting),
    }


# --------------------------------------------------------------------------------- gradient cache

CACHED_ROWS, CHUNK = 32, 4


def _cached_steps() -> dict[str, Step]:
    """What GradCache computes, by hand (nothing has state or is checked) and by GradCache."""
    paddle.seed(1)
    layer = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
    loss, sides = ContrastiveLoss(0.1), [paddle.randn([CACHED_ROWS, 4, WIDTH]) for _ in range(2)]

    def encode(chunk: paddle.Tensor) -> paddle.Tensor:
        return layer(chunk).mean(1)

    cache = GradCache(encode, loss, chunk_size=CHUNK)

    def ours() -> None:
        cache.backward(*sides)
        clear([layer])

    def by_hand() -> None:
        chunks = [[side[i : i + CHUNK] for i in range(0, CACHED_ROWS, CHUNK)] for side in sides]
        states: list[Any] = []

        def first(chunk: paddle.Tensor) -> paddle.Tensor:
            states.append(paddle.get_rng_state())
            return encode(chunk)

        with paddle.no_grad():
            heads = [paddle.concat([first(chunk) for chunk in side]) for side in chunks]
        for head in heads:
            head.stop_gradient = False
        loss(*heads).backward()
        for head, side in zip(heads, chunks, strict=True):
            for number, chunk in enumerate(side):
                now = paddle.get_rng_state()
                paddle.set_rng_state(states.pop(0))
                again = encode(chunk)
                paddle.set_rng_state(now)
                again.backward(head.grad[CHUNK * number : CHUNK * (number + 1)])
        clear([layer])

    return {"GradCache: bare": by_hand, "GradCache: ours": ours}


def others(rounds: int) -> Seconds:
    """One process; the steps in which a Program is compared with dygraph are few."""
    found: Seconds = {}
    for steps in (_program_steps(), _compiled_steps(), _cached_steps()):
        found |= measured(steps, rounds)
    return found


# ---------------------------------------------------------------------------------------- record


def record(rounds: int) -> Path:
    """Measure everything here, and write it."""
    synced, steps, run = synchronized_steps(rounds), train_steps(rounds), others(rounds)
    sync_rows = [
        [
            number,
            form,
            *(f"{milliseconds(seconds, form, part):.2f}" for part in (0, 1)),
            *(f"{ratio(seconds, form, 'DataParallel', part):.2f}" for part in (0, 1)),
        ]
        for number, seconds in synced.items()
        for form in SYNCS
    ]
    step_rows = []
    for seconds in (steps, run):
        for one in seconds:
            name, _, who = one.partition(": ")
            if who == "ours":
                bare = f"{name.partition(', verify')[0]}: bare"
                shown = [f"{milliseconds(seconds, each):.2f}" for each in (bare, one)]
                step_rows.append([name, *shown, f"{ratio(seconds, one, bare):.2f}"])
    return write_record(
        "host_steps",
        "Host time of whole steps",
        f"python -m benchmarks.speed.host --steps --rounds {rounds}",
        [
            f"CPU time, tiny tensors; the median of {rounds} rounds, in each of which every form "
            "makes one step, one after the other. Ratios are taken within a round. Other programs "
            "ran on the machine: the ratio counts, not the milliseconds.",
            "",
            "## GradientSync, two ranks over gloo",
            "",
            "Forward, backward and synchronization of Linear Layers of 8 x 8, two parameters each. "
            "The main thread is what launches the work of a device; our gloo runs in a thread of "
            "its own. The floor is a plain step with bare all-reduces of the same buckets.",
            "",
            *table(SYNC_HEADER, sync_rows),
            "",
            "## TrainStep, Programs and GradCache, one process",
            "",
            "Twelve post-norm transformer layers of width 8 (192 parameters), AdamW. Bare is the "
            "loop by hand, with Paddle's ClipGradByGlobalNorm where it clips, and with Paddle's "
            "kernel for the loss scale in float16 (O1, which on a CPU computes in float32); the "
            "executor's own call of the same Program; the call of paddle.jit.to_static. TrainStep "
            "also computes the gradient norm in each step. GradCache: one such layer without "
            f"dropout for both sides, {CACHED_ROWS} rows in chunks of {CHUNK}; bare is both "
            "forwards and the loss by hand.",
            "",
            *table(["step", "bare, ms", "ours, ms", "of bare"], step_rows),
        ],
    )
