"""Where the inputs of recomputed functions wait: on the device, in host memory, on disk."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.recompute import _offload, _storage
from paddle_recompute.recompute._offload import OFFLOADS
from tests.recompute.contract import Run, Seen, assert_as_plain, leaf

WIDTH, BATCH = 64, 256
ACTIVATION = 4 * WIDTH * BATCH


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    # What another test has left behind has its file in another folder.
    monkeypatch.setattr(OFFLOADS["disk"]._thread, "queue", None, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def spill_files() -> list[str]:
    """The temporary files that this process holds open, with a name or without one."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if tempfile.gettempdir() in target:
            found.append(target)
    return found


def block() -> paddle.nn.Layer:
    return paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.GELU(), paddle.nn.Dropout(0.1)
    )


@pytest.mark.parametrize("offload", ["none", "host", "disk"])
def test_two_steps_are_those_of_plain_calls(offload: Any) -> None:
    def outcome(run: Run) -> Seen:
        layers, x = [block() for _ in range(3)], leaf(BATCH, WIDTH)
        for _ in range(2):
            y = x * 2
            for layer in layers:
                y = run(layer, y)
            y.square().sum().backward()
        return {"x": x, "layers": layers}

    assert_as_plain(outcome, functools.partial(recompute, offload=offload))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, [5, 3]) for dtype in ("float64", "float16", "bfloat16", "int64", "bool")),
        *(("float32", shape) for shape in ([], [1], [2, 3, 4])),
    ],
    ids=str,
)
def test_every_tensor_comes_back_from_disk_bit_by_bit(
    dtype: str, shape: list[int], folder: Path
) -> None:
    value = (paddle.randn(shape) * 100).astype(dtype)
    seen = []

    def function(x: paddle.Tensor, value: paddle.Tensor) -> paddle.Tensor:
        seen.append((value.dtype, value.numpy().tobytes(), value.shape))
        return x.exp()

    recompute(function, leaf(3), value, offload="disk").sum().backward()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_parameters_stay_where_they_are(folder: Path) -> None:
    weight = paddle.nn.Linear(WIDTH, WIDTH).weight
    before = len(spill_files())
    y = recompute(lambda w: w.tanh(), weight, offload="disk")
    assert len(spill_files()) == before
    y.sum().backward()
    assert weight.grad is not None


def test_the_file_is_there_between_forward_and_backward_and_gone_after(folder: Path) -> None:
    assert spill_files() == []
    first = recompute(block(), leaf(BATCH, WIDTH) * 2, offload="disk")
    second = recompute(block(), first * 2, offload="disk")
    assert len(spill_files()) == 1  # one a step, not one a tensor
    second.sum().backward()
    del first, second
    assert spill_files() == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("failing_call", [1, 2])
def test_the_file_is_gone_after_an_exception(failing_call: int, folder: Path) -> None:
    calls: list[Any] = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        if len(calls) == failing_call:
            raise KeyError("broken")
        return x.tanh()

    def step() -> None:
        first = recompute(block(), leaf(BATCH, WIDTH) * 2, offload="disk")
        recompute(function, first * 2, offload="disk").sum().backward()

    try:  # pytest.raises would keep the traceback, and with it all local variables
        step()
    except KeyError:
        calls.append("raised")
    assert calls[-1] == "raised"
    deadline = time.monotonic() + 10
    while spill_files() and time.monotonic() < deadline:
        gc.collect()  # meanwhile the thread that reads ahead lets go of the file, too
    assert spill_files() == [] and list(folder.iterdir()) == []


def test_disk_holds_no_input_in_memory(folder: Path) -> None:
    held = []
    for offload in (None, "host", "disk"):
        layer, x = block(), leaf(BATCH, WIDTH)
        before = _memory.current_bytes()
        y = recompute(layer, x * 2, offload=offload)
        held.append(_memory.current_bytes() - before)
        del y
    on_device, on_host, on_disk = held
    if paddle.get_device() == "cpu":
        assert on_host == on_device  # the tensor is on the host already: nothing to do
    else:
        assert on_device - on_host == ACTIVATION
    assert on_device - on_disk == ACTIVATION


def test_on_a_cpu_it_says_once_that_the_host_is_no_other_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _offload._warn_that_it_does_nothing.cache_clear()
    for _ in range(2):
        recompute(block(), leaf(BATCH, WIDTH) * 2, offload="host").sum().backward()
    said = [one for one in caplog.messages if "offload='host') has no effect on a CPU" in one]
    assert len(said) == (1 if paddle.get_device() == "cpu" else 0)


def test_a_block_with_several_inputs_reads_each_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """And reads the inputs of the block before ahead, as many as it has itself."""
    reads: list[int] = []
    read = _storage._File.read_into
    monkeypatch.setattr(
        _storage._File,
        "read_into",
        lambda self, data, offset: (reads.append(offset), read(self, data, offset))[1],
    )
    x, scale = leaf(4, 4), paddle.full([4, 4], 0.5)
    y = x * 2
    for _ in range(3):
        y = recompute(lambda y, scale: (y * scale).tanh(), y, scale, offload="disk")
    y.sum().backward()
    assert len(reads) == 6 and len(set(reads)) == 6


def test_the_tensor_before_is_read_while_one_is_used() -> None:
    storage = OFFLOADS["disk"]
    first, second = storage.keep(paddle.ones([3])), storage.keep(paddle.full([3], 2.0))
    assert second.load().tolist() == [2.0, 2.0, 2.0]
    assert first._slot._arriving is not None, "nothing was read ahead"
    values, done = first._slot._arriving
    done.result()
    assert values.tolist() == [1.0, 1.0, 1.0]
    assert first.load().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("device", ["cpu", "another"])
def test_the_thread_that_reads_ahead_keeps_the_memory_that_it_writes_to(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the slot is dropped meanwhile, with its model or because a step has failed."""
    monkeypatch.setattr(_storage.paddle, "get_device", lambda: device)
    dropped = threading.Event()
    kept = []

    def read_into(self: Any, data: memoryview, offset: int) -> None:
        dropped.wait()
        kept.append(is_alive() is not None)

    monkeypatch.setattr(_storage._File, "read_into", read_into)
    slot = _storage.slots("disk", None)()
    slot.write(paddle.arange(1000.0))
    slot.prefetch()
    is_alive = weakref.ref(slot._arriving[0])  # a Tensor of the CPU, or else an array
    del slot
    gc.collect()
    dropped.set()
    _storage._reader.submit(int).result()  # what was under way is over
    assert kept == [True]
    gc.collect()
    assert is_alive() is None
