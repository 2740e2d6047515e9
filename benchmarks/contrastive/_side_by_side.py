"""Two libraries in two environments, each a process that takes orders, on the same inputs.

A library is a `Library` in a module that ends with ``serve(library)``; `Side` starts that module
with the interpreter of its environment and gives the orders, one JSON object a line. Nothing here
imports a framework, so that it can be used in both environments. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WARM_UP_PAIRS = 2  # what is run before a peak: it makes the moments, and hardly any activations


class Step(Protocol):
    """A model, its optimizer and one way to compute the loss."""

    def backward(self, query: Array, positive: Array) -> float:
        """Leave the gradients of ids ``[batch, length]``, int64, 0 is padding; returns the loss."""
        ...

    def update(self) -> None:
        """Let the optimizer use up the gradients."""
        ...

    def gradient_norm(self) -> float:
        """Of all gradients together."""
        ...


class Library(Protocol):
    """What is measured."""

    def versions(self) -> dict[str, str]:
        """What a reader must know of the environment."""
        ...

    def make_step(self, way: str, *, dropout: bool) -> Step:
        """A fresh model with the weights of ``weights.npz``; `way` is the caller's name for it."""
        ...

    def allocated_peak(self, run: Callable[[], object]) -> int:
        """The most bytes of tensors that `run` holds beyond what was held before, exact."""
        ...


def serve(library: Library, folder: Path) -> None:
    """Carry out the orders on standard input until it ends; inputs are in ``batches.npz``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    batches = np.load(folder / "batches.npz")
    steps: dict[str, Step] = {}

    def inputs(batch: str) -> tuple[Array, Array]:
        return batches[f"{batch}.query"], batches[f"{batch}.positive"]

    def gradient(way: str, batch: str) -> dict[str, float]:
        step = library.make_step(way, dropout=False)
        return {"loss": step.backward(*inputs(batch)), "norm": step.gradient_norm()}

    def seconds(way: str, batch: str) -> float:
        if way not in steps:
            steps[way] = library.make_step(way, dropout=True)
        query, positive = inputs(batch)
        start = time.perf_counter()
        steps[way].backward(query, positive)
        steps[way].update()
        return time.perf_counter() - start

    def peak(way: str, names: Sequence[str]) -> dict[str, int]:
        step = library.make_step(way, dropout=True)

        def run(batch: tuple[Array, Array]) -> None:
            step.backward(*batch)
            step.update()

        every = [inputs(name) for name in names]
        run((every[0][0][:WARM_UP_PAIRS], every[0][1][:WARM_UP_PAIRS]))
        held = _forget_peak()
        for batch in every:
            run(batch)
        resident = _of_status("VmHWM") - held
        return {"resident": resident, "allocated": library.allocated_peak(lambda: run(every[0]))}

    orders: dict[str, Callable[..., Any]] = {
        "versions": library.versions,
        "gradient": gradient,
        "seconds": seconds,
        "peak": peak,
    }
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(orders[order.pop("do")](**order)) + "\n")
        answers.flush()


def _forget_peak() -> int:
    """Give back what is free, and start the high-water mark of resident memory anew; the bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmRSS")


def _of_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; this needs Linux")


class Side:
    """A process that serves a library; a context manager, at whose end the process is gone.

    Args:
        command: Starts it.
        environment: Its environment variables, the number of threads among them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)

    def __enter__(self) -> Side:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # it may be in the midst of a long order
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Give an order, wait for the answer."""
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
            answer = self._pipe(self._process.stdout).readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"{' '.join(self._command)}: has ended at {do} {arguments}; see above")
        return json.loads(answer)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
