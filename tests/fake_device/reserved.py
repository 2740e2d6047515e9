"""Bytes of the simulated device that one step takes, its inputs kept in each of several places.

python -m tests.fake_device.reserved None host disk
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import paddle

from paddle_recompute import recompute
from tests.fake_device import switches
from tests.recompute.contract import leaf

BLOCKS, WIDTH, BATCH = 16, 64, 2048


def peak(offload: str | None) -> int:
    paddle.seed(0)
    layers = [
        paddle.nn.Sequential(paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Tanh())
        for _ in range(BLOCKS)
    ]
    y = leaf(BATCH, WIDTH)
    for layer in layers:
        y = recompute(layer, y, offload=offload)
    y.sum().backward()
    return switches.read("peak_bytes")


def in_a_child(offload: str | None) -> int:
    """In a process of its own: Paddle keeps what it has taken of the device."""
    with tempfile.TemporaryFile("w+") as result:
        child = os.fork()
        if child == 0:
            result.write(str(peak(offload)))
            result.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with status {status}"
        result.seek(0)
        return int(result.read())


if __name__ == "__main__":
    print(json.dumps({name: in_a_child(None if name == "None" else name) for name in sys.argv[1:]}))
