"""Host time of a recomputed call above the plain call, beside fleet's forms and a floor.

On a GPU the host only launches kernels. Python that takes longer than they do is the time of a
step; on a CPU the kernels hide it. So the tensors are tiny here, the CPU time of the thread is
taken, and what counts is a call's time above that of the plain call. The floor is twenty bare
lines with the same saved-tensor hooks: exact for these blocks alone, and nothing is checked. A
transformer layer is there twice: in a chain of 12, as the other blocks, and in one of 24, where the
CPU time of the whole process is taken.

    python -m benchmarks.speed.host [--rounds N] [--block NAME] [--steps]

Whole steps, of `_host_steps`, have a record of their own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as fleet_recompute

from benchmarks.harness.record import table, write_record
from benchmarks.harness.timing import Clock, in_turn
from benchmarks.speed import _host_steps
from paddle_recompute import recompute

WARM_UP = 3
Call = Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]


class LinearBlock(paddle.nn.Layer):
    """A pre-norm feed-forward block with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = paddle.nn.LayerNorm(8)
        self.up, self.down = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 8)
        self.dropout = paddle.nn.Dropout(0.1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[batch, length, 8]``, float32, as `x` is."""
        return x + self.dropout(self.down(paddle.nn.functional.gelu(self.up(self.norm(x)))))


class ResNetBlock(paddle.nn.Layer):
    """Two convolutions with BatchNorm, whose statistics are updated once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = paddle.nn.LayerList(
            [paddle.nn.Conv2D(4, 4, 3, padding=1, bias_attr=False) for _ in range(2)]
        )
        self.norms = paddle.nn.LayerList([paddle.nn.BatchNorm2D(4) for _ in range(2)])
        self.activation = paddle.nn.ReLU()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[batch, 4, height, width]``, float32, as `x` is."""
        y = self.activation(self.norms[0](self.convolutions[0](x)))
        return self.activation(self.norms[1](self.convolutions[1](y)) + x)


class MixtureBlock(paddle.nn.Layer):
    """Four experts behind a gate; it counts its calls, as many blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = paddle.nn.Linear(8, 4)
        self.experts = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(
                    paddle.nn.Linear(8, 16), paddle.nn.GELU(), paddle.nn.Linear(16, 8)
                )
                for _ in range(4)
            ]
        )
        self.calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[batch, length, 8]``, float32, as `x` is."""
        self.calls += 1
        shares = paddle.nn.functional.softmax(self.gate(x)).unsqueeze(-2)
        return x + (paddle.stack([expert(x) for expert in self.experts], -1) * shares).sum(-1)


def transformer_layer() -> paddle.nn.Layer:
    """Paddle's own, post-norm, with dropout."""
    return paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu")


@dataclass(frozen=True)
class Chain:
    """Blocks one after the other.

    Attributes:
        block: Makes one.
        shape: Of the input.
        length: How many blocks.
        clock: Seconds of what.
    """

    block: Callable[[], paddle.nn.Layer]
    shape: tuple[int, ...] = (2, 4, 8)
    length: int = 12
    clock: Clock = time.thread_time


TRANSFORMER = "transformer layer"
BLOCKS = {
    "Linear block": Chain(LinearBlock),
    TRANSFORMER: Chain(transformer_layer),
    "ResNet block": Chain(ResNetBlock, (2, 4, 4, 4)),
    "MoE block": Chain(MixtureBlock),
    f"{TRANSFORMER}, 24 in turn": Chain(transformer_layer, length=24, clock=time.process_time),
}


def identity_hooks(block: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """The plain call under hooks that change nothing."""
    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return block(x)


def bare_hooks(block: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """Twenty lines: the tensors of the second forward take the place of the first one's."""
    numbers: list[int] = []
    values: list[paddle.Tensor] = []
    argument = x.detach()
    argument.stop_gradient = False
    state = paddle.get_rng_state()

    def pack(tensor: paddle.Tensor) -> int:
        numbers.append(len(numbers))
        return numbers[-1]

    def unpack(number: int) -> paddle.Tensor:
        if not values:
            now = paddle.get_rng_state()
            paddle.set_rng_state(state)
            with (
                paddle.set_grad_enabled(True),
                paddle.autograd.saved_tensors_hooks(
                    lambda tensor: values.append(tensor.detach()), lambda nothing: nothing
                ),
            ):
                block(argument)
            paddle.set_rng_state(now)
        return values[number]

    with paddle.autograd.saved_tensors_hooks(pack, unpack):
        return block(x)


FORMS: dict[str, Call] = {
    "plain": lambda block, x: block(x),
    "identity hooks": identity_hooks,
    "floor": bare_hooks,
    "fleet, default": lambda block, x: fleet_recompute(block, x),
    "fleet, hooks": lambda block, x: fleet_recompute(block, x, use_reentrant=False),
    "ours": lambda block, x: recompute(block, x),
}
# On a CPU of 2.6, hooks of Python alone fail: the engine empties a tensor that was saved twice.
WITHOUT_26 = ("identity hooks", "floor", "fleet, hooks")


def forms_here() -> dict[str, Call]:
    """Those of `FORMS` that this Paddle has."""
    left_out = WITHOUT_26 if paddle.__version__.startswith("2.6") else ()
    return {form: call for form, call in FORMS.items() if form not in left_out}


def measured(name: str, rounds: int) -> dict[str, tuple[float, ...]]:
    """By form: microseconds of a forward and of a backward, and of both above the plain call."""
    paddle.seed(1)
    chain = BLOCKS[name]
    blocks = paddle.nn.LayerList([chain.block() for _ in range(chain.length)])
    x = paddle.randn(chain.shape)
    x.stop_gradient = False  # fleet's default form gives no gradients otherwise

    def run(call: Call) -> tuple[float, float]:
        start, y = chain.clock(), x
        for block in blocks:
            y = call(block, y)
        middle = chain.clock()
        y.sum().backward()
        end = chain.clock()
        blocks.clear_gradients()
        x.clear_gradient()
        return middle - start, end - middle

    forms = {form: functools.partial(run, call) for form, call in forms_here().items()}
    seconds = in_turn(forms, warm_up=WARM_UP, rounds=rounds)
    found = {}
    for form, values in seconds.items():
        above = [sum(own) - sum(bare) for own, bare in zip(values, seconds["plain"], strict=True)]
        parts = (*zip(*values, strict=True), above)
        found[form] = tuple(statistics.median(part) / chain.length * 1e6 for part in parts)
    return found


def counted_objects(name: str) -> dict[str, int]:
    """By form: what a forward leaves for the backward, as objects that the garbage collector
    counts. So many forwards make it look through the young ones, and from time to time through the
    whole heap of the process.
    """
    block, x = BLOCKS[name].block(), paddle.randn(BLOCKS[name].shape)
    x.stop_gradient = False
    found = {}
    for form, call in forms_here().items():
        call(block, x).sum().backward()
        gc.collect()
        gc.disable()
        before = gc.get_count()[0]
        y = call(block, x)
        found[form] = gc.get_count()[0] - before
        gc.enable()
        del y
    return found


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--block", choices=BLOCKS, help="this one alone, and no record")
    parser.add_argument("--steps", action="store_true", help="whole steps alone")
    arguments = parser.parse_args()
    if arguments.steps:
        _host_steps.record(arguments.rounds)
        return
    rows: list[list[Any]] = []
    for name in [arguments.block] if arguments.block else BLOCKS:
        found = measured(name, arguments.rounds)
        objects, fleet = counted_objects(name), found["fleet, default"][2]
        for form, (forward, backward, above) in found.items():
            ratio = f"{above / fleet:.2f}" if form != "plain" else "-"
            times = (f"{us:.0f}" for us in (forward, backward, above))
            rows.append([name, form, *times, ratio, objects[form]])
        print(*(" ".join(map(str, row)) for row in rows[-len(found) :]), sep="\n", flush=True)
    if arguments.block:
        return
    header = [
        "block", "form", "forward, us", "backward, us", "above plain, us", "of fleet's", "objects",
    ]  # fmt: skip
    write_record(
        "host",
        "Host time of a recomputed call",
        f"python -m benchmarks.speed.host --rounds {arguments.rounds}",
        [
            "CPU time of the thread (of the process, where 24 blocks run in turn), per call of a "
            f"block, tiny tensors; the median of {arguments.rounds} rounds, in each of which every "
            "form runs 12 or 24 blocks, one form after the other. 'Above plain' is taken within a "
            "round. The ratio counts, not the microseconds. Objects: what a forward leaves for the "
            "backward that the garbage collector counts.",
            "",
            *table(header, rows),
        ],
    )


if __name__ == "__main__":
    main()
