"""The cases of benchmarks/speed/peers.py, written once for torch and for Paddle.

A case of recompute calls a block through ``run(block, *args, **kwargs)``, plainly or recomputed. A
case of a gradient cache calls ``cached(encoders, loss, *inputs)``, which does the backward of the
loss over all rows. Both return what a user can see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.speed._peers_sides import Api, NotOffered, Plainly, Run, plain


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
    if run is plain:
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


# ------------------------------------------------------------------------------ gradient caches

ROWS = 10
"""No multiple of the chunk size."""


def _gradients(api: Api, *layers: Any) -> list[Any]:
    return _seen(api, *(p.grad for layer in layers for p in layer.parameters()))


def _encoder(api: Api, middle: Callable[[Any], Any]) -> Any:
    class Encoder(api.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = api.linear(4, 6), api.linear(6, 4)

        def forward(self, x: Any) -> Any:
            return self.second(middle(self.first(x)))

    return Encoder()


def _inputs(api: Api, count: int = 2) -> list[Any]:
    return [api.leaf(ROWS, 4, needs_gradient=False) for _ in range(count)]


def _tied(api: Api, cached: Run) -> Any:
    encoder = _encoder(api, api.dropout)
    loss = cached(encoder, api.loss, *_inputs(api))
    return [*_seen(api, loss), *_gradients(api, encoder)]


def _two_encoders(api: Api, cached: Run) -> Any:
    pair = _encoder(api, api.dropout), _encoder(api, api.dropout)
    cached(pair, api.loss, *_inputs(api))
    return _gradients(api, *pair)


def _hard_negatives(api: Api, cached: Run) -> Any:
    encoder = _encoder(api, api.dropout)
    cached(encoder, api.loss, *_inputs(api, 3))
    return _gradients(api, encoder)


def _one_side_frozen(api: Api, cached: Run) -> Any:
    pair = _encoder(api, api.dropout), _encoder(api, api.dropout)
    for parameter in pair[0].parameters():
        api.freeze(parameter)
    cached(pair, api.loss, *_inputs(api))
    return _gradients(api, *pair)


def _statistics(api: Api, cached: Run) -> Any:
    norm = api.batch_norm(6)
    encoder = _encoder(api, norm)
    cached(encoder, api.loss, *_inputs(api))
    return [*_gradients(api, encoder), *_seen(api, *norm_statistics(norm))]


def _numpy_random(api: Api, cached: Run) -> Any:
    encoder = _encoder(api, lambda h: h * float(np.random.rand()))
    cached(encoder, api.loss, *_inputs(api))
    return _gradients(api, encoder)


def _temperature(api: Api, cached: Run) -> Any:
    encoder, scale = _encoder(api, api.dropout), api.leaf(1)
    cached(encoder, lambda q, p: api.loss(q * scale.exp(), p), *_inputs(api))
    return [*_gradients(api, encoder), *_seen(api, scale.grad)]


def _hook(api: Api, cached: Run) -> Any:
    encoder = _encoder(api, api.dropout)
    encoder.first.weight.register_hook(lambda gradient: gradient.clip(-0.01, 0.01))
    cached(encoder, api.loss, *_inputs(api))
    return _gradients(api, encoder)


def _not_repeatable(api: Api, cached: Run) -> Any:
    count = iter(range(1, 99))
    encoder = _encoder(api, lambda h: h * next(count))
    if isinstance(cached, Plainly):
        return "refused"
    try:
        cached(encoder, api.loss, *_inputs(api))
    except NotOffered:
        raise
    except Exception:
        return "refused"
    return "silent"


CACHE_CASES: dict[str, Callable[[Api, Run], Any]] = {
    "one encoder for both sides, dropout, an uneven chunk": _tied,
    "two encoders": _two_encoders,
    "hard negatives": _hard_negatives,
    "one of two encoders is frozen": _one_side_frozen,
    "BatchNorm statistics, once for each chunk": _statistics,
    "randomness of NumPy in the encoder": _numpy_random,
    "a trained temperature in the loss": _temperature,
    "a hook that clips the gradient of a parameter": _hook,
    "a second forward that differs is refused": _not_repeatable,
}
