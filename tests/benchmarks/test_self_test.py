"""The cases of ``python -m benchmarks.correctness.self_test``, which a user runs on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import pytest

from benchmarks.correctness.self_test import main, self_test
from paddle_recompute import is_recomputing


def test_all_cases_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "self_test.json"
    assert main(["--output", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["ok"] and len(report["cases"]) == 5
    assert {"paddle", "python", "device", "machine", "seconds", "cases"} <= report.keys()
    assert all({"title", "ok", "seconds", "fault"} <= case.keys() for case in report["cases"])
    assert f"5 of 5 cases are right on {report['device']}" in capsys.readouterr().out


def test_a_fault_of_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = paddle.nn.Linear.forward

    def other_when_repeated(self: Any, x: Any) -> Any:
        return forward(self, x) * (1.5 if is_recomputing() else 1.0)

    monkeypatch.setattr(paddle.nn.Linear, "forward", other_when_repeated)
    report = self_test()
    faults = {case["title"]: case["fault"] for case in report["cases"]}
    assert not report["ok"]
    assert "second_forward_differs" in faults["an encoder of three layers"]
    assert not faults["an embedding and an LSTM, whose first inputs need no gradient"]
