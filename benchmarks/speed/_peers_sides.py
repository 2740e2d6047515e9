"""A side of peers.py: what torch and Paddle name differently, and what is measured.

Each side fills in an `Api` and calls `main`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.forked import forked
from benchmarks.harness.resident import resident
from benchmarks.harness.timing import paired_seconds, ratios

Run = Callable[..., Any]
WIDTH, LAYERS, BATCH, LENGTH = 256, 6, 8, 64
PAIRS, CHUNK, FEW = 128, 16, 4


class NotOffered(Exception):
    """A library has no way to say what a case asks for."""


class Api:
    """Operations of one framework; a subclass fills them in.

    Attributes:
        Module: The base class of Layers.
        ways: Recomputes, by the name in the table: ``way(function, *args, **kwargs)``.
        caches: Gradient caches: ``cache(encoders, loss, chunk)`` returns a function of the inputs,
            which does the backward and returns the loss.
    """

    Module: Any
    ways: dict[str, Run]
    caches: dict[str, Callable[[Any, Run, int], Run]]

    def linear(self, rows: int, columns: int) -> Any: ...
    def batch_norm(self, width: int) -> Any: ...
    def embedding(self, count: int, width: int) -> Any: ...
    def blocks(self, count: int, width: int) -> Any: ...
    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any: ...
    def ids(self, *shape: int) -> Any: ...
    def freeze(self, parameter: Any) -> None: ...
    def dropout(self, x: Any) -> Any: ...
    def seed(self, number: int) -> None: ...
    def array(self, tensor: Any) -> Any: ...
    def grad(self, y: Any, x: Any) -> Any: ...
    def concat(self, parts: list[Any], axis: int) -> Any: ...
    def loss(self, query: Any, *others: Any) -> Any: ...
    def adamw(self, parameters: Any) -> tuple[Callable[[], object], Callable[[], object]]: ...

    def wrapped(self, way: str, blocks: Any) -> list[Run]:
        """What is called for each of `blocks`."""
        if way == "plain":
            return list(blocks)
        return [lambda h, b=block: self.ways[way](b, h) for block in blocks]


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The call that all others are compared with."""
    return function(*args, **kwargs)


class Plainly:
    """The loss over the same chunks with all their graphs, which a gradient cache must equal."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def __call__(self, encoders: Any, loss: Run, *inputs: Any) -> Any:
        pair = encoders if isinstance(encoders, tuple) else (encoders, encoders)
        vectors = [
            self._api.concat(
                [pair[min(place, 1)](x[at : at + FEW]) for at in range(0, len(x), FEW)], 0
            )
            for place, x in enumerate(inputs)
        ]
        value = loss(*vectors)
        value.backward()
        return value


# -------------------------------------------------------------------------------------- cases


def judge(api: Api, way: str, *, are_caches: bool) -> dict[str, str]:
    """``ok``, ``wrong`` (silently), ``none`` (not offered), or the name of an error, by case."""
    from benchmarks.speed._peers_cases import CACHE_CASES, CASES

    cases = CACHE_CASES if are_caches else CASES
    return {
        name: forked(lambda c=case: _verdict(api, c, way, are_caches), 300.0).get(
            "verdict", "crash"
        )
        for name, case in cases.items()
    }


def _verdict(
    api: Api, case: Callable[[Api, Run], Any], way: str, are_caches: bool
) -> dict[str, str]:
    wanted: Any = plain
    given: Any = api.ways.get(way)
    if are_caches:
        wanted = Plainly(api)
        given = lambda encoders, loss, *x: api.caches[way](encoders, loss, FEW)(*x)  # noqa: E731
    _seed(api)
    expected = case(api, wanted)
    _seed(api)
    try:
        got = case(api, given)
    except NotOffered:
        return {"verdict": "none"}
    except Exception as error:
        return {"verdict": type(error).__name__}
    # A cache may sum in another order, so the last bits differ; recompute has no such freedom.
    same = _are_close(got, expected) if are_caches else repr(got) == repr(expected)
    return {"verdict": "ok" if same else "wrong"}


def _seed(api: Api) -> None:
    api.seed(1)
    np.random.seed(1)


def _are_close(got: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return bool(got == expected)
    return len(got) == len(expected) and all(
        (a is None and b is None)
        or (a is not None and b is not None and np.allclose(a, b, rtol=1e-4, atol=1e-6))
        for a, b in zip(got, expected, strict=True)
    )


# -------------------------------------------------------------------------------- measurements


def encoder_step(api: Api, way: str) -> Callable[[], object]:
    """A training step of an encoder with recomputed blocks."""
    api.seed(0)
    blocks = api.blocks(LAYERS, WIDTH)
    step, clear = api.adamw(blocks.parameters())
    x = api.leaf(BATCH, LENGTH, WIDTH)
    called = api.wrapped(way, blocks)

    def run() -> None:
        h = x
        for block in called:
            h = block(h)
        (h * h).mean().backward()
        step()
        clear()

    return run


def contrastive_step(api: Api, way: str) -> Callable[[], object]:
    """A training step of two sides of one encoder."""
    api.seed(0)

    class Tower(api.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words = api.embedding(100, 64)
            self.body = api.blocks(4, 64)

        def forward(self, ids: Any) -> Any:
            h = self.words(ids)
            for block in self.body:
                h = block(h)
            return h.mean(1)

    tower = Tower()
    step, clear = api.adamw(tower.parameters())
    query, positive = api.ids(PAIRS, 32), api.ids(PAIRS, 32)
    cached = None if way == "plain" else api.caches[way](tower, api.loss, CHUNK)

    def run() -> None:
        if cached is None:
            api.loss(tower(query), tower(positive)).backward()
        else:
            cached(query, positive)
        step()
        clear()

    return run


def growth(step: Callable[[], object]) -> int:
    """Bytes by which one step lets the resident memory grow, at its peak."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def measured(make: Callable[[Api, str], Callable[[], object]], api: Api, way: str) -> Any:
    """Memory and relative time of one way."""
    step = make(api, way)
    result: dict[str, float] = {"bytes": growth(step)}
    if way != "plain":
        steps = {"plain": make(api, "plain"), way: step}
        result["time"] = ratios(paired_seconds(steps, warm_up=1, rounds=7), "plain")[way][0]
    return result


def main(api: Api) -> None:
    """Try all cases and measure all ways, each in a child of this process; print JSON."""
    result: dict[str, Any] = {}

    def in_child(make: Callable[[Api, str], Callable[[], object]], way: str) -> Any:
        return forked(lambda: measured(make, api, way), 900.0)

    for topic, ways, make in (
        ("recompute", api.ways, encoder_step),
        ("caches", api.caches, contrastive_step),
    ):
        found = {"plain": {"measured": in_child(make, "plain")}}
        for way in ways:
            print(f"{type(api).__name__} {topic} {way}", file=sys.stderr, flush=True)
            found[way] = {
                "cases": judge(api, way, are_caches=topic == "caches"),
                "measured": in_child(make, way),
            }
        result[topic] = found
    print("\n" + json.dumps(result))
