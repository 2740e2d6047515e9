"""The cases and the timed step of benchmarks/peers.py, written once for torch and for Paddle.

Each side gives an `Api`: the few operations that have another name there. A case calls a block
through `run(block, *args, **kwargs)`, plainly or recomputed, and returns what a user can see.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


class Api:
    """Operations of one framework; a subclass fills them in."""

    name: str
    Module: type

    def linear(self, rows: int, columns: int) -> Any: ...
    def batch_norm(self, width: int) -> Any: ...
    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any: ...
    def dropout(self, x: Any) -> Any: ...
    def seed(self, number: int) -> None: ...
    def array(self, tensor: Any) -> Any: ...
    def grad(self, y: Any, x: Any) -> Any: ...
    def concat(self, parts: list[Any], axis: int) -> Any: ...
    def cat_last(self, x: Any) -> Any: ...


def _seen(api: Api, *values: Any) -> list[Any]:
    return [None if v is None else api.array(v).tolist() for v in values]


def _dropout(api: Api, run: Run) -> Any:
    net, x = api.linear(4, 4), api.leaf(6, 4)
    y = run(lambda x: api.dropout(net(x)).tanh(), x * 2)
    y.sum().backward()
    return _seen(api, y, x.grad, net.weight.grad)


def _first_block(api: Api, run: Run) -> Any:
    net = api.linear(4, 4)
    run(lambda x: net(x).tanh(), api.leaf(6, 4, needs_gradient=False)).sum().backward()
    return _seen(api, net.weight.grad)


def _keyword(api: Api, run: Run) -> Any:
    def block(x: Any, *, scale: Any) -> Any:
        return (x * scale).tanh()

    x, scale = api.leaf(3, 4), api.leaf(3, 4)
    run(block, x * 2, scale=scale * 2).sum().backward()
    return _seen(api, x.grad, scale.grad)


def _dict_returned(api: Api, run: Run) -> Any:
    x = api.leaf(3, 4)
    out = run(lambda x: {"y": x.tanh(), "none": None}, x * 2)
    out["y"].sum().backward()
    return _seen(api, x.grad)


def _list_argument(api: Api, run: Run) -> Any:
    x, z = api.leaf(3, 4), api.leaf(3, 4)
    run(lambda both: (both[0] * both[1]).tanh(), [x * 2, z * 2]).sum().backward()
    return _seen(api, x.grad, z.grad)


def _dict_argument(api: Api, run: Run) -> Any:
    x = api.leaf(3, 4)
    run(lambda d: d["x"].tanh(), {"x": x * 2}).sum().backward()
    return _seen(api, x.grad)


def _batch_norm(api: Api, run: Run) -> Any:
    norm, x = api.batch_norm(4), api.leaf(8, 4)
    run(lambda x: norm(x).tanh(), x * 2).sum().backward()
    return _seen(api, x.grad, *norm_statistics(norm))


def norm_statistics(norm: Any) -> list[Any]:
    """The running mean and variance, whatever they are called."""
    if hasattr(norm, "running_mean"):
        return [norm.running_mean, norm.running_var]
    return [norm._mean, norm._variance]


def _loop_variable(api: Api, run: Run) -> Any:
    nets, x = [api.linear(4, 4) for _ in range(3)], api.leaf(6, 4)
    h = x * 2
    for net in nets:
        h = run(lambda h: net(h).tanh(), h)  # noqa: B023 - what users write
    h.sum().backward()
    return _seen(api, x.grad, *(net.weight.grad for net in nets))


def _twice(api: Api, run: Run) -> Any:
    x = api.leaf(3, 4)
    loss = run(lambda x: x.tanh().exp(), x * 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return _seen(api, x.grad)


def _grad_alone(api: Api, run: Run) -> Any:
    net, x = api.linear(4, 4), api.leaf(3, 4)
    gradient = api.grad(run(lambda x: net(x).tanh(), x * 1).sum(), x)
    return _seen(api, gradient, x.grad, net.weight.grad)


def _nested(api: Api, run: Run) -> Any:
    net, x = api.linear(4, 4), api.leaf(6, 4)
    y = run(lambda x: run(lambda h: api.dropout(net(h)), x.tanh()).exp(), x * 2)
    y.sum().backward()
    return _seen(api, x.grad, net.weight.grad)


def _unused_output(api: Api, run: Run) -> Any:
    used, unused, x = api.linear(4, 4), api.linear(4, 4), api.leaf(3, 4)
    y, _ = run(lambda x: (used(x).tanh(), unused(x).tanh()), x * 2)
    y.sum().backward()
    return _seen(api, x.grad, used.weight.grad, unused.weight.grad)


class _Cache:
    def __init__(self) -> None:
        self.keys: Any = None


def _cache(api: Api, run: Run) -> Any:
    net, x, cache = api.linear(4, 4), api.leaf(3, 4), _Cache()

    def block(x: Any, cache: Any) -> Any:
        k = net(x)
        cache.keys = k if cache.keys is None else api.concat([cache.keys, k], 0)
        return x + cache.keys.mean() * k.tanh()

    run(block, x * 2, cache).sum().backward()
    return _seen(api, x.grad, net.weight.grad, cache.keys)


def _changed_between(api: Api, run: Run) -> Any:
    x, factor = api.leaf(3, 4), [2.0]
    y = run(lambda x: (x * factor[0]).tanh(), x * 2)
    factor[0] = 5.0
    y.sum().backward()
    return _seen(api, x.grad)


class _OwnError(Exception):
    """What a user's block raises."""


def _exception(api: Api, run: Run) -> Any:
    calls = iter([False, True])

    def block(x: Any) -> Any:
        if next(calls, False):
            raise _OwnError
        return x.tanh()

    loss = run(block, api.leaf(3, 4) * 2).sum()
    if run.__name__ == "plain":
        return "raised as itself"
    try:
        loss.backward()
    except _OwnError:
        return "raised as itself"
    return "lost"


CASES: dict[str, Callable[[Api, Run], Any]] = {
    "dropout": _dropout,
    "first block: no input needs a gradient": _first_block,
    "keyword-only argument": _keyword,
    "dict and None returned": _dict_returned,
    "list of tensors as argument": _list_argument,
    "dict of tensors as argument": _dict_argument,
    "BatchNorm statistics": _batch_norm,
    "variable of a loop in a closure": _loop_variable,
    "two backwards of one graph": _twice,
    "grad(y, x) leaves .grad alone": _grad_alone,
    "recompute inside recompute": _nested,
    "an output that the loss does not use": _unused_output,
    "a cache of keys and values": _cache,
    "a captured list that is changed before the backward": _changed_between,
    "an exception in the second forward": _exception,
}


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The call that all others are compared with."""
    return function(*args, **kwargs)


def judge(api: Api, run: Run) -> dict[str, str]:
    """``ok``, ``wrong`` (silently), or the name of an error, for each case."""
    return {name: _in_child(lambda c=case: _verdict(api, c, run)) for name, case in CASES.items()}


def _verdict(api: Api, case: Callable[[Api, Run], Any], run: Run) -> str:
    api.seed(1)
    wanted = case(api, plain)
    api.seed(1)
    try:
        got = case(api, run)
    except Exception as error:
        return type(error).__name__
    return "ok" if repr(got) == repr(wanted) else "wrong"


def _in_child(call: Callable[[], str]) -> str:
    """What `call` returns in a process of its own; ``crash`` if that dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, call().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text or "crash"


def measure(step: Callable[[], object], rounds: int = 3) -> dict[str, float]:
    """Growth of resident memory in one step, and the median time of some."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    peak = _status("VmHWM") - before
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"mib": peak / 2**20, "seconds": statistics.median(seconds)}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; this needs Linux")
