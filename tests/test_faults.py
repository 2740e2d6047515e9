"""A fault of the memory ends a process of tests; none hangs in a handler."""

from __future__ import annotations

import signal

import pytest

from tests.processes import python


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT])
def test_nothing_of_paddles_runs_after_a_fault(fault: signal.Signals) -> None:
    done = python(
        "-c",
        "import os, sys, paddle\n"
        "from tests.forked_ranks import faults_end_the_process\n"
        "faults_end_the_process(sys.stderr)\n"
        f"os.kill(os.getpid(), {fault.value})",
        fails=True,
    )
    assert done.returncode == -fault
    assert "Fatal Python error" in done.stderr
    assert "Error Message Summary" not in done.stdout + done.stderr
