"""Ranks in a tenth of the time: forked from a process that has imported Paddle and not used it.

Such a process has one thread (3.3.1) and no device, group or tensor yet, so a fork of it is what a
new process is after its imports. It ends as any Python process does: with its own exit code, its
exit handlers and the destructors of C++.

``start(worker, environment, log, **arguments)`` returns the process; the server of this test run
forks it. A program of its own: ``python -m tests.forked_ranks MODULE...``. A rank of the simulated
device is a new process (``python -m tests.forked_ranks`` alone): Paddle loads that plugin as it is
imported.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tests.fake_device import selected

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("paddle_recompute.app.trainer", "paddle_recompute.integrations", "pytest")


class ForkedProcess:
    """A child of the server; what `subprocess.Popen` has of it.

    It has a number besides: the system gives the id of a process that has ended to another one.
    """

    def __init__(self, server: _Server, number: int, pid: int) -> None:
        self._server, self._number = server, number
        self.pid = pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None: it runs."""
        return self._server.codes.get(self._number)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, seen from the one that asks for it."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._started: list[tuple[int, int]] = []
        self._answered = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_ranks", *MODULES],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._asking = threading.Lock()
        threading.Thread(target=self._listen, name="forked ranks", daemon=True).start()

    def start(self, told: dict[str, Any]) -> ForkedProcess:
        assert self._process.stdin is not None
        with self._asking:
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
            with self._answered:
                if not self._answered.wait_for(lambda: self._started, timeout=120):
                    raise RuntimeError("the server of forked ranks does not answer")
                return ForkedProcess(self, *self._started.pop())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, number, value = line.split()
            with self._answered:
                if what == "ended":
                    self.codes[int(number)] = int(value)
                else:
                    self._started.append((int(number), int(value)))
                self._answered.notify_all()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.end)
    return server


def start(
    worker: Callable[..., Any], environment: dict[str, str], log: Path, /, **arguments: Any
) -> subprocess.Popen[bytes] | ForkedProcess:
    """A new process that calls ``worker(**arguments)``, with its output in `log`."""
    job = pickle.dumps((worker.__module__, worker.__qualname__, arguments))
    log.touch()
    if not selected.is_selected():
        told = {"environment": environment, "log": str(log), "job": job.hex()}
        return _server().start(told)
    command = [sys.executable, "-u", "-m", "tests.forked_ranks"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
    assert process.stdin is not None
    process.stdin.write(job)
    process.stdin.close()
    return process


def print_stacks_on_request() -> None:
    """After a fault of the memory, or SIGUSR1: also where the main thread is in C++ for ever."""
    faults_end_the_process(sys.stderr)
    faulthandler.register(signal.SIGUSR1)


def faults_end_the_process(where: int | TextIO) -> None:
    """A fault of the memory writes where each thread is, and nothing of Paddle's runs after it.

    Paddle's own handlers call malloc, so a process whose heap is damaged hangs in them for ever. It
    does so too where Python's handler has the word first: that one calls the handler it replaced.
    """
    faulthandler.disable()
    for fault in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        signal.signal(fault, signal.SIG_DFL)
    faulthandler.enable(where)


def _serve() -> dict[str, Any] | None:
    """Fork for each line of standard input; in a child, what it is told; None: no more input."""
    told = ""
    numbers, number_of = itertools.count(), {}
    while True:
        for pid, code in _ended():
            print("ended", number_of.pop(pid), code, flush=True)
        if not select.select([0], [], [], 0.05)[0]:
            continue
        data = os.read(0, 1 << 16).decode()
        if not data:
            for pid in number_of:  # a rank that is stopped would stay for ever
                os.kill(pid, signal.SIGCONT)
            return None
        *lines, told = (told + data).split("\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                return dict(json.loads(line))
            number_of[pid] = next(numbers)
            print("started", number_of[pid], pid, flush=True)


def _ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _become(told: dict[str, Any]) -> None:
    """Take over log and environment."""
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(told["environment"])


def _do(job: bytes) -> None:
    module, name, arguments = pickle.loads(job)
    getattr(importlib.import_module(module), name)(**arguments)


if __name__ == "__main__":
    if not sys.argv[1:]:
        _do(sys.stdin.buffer.read())
    else:
        for name in sys.argv[1:]:
            importlib.import_module(name)
        gc.freeze()  # imported modules are no garbage; a collection would take 0.2 s with them
        if (told := _serve()) is not None:
            _become(told)
            _do(bytes.fromhex(told["job"]))
