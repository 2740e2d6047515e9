"""The side of torch of benchmarks/memory/selective.py; runs in .venv-torch."""

from __future__ import annotations

import argparse
import ctypes
import json
from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.memory.selective import BATCH, HEADS, HIDDEN, LAYERS, LENGTH, VARIANTS, measure

LINEAR = ("qkv", "out", "up", "down")  # in the order of their calls
ATEN = torch.ops.aten


class Block(torch.nn.Module):
    """That of selective.py."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        mixed = self.qkv(self.norm1(x)).reshape(BATCH, -1, 3, HEADS, HIDDEN // HEADS)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        q = q * (HIDDEN // HEADS) ** -0.5
        heads = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def keeping(kept: tuple[str, ...]) -> Any:
    """Contexts that keep what the operators of these parts return."""
    numbers = [LINEAR.index(name) for name in kept if name in LINEAR]
    attention = (ATEN.bmm.default, ATEN._softmax.default) if "attend" in kept else ()

    def contexts() -> Any:
        calls: Counter[bool] = Counter()

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            is_kept = operator in attention
            if operator is ATEN.addmm.default:
                is_kept = calls[context.is_recompute] in numbers
                calls[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo2


def current_bytes() -> int:
    """What the C library has given out; torch's tensors of the CPU are in it."""
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def make_torch(name: str) -> Any:
    """See `selective.Side`."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
    kept = VARIANTS[name]
    every = 2 if name.startswith("every_n") else 1
    more = {"context_fn": keeping(kept)} if kept else {}
    x = torch.randn(BATCH, LENGTH, HIDDEN)

    def forward() -> Any:
        y = x
        for number, block in enumerate(model):
            if kept is None or number % every:
                y = block(y)
            else:
                y = checkpoint(block, y, use_reentrant=False, **more)
        return y.square().mean()

    def backward(loss: Any) -> list[bytes]:
        loss.backward()
        gradients = [one.grad.numpy().tobytes() for one in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients

    return forward, backward, current_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--side", action="store_true")
    torch.set_num_threads(1)
    print(json.dumps(measure(make_torch, parser.parse_args().rounds)))
