"""Random dygraph programs: recompute and keep leave behind what the plain calls do, bit by bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import paddle
import pytest
from hypothesis import HealthCheck, Phase

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from tests.fuzz import budget
from tests.fuzz.dygraph_programs import Program, may_be_refused, observe, programs
from tests.recompute.contract import differences, plain

MOST_REFUSED = 0.2
"""The share of programs that may end in a refusal; more would mean that little is tested."""


def verdict(program: Program, last: Path) -> str:
    """How recompute did; raises AssertionError where it was wrong.

    If the interpreter dies, `last` says what it was doing.
    """
    last.write_text(f"plain: {program}\n", encoding="utf-8")
    try:
        wanted = observe(program, plain)
    except (RuntimeError, ValueError, OSError) as error:
        try:
            observe(program, recompute)
        except (RuntimeError, ValueError, OSError, RecomputeError):
            return "refused by Paddle"
        if may_be_refused(program):
            return "refused by Paddle"
        raise AssertionError("the plain program fails, and this one does not") from error
    last.write_text(f"recompute: {program}\n", encoding="utf-8")
    try:
        found = observe(program, recompute)
    except RecomputeError:
        if may_be_refused(program):
            return "refused by recompute"
        raise
    lines = differences(found, wanted)
    if not lines:
        return "equal"
    if differences(observe(program, plain), wanted):
        return "not deterministic in Paddle"
    raise AssertionError("\n".join(lines))


@pytest.mark.timeout(0)
def test_programs(tmp_path: Path) -> None:
    last = tmp_path / "last_program.txt"
    seen: Counter[str] = Counter()

    def each(program: Program) -> None:
        seen[verdict(program, last)] += 1
        if seen.total() % 100 == 0:
            print(seen.total(), "programs", flush=True)

    phases = [Phase.generate, Phase.shrink]
    health = list(HealthCheck)
    print(f"Paddle {paddle.__version__}, dygraph programs")
    print(f"If the interpreter dies, the program is in {last}", flush=True)
    try:
        budget.fuzz(
            programs, each, 28, phases=phases, suppress_health_check=health, print_blob=False
        )
    finally:
        print(", ".join(f"{count} {what}" for what, count in seen.most_common()), flush=True)
    assert seen["refused by recompute"] <= MOST_REFUSED * seen.total()
