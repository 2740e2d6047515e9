"""Every way to have a forward repeated keeps the promise of `recompute`.

The ways ("doors") are `recompute`, a wrapped Layer, `apply_recompute`, `OffloadSequential`,
`offload_layers` and the encoder of `GradCache`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import paddle
import pytest

from paddle_recompute import (
    GradCache,
    OffloadSequential,
    apply_recompute,
    recompute,
    recompute_wrapper,
)
from paddle_recompute.errors import RecomputeError
from paddle_recompute.offload import offload_layers
from paddle_recompute.offload._offloaded_tensor import offloaded_tensor_of
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import RecomputeLayer
from tests.recompute.contract import (
    CASES,
    Case,
    Run,
    Seen,
    WarmingUp,
    array,
    clean_streams,
    differences,
    is_rounding,
    leaf,
)

Tensor = paddle.Tensor
SELECTED = RecomputeConfig(checkpoints=("block",))
OFFLOADED = RecomputeConfig(checkpoints=("block",), offload_parameters="host", num_shards=1)

# ------------------------------------------------------------------ a change before the backward

FACTOR = 1.0


class Registry:
    """Layers in an attribute of a class, which is not searched."""

    layers: ClassVar[dict[str, paddle.nn.Layer]] = {}


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value


class Block(paddle.nn.Layer):
    """Reads all kinds of state, and calls a Layer that the search does not find."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.3)
        self.warming_up = WarmingUp()
        self.factor, self.holder, self.items = 1.0, Holder(1.0), [Holder(1.0)]
        variable = 1.0

        def read() -> float:
            return variable

        def write() -> None:
            nonlocal variable
            variable = 3.0

        self.read, self.write = read, write
        Registry.layers["called"] = WarmingUp()

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor * self.holder.value * self.items[0].value * self.read() * FACTOR
        y = self.dropout(self.warming_up(self.linear(x))).tanh() * factor
        return (Registry.layers["called"](y) * factor).tanh()


def _rebind_global() -> None:
    global FACTOR
    FACTOR = 3.0


CHANGES: dict[str, Callable[[Block], object]] = {
    "nothing": lambda block: None,
    "an attribute": lambda block: setattr(block, "factor", 3.0),
    "an object": lambda block: setattr(block, "holder", Holder(3.0)),
    "an attribute of an object": lambda block: setattr(block.holder, "value", 3.0),
    "an item of a list": lambda block: block.items.__setitem__(0, Holder(3.0)),
    "a variable of a closure": lambda block: block.write(),
    "a global": lambda block: _rebind_global(),
    "the p of Dropout": lambda block: setattr(block.dropout, "p", 0.9),
    "the flag": lambda block: block.eval(),
    "stop_gradient": lambda block: setattr(block.linear.weight, "stop_gradient", True),
    "a sublayer": lambda block: setattr(block, "dropout", paddle.nn.Dropout(0.9)),
    "a hook": lambda block: block.dropout.register_forward_post_hook(lambda *_: _[-1] * 3),
    "a buffer": lambda block: setattr(block.warming_up, "mean", paddle.ones([4])),
    "a number of a called Layer": lambda block: setattr(Registry.layers["called"], "calls", 7),
}

Pair = tuple[Tensor, Tensor]
Step = Callable[[Pair, Callable[[Tensor, Tensor], Tensor]], Tensor]
"""Forward of both tensors of a pair, their loss, and its backward; returns the loss."""


def by_calls_of(call: Callable[[Tensor], Tensor]) -> Step:
    def step(pair: Pair, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        value = loss(*map(call, pair))
        value.backward()
        return value

    return step


def selected(apply: Callable[..., object], config: RecomputeConfig, block: Block) -> Step:
    apply(paddle.nn.LayerDict({"block": block}), config)
    return by_calls_of(block)


def cached(block: Block) -> Step:
    return lambda pair, loss: GradCache(block, loss, chunk_size=3).backward(*pair)


DOORS: dict[str, Callable[[Block], Step]] = {
    "recompute": lambda block: by_calls_of(functools.partial(recompute, block)),
    "a wrapped Layer": lambda block: by_calls_of(recompute_wrapper(block)),
    "apply_recompute": functools.partial(selected, apply_recompute, SELECTED),
    "OffloadSequential": lambda block: by_calls_of(OffloadSequential([block], num_shards=1)),
    "offload_layers": functools.partial(selected, offload_layers, OFFLOADED),
    "GradCache": cached,
}


def gradients_of(block: Block) -> Seen:
    """Also of parameters that a chain has."""
    with contextlib.ExitStack() as stack:
        for chain in {away.owner() for p in block.parameters() if (away := offloaded_tensor_of(p))}:
            stack.enter_context(chain.resident(range(len(chain.shards))))
        return {f"grad of {name}": array(p.grad) for name, p in block.named_parameters()}


def trained(door: Callable[[Block], Step], change: str, num_steps: int = 3) -> Seen:
    """What steps leave behind, between whose forwards and backwards the state changes."""
    global FACTOR
    FACTOR = 1.0
    with clean_streams():
        block = Block()
        step, found = door(block), {}

        def loss(one: Tensor, other: Tensor) -> Tensor:
            value = paddle.concat([one, other]).square().sum()
            CHANGES[change](block)
            return value

        for number in range(num_steps):
            found[f"loss {number}"] = array(
                step((leaf(3, 4, stop_gradient=True), leaf(3, 4, stop_gradient=True)), loss)
            )
        called = Registry.layers["called"]
        for name, one in {"block": block.warming_up, "called": called}.items():
            found[f"mean of {name}"], found[f"calls of {name}"] = array(one.mean), one.calls
        return {**found, **gradients_of(block)}


in_plain_calls = functools.cache(functools.partial(trained, by_calls_of))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", DOORS)
def test_the_second_forward_has_the_state_of_the_first(door: str, change: str) -> None:
    found, wanted = trained(DOORS[door], change), in_plain_calls(change)
    # Two encoders of a cache, and two calls of a chain, add their gradients in another order.
    assert is_rounding(found, wanted), "\n".join(differences(found, wanted))


# ------------------------------------------------------------------------- the contract's cases

SECTIONS = ("side_effects", "reach", "randomness", "views", "outputs", "inputs")


class Calling(paddle.nn.Layer):
    """Calls a function, whose parameters are not its own: they stay on the device."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = [function]

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.functions[0](*args, **kwargs)


def in_a_wrapped_layer(function: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(function, paddle.nn.Layer):
        return recompute_wrapper(Calling(function))(args, kwargs)
    layer = function if isinstance(function, RecomputeLayer) else recompute_wrapper(function)
    return layer(*args, **kwargs)


def in_a_chain(function: Any, *args: Any, **kwargs: Any) -> Any:
    return OffloadSequential([Calling(function)], num_shards=1)(args, kwargs)


RUNS: dict[str, Run] = {"a wrapped Layer": in_a_wrapped_layer, "a chain": in_a_chain}

DIFFERENT_IN_A_CHAIN = (
    # Each floating-point output of a shard needs a gradient, and no other output does.
    "integer tensors returned",
    "a detached tensor returned",
    "a tensor that was made with stop_gradient returned",
    "only tensors without gradient returned",
    "nothing needs a gradient",
    # Inputs and outputs are other objects than outside of the shard.
    "a parameter returned",
    "the inputs' container returned",
    "the same tensor by position, by keyword and in a list",
    # A tensor that the function stores has no graph.
    "a loss that the block stores",
    "a stored loss whose own backward comes after that of the output",
    "the power iteration of nn.utils.spectral_norm",
    # A captured tensor that needs a gradient is refused.
    "a tensor inside an object of the user's own",
    "blocks in a loop, reached by a captured activation",
    # In plain recompute the first graph has the number of the first forward.
    "an object that has attributes of its thread",
)
"""How titles begin of what differs by design; docs/offload.md lists it under "Limits"."""


@functools.cache
def _cases(section: str) -> list[tuple[Case, Seen]]:
    """Of those for variants that make a difference to the search alone, one of four."""
    importlib.import_module(f"tests.recompute.test_{section}")
    cases = [one for one in CASES if one.section == section]
    chosen = [one for number, one in enumerate(cases) if one.is_listed or number % 4 == 0]
    return [(one, one.wanted()) for one in chosen]


def outcome(case: Case, wanted: Seen, run: Run) -> list[str]:
    """How it differs from the plain calls."""
    try:
        found = case.observe(run)
    except RecomputeError as error:
        return [] if case.or_error else [str(error)]
    if run is in_a_chain and is_rounding(found, wanted):
        return []
    return differences(found, wanted)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("door", RUNS)
def test_cases_of_the_contract(door: str, section: str) -> None:
    cases = _cases(section)
    if RUNS[door] is in_a_chain:
        cases = [one for one in cases if not one[0].title.startswith(DIFFERENT_IN_A_CHAIN)]
    found = {case.title: outcome(case, wanted, RUNS[door]) for case, wanted in cases}
    lines = [f"{title}: {lines[0]}" for title, lines in found.items() if lines]
    assert not lines, "\n".join(lines)


def test_a_captured_activation_is_refused_in_a_chain() -> None:
    x = leaf(3, 4)
    h = x * 2
    y = in_a_chain(lambda x: (x + h).tanh(), x * 3)
    with pytest.raises(RecomputeError, match=r"captures 'h' .* make it an input"):
        y.sum().backward()


@pytest.mark.parametrize("what", ["does not use", "detaches"])
def test_an_input_that_a_shard(what: str) -> None:
    """Plain Paddle gives None; for None of a PyLayer, Paddle 3 ends the process."""
    x, z = leaf(3, 4), leaf(3, 4)
    y = in_a_chain(lambda x, z: x + (0 if what == "does not use" else z.detach()), x * 2, z * 2)
    y.sum().backward()
    assert float(x.grad.sum()) == 24
    assert float(z.grad.abs().sum()) == 0
