"""`doctor` on models of PaddleNLP and PaddleFormers, where these are installed."""

from __future__ import annotations

import pytest

from tests.integrations.test_trainers import each_library
from tests.processes import python


@each_library
@pytest.mark.parametrize("fault", [[], ["fault"]], ids=["sound", "planted fault"])
def test_a_model_is_examined(library: str, fault: list[str]) -> None:
    done = python("-m", "tests.doctor.examined", library, *fault)
    assert f"sound: {not fault}" in done.stdout
    assert "2 recomputed" in done.stdout
    if fault:
        assert "layers.1" in done.stdout
