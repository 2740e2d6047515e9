"""A fault of the memory ends a process of tests; none hangs in a handler."""

from __future__ import annotations

import signal

from tests.processes import python


def test_nothing_of_paddles_runs_after_a_fault() -> None:
    done = python(
        "-c",
        "import os, signal, sys, paddle\n"
        "from tests.forked_ranks import faults_end_the_process\n"
        "faults_end_the_process(sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)",
        fails=True,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error" in done.stderr
    assert "Error Message Summary" not in done.stdout + done.stderr
