"""Random nested inputs and outputs, random small networks: recompute equals the plain call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_recompute import RecomputeConfig, _nested, apply_recompute, recompute
from tests.recompute.contract import (
    Run,
    Seen,
    clean_streams,
    differences,
    leaf,
    loss_of,
    plain,
    seen,
    state_of_the_process,
    upstream,
)

SHAPE = (3, 4)
few_dozen = settings(
    derandomize=True,
    max_examples=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclasses.dataclass
class Holder:
    first: Any
    second: Any


# ------------------------------------------------------------------------- descriptions of values

LEAVES = ["gradient", "gradient", "no gradient", "integers", "None", "number", "text", "again"]


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Tuples, lists, dicts and dataclasses of `leaves`, up to three deep."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Holder, inner, inner),
        ),
        max_leaves=6,
    )


def make(description: Any, tensors: list[paddle.Tensor]) -> Any:
    """The value that `description` stands for; "again" is a tensor that was there before."""

    def value(kind: str) -> Any:
        if kind == "gradient":
            tensors.append(leaf(*SHAPE))
        elif kind == "no gradient":
            tensors.append(leaf(*SHAPE, stop_gradient=True))
        elif kind == "integers":
            return paddle.to_tensor([1, 0, 2])
        elif kind in ("None", "number", "text"):
            return {"None": None, "number": 0.5, "text": "ok"}[kind]
        elif not tensors:
            return None
        return tensors[-1]

    return _nested.map_leaves(value, description)


# ---------------------------------------------------------------------------------------- networks

LAYERS: dict[str, Callable[[], paddle.nn.Layer]] = {
    "linear": lambda: paddle.nn.Linear(4, 4),
    "batch norm": lambda: paddle.nn.BatchNorm1D(4),
    "layer norm": lambda: paddle.nn.LayerNorm(4),
    "dropout": lambda: paddle.nn.Dropout(0.4),
    "gelu": paddle.nn.GELU,
    "softmax": paddle.nn.Softmax,
}
UNARY: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "tanh": paddle.tanh,
    "noise": lambda x: x * paddle.rand(SHAPE),
    "NumPy noise": lambda x: x + float(np.random.rand()),
    "turn": lambda x: x.reshape([4, 3]).transpose([1, 0]),
    "cut": lambda x: paddle.concat([x[1:], x[:1]]),
    "in place": lambda x: (x * 1).add_(paddle.ones([4])),
    "detach": lambda x: x.detach(),
}
BINARY: dict[str, Callable[..., paddle.Tensor]] = {
    "add": lambda x, y: x + y,
    "times": lambda x, y: x * y,
    "attend": lambda x, y: paddle.matmul(x @ y.T, y),
}
OPERATIONS = [*LAYERS, *UNARY, *BINARY]
programs = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


class Network(paddle.nn.Layer):
    """Operations on the tensors that are there so far; picks its outputs from all of them."""

    def __init__(self, program: list[tuple[str, int, int]], outputs: Any) -> None:
        super().__init__()
        self.program, self.outputs = program, outputs
        self.layers = paddle.nn.LayerList(
            [LAYERS.get(name, paddle.nn.Identity)() for name, _, _ in program]
        )
        self.scale = self.create_parameter(list(SHAPE))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = [self.scale * 2]
        values += [t for t in _nested.tensors_in((args, kwargs)) if t.is_floating_point()]
        for (name, first, second), layer in zip(self.program, self.layers, strict=True):
            x, y = values[first % len(values)], values[second % len(values)]
            if name in BINARY:
                values.append(BINARY[name](x, y))
            else:
                values.append(UNARY[name](x) if name in UNARY else layer(x))
        return _nested.map_leaves(
            lambda pick: values[-1 - pick % len(values)] if isinstance(pick, int) else pick,
            self.outputs,
        )


picks = nested(st.one_of(st.integers(0, 5), st.none(), st.just("text")))


def two_steps(network: Network, run: Run, description: Any) -> Seen:
    with clean_streams():
        tensors: list[paddle.Tensor] = []
        args, kwargs = make(description, tensors)
        found: Seen = {"args": args, "kwargs": kwargs}
        for _ in range(2):
            up_args, up_kwargs = upstream((args, kwargs))
            found["outputs"] = run(network, *up_args, **up_kwargs)
            loss = loss_of(found["outputs"])
            if not loss.stop_gradient:
                loss.backward()
        return {**dict(seen({**found, "network": network})), **state_of_the_process()}


def compare(program: Any, outputs: Any, description: Any, run: Run) -> None:
    results = []
    for one in (plain, run):
        paddle.seed(4)
        results.append(two_steps(Network(program, outputs), one, description))
    lines = differences(results[1], results[0])
    assert not lines, "\n".join(lines)


arguments = st.tuples(
    st.lists(nested(st.sampled_from(LEAVES)), max_size=3),
    st.dictionaries(st.sampled_from(["mask", "cache"]), nested(st.sampled_from(LEAVES))),
)


@few_dozen
@given(programs, picks, arguments)
def test_recompute(program: Any, outputs: Any, description: Any) -> None:
    compare(program, outputs, description, recompute)


@few_dozen
@given(
    programs,
    picks,
    arguments,
    st.fixed_dictionaries(
        {
            "offload": st.sampled_from([None, "host", "disk"]),
            "determinism_check": st.sampled_from(["default", "none", "values"]),
        }
    ),
)
def test_options(program: Any, outputs: Any, description: Any, options: dict[str, Any]) -> None:
    compare(program, outputs, description, lambda *a, **k: recompute(*a, **options, **k))


@few_dozen
@given(programs, picks, arguments)
def test_nested_recompute(program: Any, outputs: Any, description: Any) -> None:
    def outer(network: Network, *args: Any, **kwargs: Any) -> Any:
        return recompute(network, *args, **kwargs)

    compare(program, outputs, description, lambda *a, **k: recompute(outer, *a, **k))


@few_dozen
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=7),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from(["all", "every_n", "segments"]),
    st.sampled_from(["none", "disk"]),
)
def test_chains(names: list[str], chosen: set[int], policy: Any, offload: Any) -> None:
    """Any parts of any chain of layers, under any policy, cheap ones among them."""
    patterns = [str(number) for number in sorted(chosen) if number < len(names)] or ["0"]
    results = []
    for enable in (False, True):
        with clean_streams():
            model, x = paddle.nn.Sequential(*[LAYERS[name]() for name in names]), leaf(*SHAPE)
            config = RecomputeConfig(
                enable=enable, checkpoints=patterns, policy=policy, offload=offload
            )
            apply_recompute(model, config)
            outputs = []
            for _ in range(2):
                outputs.append(model(x * 2))
                loss_of(outputs).backward(retain_graph=True)
            found = {"x": x, "model": model, "outputs": outputs}
            results.append({**dict(seen(found)), **state_of_the_process()})
    lines = differences(results[1], results[0])
    assert not lines, "\n".join(lines)
