"""The peers of benchmarks/speed/peers.py that are of torch; runs in .venv-torch."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.speed._peers_sides import Api, NotOffered, Run, main

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Torch(Api):
    Module = torch.nn.Module

    def __init__(self) -> None:
        self.ways = {
            "torch, reentrant": lambda f, *a, **k: checkpoint(f, *a, use_reentrant=True, **k),
            "torch, not reentrant": lambda f, *a, **k: checkpoint(f, *a, use_reentrant=False, **k),
            "FairScale": _fairscale,
        }
        self.caches = {"GradCache": _grad_cache, "sentence-transformers": _sentence_transformers}

    def linear(self, rows: int, columns: int) -> Any:
        return torch.nn.Linear(rows, columns)

    def batch_norm(self, width: int) -> Any:
        return torch.nn.BatchNorm1d(width)

    def embedding(self, count: int, width: int) -> Any:
        return torch.nn.Embedding(count, width)

    def blocks(self, count: int, width: int) -> Any:
        make = torch.nn.TransformerEncoderLayer
        return torch.nn.ModuleList(
            [make(width, 4, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(count)]
        )

    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any:
        return torch.randn(*shape, requires_grad=needs_gradient)

    def ids(self, *shape: int) -> Any:
        return torch.randint(0, 100, shape)

    def freeze(self, parameter: Any) -> None:
        parameter.requires_grad_(False)

    def dropout(self, x: Any) -> Any:
        return F.dropout(x, 0.3)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)

    def array(self, tensor: Any) -> Any:
        return tensor.detach().numpy()

    def grad(self, y: Any, x: Any) -> Any:
        return torch.autograd.grad(y, [x])[0]

    def concat(self, parts: list[Any], axis: int) -> Any:
        return torch.cat(parts, axis)

    def loss(self, query: Any, *others: Any) -> Any:
        scores = F.normalize(query) @ F.normalize(torch.cat(others)).T * 20
        return F.cross_entropy(scores, torch.arange(len(query)))

    def adamw(self, parameters: Any) -> tuple[Callable[[], object], Callable[[], object]]:
        optimizer = torch.optim.AdamW(parameters, 1e-3)
        return optimizer.step, optimizer.zero_grad

    def wrapped(self, way: str, blocks: Any) -> list[Run]:
        if way != "FairScale":
            return super().wrapped(way, blocks)
        from fairscale.nn.checkpoint import checkpoint_wrapper

        return [checkpoint_wrapper(block) for block in blocks]


def _fairscale(function: Any, *args: Any, **kwargs: Any) -> Any:
    """FairScale wraps modules, so the function becomes one."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    class Holder(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return checkpoint_wrapper(Holder())(*args, **kwargs)


def _grad_cache(encoders: Any, loss: Run, chunk: int) -> Run:
    """The authors' own. gradcache 0.0.1 imports itself under the name of its repository."""
    sys.modules["grad_cache"] = importlib.import_module("gradcache")
    kind = importlib.import_module("gradcache.grad_cache").GradCache
    pair = encoders if isinstance(encoders, tuple) else (encoders, encoders)

    def run(*inputs: Any) -> Any:
        models = [pair[min(place, 1)] for place in range(len(inputs))]
        return kind(models, chunk, loss)(*inputs)

    return run


def _sentence_transformers(encoders: Any, loss: Run, chunk: int) -> Run:
    """Its cached loss, around a module that returns a dict as its models do."""
    if isinstance(encoders, tuple) or getattr(loss, "__self__", None) is None:
        raise NotOffered  # one encoder, and the loss of its own
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")

    class Wrapped(torch.nn.Sequential):
        def forward(self, features: Any) -> Any:
            return {"sentence_embedding": self[0](features["input_ids"])}

    cached = losses.CachedMultipleNegativesRankingLoss(Wrapped(encoders), mini_batch_size=chunk)

    def run(*inputs: Any) -> Any:
        value = cached([{"input_ids": x} for x in inputs], None)
        value.backward()
        return value

    return run


if __name__ == "__main__":
    main(Torch())
