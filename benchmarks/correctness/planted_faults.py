"""What the doctor finds of faults that were planted, and what it says of healthy models.

    python -m benchmarks.correctness.planted_faults

The faults and models are those of ``tests/doctor/planted.py``. Takes about a minute.
"""

from __future__ import annotations

from typing import Any

import paddle

from benchmarks.harness.record import table, write_record
from paddle_recompute import doctor
from tests.doctor.planted import FAULTS, HEALTHY, RANK_FAULTS
from tests.doctor.test_planted_faults import names, on_rank
from tests.ranks import run_ranks


def main() -> None:
    """Examine all of them and write the tables."""
    rows: list[list[Any]] = []
    for title, (kind, where, build) in FAULTS.items():
        paddle.seed(0)
        report = doctor(**build())
        others = [str(one).partition(":")[0] for one in report.findings if one.kind != kind]
        named = "named" if names(report, kind, where) else "**missed**"
        rows.append([title, 1, named, f"`{kind}` at `{where or 'the model'}`", "; ".join(others)])
    of_ranks = run_ranks(on_rank, 2)
    for title, (kind, where, _) in RANK_FAULTS.items():
        found = [names(reports[title].findings, kind, where) for reports in of_ranks]
        named = "named, on all ranks" if all(found) else "**missed**"
        rows.append([title, 2, named, f"`{kind}` at `{where or 'the model'}`", ""])
    sound: list[list[Any]] = []
    for title, make in HEALTHY.items():
        paddle.seed(0)
        report = doctor(**make())
        sound.append([title, "ok" if report.ok else "**" + "; ".join(map(str, report.findings))])
    missed = sum("**" in row[2] for row in rows)
    alarms = sum(row[1] != "ok" for row in sound)
    path = write_record(
        "planted_faults",
        "Planted faults, and what the doctor says",
        "python -m benchmarks.correctness.planted_faults",
        [
            f"{len(rows) - missed} of {len(rows)} faults named with kind and place; "
            f"{alarms} false alarms on {len(sound)} healthy models.",
            "",
            *table(["planted fault", "ranks", "doctor", "finding", "other findings"], rows),
            "",
            *table(["healthy model", "doctor"], sound),
        ],
    )
    print(path)
    print(path.read_text())


if __name__ == "__main__":
    main()
