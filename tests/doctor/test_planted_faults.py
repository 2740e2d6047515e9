"""Every planted fault is named with its place; healthy models pass."""

from __future__ import annotations

import fnmatch
from typing import Any

import paddle
import pytest

from paddle_recompute.doctor import DoctorReport, Finding, doctor
from tests.doctor.planted import FAULTS, HEALTHY, RANK_FAULTS, WARNINGS
from tests.ranks import run_ranks


def examine(build: Any) -> DoctorReport:
    paddle.seed(0)
    return doctor(**build())


def names(found: list[Finding], kind: str, where: str) -> bool:
    return any(
        one.kind == kind and (one.where == where or fnmatch.fnmatch(one.where, where))
        for one in found
    )


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_named(title: str) -> None:
    kind, where, build = FAULTS[title]
    report = examine(build)
    assert not report.ok
    assert names(report.findings, kind, where), str(report)


@pytest.mark.parametrize("title", WARNINGS)
def test_what_may_be_meant_is_a_warning_and_no_fault(title: str) -> None:
    kind, where, build = WARNINGS[title]
    report = examine(build)
    assert report.ok and not report.findings, str(report)
    assert names(report.warnings, kind, where), str(report)
    assert f"- {kind} at " in str(report)
    assert "warning" in str(report) and str(report).endswith("ok: no fault found")


@pytest.mark.parametrize("title", HEALTHY)
def test_a_healthy_model_passes(title: str) -> None:
    report = examine(HEALTHY[title])
    assert report.ok and not report.warnings, str(report)


def on_rank() -> dict[str, DoctorReport]:
    """What the doctor says of all `RANK_FAULTS`, on this rank."""
    return {title: examine(build) for title, (_, _, build) in RANK_FAULTS.items()}


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, DoctorReport]]:
    """One start of two ranks for all of them."""
    return run_ranks(on_rank, 2)


@pytest.mark.parametrize("title", RANK_FAULTS)
def test_a_fault_of_ranks_is_named(title: str, of_ranks: list[dict[str, DoctorReport]]) -> None:
    kind, where, _ = RANK_FAULTS[title]
    for reports in of_ranks:
        assert names(reports[title].findings, kind, where), str(reports[title])
