"""Runs of two machines: ``fleetrun`` on each of them, no shared disk, a cable between them.

The machines are two network namespaces of one computer, each with a hostname, an ``/etc/hosts`` and
a folder of its own; one rank on each, over gloo. "Bits of one machine": model and optimizer state
after four steps are equal, byte for byte, to those of two ranks on one machine. Seconds count from
the start of the launchers, on a computer with two cores that did other work too.

    make bench-several_machines          # as root; two minutes. It has the cases of test-machines
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.network import require_root_and_iproute2
from benchmarks.harness.record import table, write_record


class Outcomes:
    """A pytest plugin: a row for each test."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest."""
        if report.when == "call" and report.passed:
            noted = dict(report.user_properties)
            case = report.nodeid.rpartition("::test_")[2].replace("_", " ")
            said = "<br>".join(line.replace("|", "\\|") for line in noted["said"])
            self.rows.append([case, noted["code"], f"{noted['seconds']:.0f}", said])


def main() -> None:
    """Run the tests and write the record."""
    require_root_and_iproute2()
    outcomes = Outcomes()
    code = pytest.main(["-q", "-m", "", "tests/machines"], plugins=[outcomes])
    if code != 0 or not outcomes.rows:
        raise SystemExit(f"tests/machines ended with code {int(code)}")
    header = ["case", "exit code on both", "seconds to the end of both", "said"]
    write_record(
        "several_machines",
        "Two machines",
        "make bench-several_machines",
        [*(__doc__ or "").strip().splitlines()[2:6], "", *table(header, outcomes.rows)],
    )


if __name__ == "__main__":
    main()
