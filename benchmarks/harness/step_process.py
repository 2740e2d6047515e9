"""A process that makes one step at a time, so that sides of other libraries take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.harness.record import ROOT, path_with_root


class StepProcess:
    """A process that runs ``python -m module argument`` and `serve_steps`, with one thread."""

    def __init__(self, python: str, module: str, argument: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", module, argument],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path_with_root(),
                **environment,
            },
        )

    def seconds(self, step: str) -> float:
        """CPU seconds of one `step`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(step, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side of the benchmark ended with {self._process.wait()}")
        return float(line)

    def end(self) -> None:
        """Wait for its end."""
        self._process.communicate()


def serve_steps(steps: dict[str, Callable[[], object]]) -> None:
    """Run the step that each line of the standard input names; print its CPU seconds."""
    for line in sys.stdin:
        start = time.process_time()
        steps[line.strip()]()
        print(time.process_time() - start, flush=True)
