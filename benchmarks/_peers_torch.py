"""The peers of benchmarks/peers.py that are of torch; runs in .venv-torch."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks._peers_cases import Api, Run, judge, measure

warnings.simplefilter("ignore")
WIDTH, LAYERS, BATCH, LENGTH, PAIRS, CHUNK = 256, 6, 8, 64, 128, 16


class Torch(Api):
    name = "torch"
    Module = torch.nn.Module

    def linear(self, rows: int, columns: int) -> Any:
        return torch.nn.Linear(rows, columns)

    def batch_norm(self, width: int) -> Any:
        return torch.nn.BatchNorm1d(width)

    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any:
        return torch.randn(*shape, requires_grad=needs_gradient)

    def dropout(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.3)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)

    def array(self, tensor: Any) -> Any:
        return tensor.detach().numpy()

    def grad(self, y: Any, x: Any) -> Any:
        return torch.autograd.grad(y, [x])[0]

    def concat(self, parts: list[Any], axis: int) -> Any:
        return torch.cat(parts, axis)


def fairscale(function: Any, *args: Any, **kwargs: Any) -> Any:
    """FairScale wraps modules, so the function becomes one."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    class Holder(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return checkpoint_wrapper(Holder())(*args, **kwargs)


WAYS: dict[str, Run] = {
    "torch.utils.checkpoint, reentrant": lambda f, *a, **k: checkpoint(
        f, *a, use_reentrant=True, **k
    ),
    "torch.utils.checkpoint, not reentrant": lambda f, *a, **k: checkpoint(
        f, *a, use_reentrant=False, **k
    ),
    "FairScale checkpoint_wrapper": fairscale,
}


def encoder_step(way: str) -> Callable[[], object]:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(
        [
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True)
            for _ in range(LAYERS)
        ]
    )
    optimizer = torch.optim.AdamW(blocks.parameters(), 1e-3)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    wrapped: Any = list(blocks)
    if way.startswith("FairScale"):
        from fairscale.nn.checkpoint import checkpoint_wrapper

        wrapped = [checkpoint_wrapper(block) for block in blocks]

    def step() -> None:
        h = x
        for block in wrapped:
            h = WAYS[way](block, h) if way.startswith("torch") else block(h)
        h.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.1, "gelu", batch_first=True)
        self.words = torch.nn.Embedding(100, 64)
        self.body = torch.nn.TransformerEncoder(block, 4)

    def forward(self, ids: Any) -> Any:
        return self.body(self.words(ids)).mean(1)


def contrastive_step(way: str) -> Callable[[], object]:
    torch.manual_seed(0)
    tower = Tower()
    optimizer = torch.optim.AdamW(tower.parameters(), 1e-3)
    query, positive = torch.randint(0, 100, (2, PAIRS, 32))

    def loss_of(q: Any, p: Any, **_: Any) -> Any:
        q, p = torch.nn.functional.normalize(q), torch.nn.functional.normalize(p)
        return torch.nn.functional.cross_entropy(q @ p.T * 20, torch.arange(len(q)))

    def step() -> None:
        if way == "plain":
            loss_of(tower(query), tower(positive)).backward()
        else:
            st_loss(tower, query, positive).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def st_loss(tower: Any, query: Any, positive: Any) -> Any:
    """The cached loss of sentence-transformers around a module that returns its dict."""
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, features: Any) -> Any:
            return {"sentence_embedding": self.tower(features["input_ids"])}

    loss = CachedMultipleNegativesRankingLoss(Wrapped(), mini_batch_size=CHUNK)
    return loss([{"input_ids": query}, {"input_ids": positive}], None)


def main() -> None:
    what, way = sys.argv[1:3]
    torch.set_num_threads(1)
    if what == "cases":
        result: Any = judge(Torch(), WAYS[way])
    elif what == "encoder":
        result = measure(encoder_step(way))
    else:
        result = measure(contrastive_step(way))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
