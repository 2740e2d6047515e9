"""On which device the tests run: the CPU, or the simulated device (``tests/fake_device``)."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from tests import sampled
from tests.fake_device import selected
from tests.forked_ranks import faults_end_the_process

# Whether MKL takes them depends on what ran in the process before, and so do the last bits.
os.environ.setdefault("PADDLE_RECOMPUTE_CPU_SETTINGS", "0")
settings.register_profile("tests", deadline=None)  # no test fails because a machine is slow
settings.load_profile("tests")
_why_not = selected.why_not() if selected.is_selected() else None
if selected.is_selected() and _why_not is None:
    selected.enter()  # before any module of tests imports Paddle


_extract_stack = traceback.extract_stack


def _extract_nearest(f: FrameType | None = None, limit: int | None = None) -> Any:
    """Paddle keeps the stack of each operator of a Program, most of which are frames of pytest: it
    took a fifth of the time of such a test.
    """
    return _extract_stack(f or sys._getframe(1), limit or 12)


traceback.extract_stack = _extract_nearest


@pytest.fixture(autouse=True)
def _environment_as_at_the_start() -> Iterator[None]:
    """A command that runs in this process, or in a fixture of a module, sets variables with which
    later ranks compute otherwise: ``FLAGS_use_stride_kernel`` for instance."""
    _restore_environment()
    yield
    _restore_environment()


_environment = dict(os.environ)


def _restore_environment() -> None:
    of_pytest = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_")}
    expected = {**_environment, **of_pytest}
    if os.environ != expected:
        os.environ.clear()
        os.environ.update(expected)


@pytest.fixture(autouse=True)
def _on_the_device_again() -> Iterator[None]:
    """After a test with a Trainer, whose configuration has set the device of this process."""
    yield
    if selected.is_selected() and _why_not is None:
        import paddle

        paddle.set_device(f"{selected.NAME}:0")


@pytest.fixture(autouse=True)
def _strides_as_at_the_start() -> Iterator[None]:
    """`use_cpu_settings` sets a flag of Paddle's for the whole process."""
    yield
    if "paddle" in sys.modules:
        import paddle

        paddle.set_flags({"FLAGS_use_stride_kernel": _strides})


_strides = _environment.get("FLAGS_use_stride_kernel", "1") not in ("0", "false", "False")


@pytest.hookimpl(tryfirst=True)  # before pytest looks which tests are of the matrix
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the simulated device: leave out what cannot run there, or everything without g++."""
    sampled.mark_the_rest(items)
    if not selected.is_selected():
        return
    from tests.fake_device.known import KNOWN

    for item in items:
        known = next((KNOWN[name] for name in _names(item.nodeid) if name in KNOWN), None)
        reason = _why_not or known
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now that all modules are imported.

    They live as long as the process, so collections leave them out: ``gc.collect`` takes 0.1 s with
    Paddle imported, and the memory probe alone makes two.

    Paddle has replaced the handlers of SIGSEGV and SIGABRT (tests/forked_ranks.py).
    """
    if "paddle" in sys.modules:
        _multiply_once()
    gc.collect()
    gc.freeze()
    faults_end_the_process(session.config.stash[fault_handler_stderr_fd_key])


def _multiply_once() -> None:
    """MKL and OpenMP read their variables at the first product, and never again.

    A test that runs a command in this process sets ``OMP_NUM_THREADS`` for it. If that came before
    the first product, later tests of the process would sum in another order than ranks do.
    """
    import paddle

    matrix = paddle.to_tensor([[1.0] * 8] * 8, place=paddle.CPUPlace())
    paddle.matmul(matrix, matrix)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module of tests has left for good slows no collection of the next ones down.

    The programs of one fuzzer leave 420,000 objects, with which a collection takes 0.6 s; tests of
    the planner make dozens of them.
    """
    module = getattr(item, "module", None)
    if nextitem is not None and getattr(nextitem, "module", None) is not module:
        gc.collect()
        gc.freeze()


def _names(node: str) -> list[str]:
    """The test itself, without its parameters, then all that it is in."""
    names = [node, node.partition("[")[0]]
    while "::" in names[-1]:
        names.append(names[-1].rpartition("::")[0])
    while "/" in names[-1]:
        names.append(names[-1].rpartition("/")[0])
    return names
