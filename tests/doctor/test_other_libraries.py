"""`doctor` on models of PaddleNLP and PaddleFormers, where these are installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integrations.test_trainers import each_library
from tests.ranks import ROOT


@each_library
@pytest.mark.parametrize("fault", [[], ["fault"]], ids=["sound", "planted fault"])
def test_a_model_is_examined(library: str, fault: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.doctor.examined", library, *fault],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"sound: {not fault}" in done.stdout
    assert "2 recomputed" in done.stdout
    if fault:
        assert "layers.1" in done.stdout
