"""Plans against measurements: ten budgets for each of several models, in dygraph and as a Program.

Ten budgets are laid between the smallest feasible one and the plain peak. Each plan is made and
verified (at most three corrections), and then the peak of a later optimizer step under it is
measured once more. "Predicted" is what was expected of the plan before it was measured. The calls
are measured in dygraph; what the plain step of a Program takes is known. Bytes are those of
Paddle's allocator, and exact: the collector thread of a Program's executor comes before the thread
that computes (`_prompt_frees`). "Next" is the peak of the next
faster plan: where it is above the budget, no plan of the menu uses the bytes between. Time is that
of forward and backward (of a whole step for a Program), the least of some rounds in turn, to the
plain one's: CPU time in dygraph, wall time for a Program. Each case has one processor, and a
Program runs in one thread. A hand policy is one of all and every_n (2, 3). The best hand policy of
a budget is the fastest whose measured peak is not above that of the plan.

    python -m benchmarks.memory.planner [--budgets N] [--cases encoder:dygraph,unet:static]
        [--rounds N] [--go-on] [--bytes-only]

The rows of cases that are not named are kept from the record. After each case the figures are
written to build/planner.json; with --go-on, cases that are there and were measured at this commit
are not measured again (``--go-on --cases ""`` writes the record of what there is). With
--bytes-only, no times are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.harness.record import (
    RESULTS,
    ROOT,
    environment,
    hardware_tag,
    in_own_process,
    table,
    write_record,
)
from benchmarks.memory._planner_models import CASES
from benchmarks.memory._planner_runs import measure

ALL = [f"{name}:dygraph" for name in CASES]
ALL += [f"{name}:static" for name, case in CASES.items() if case.static]
PARTIAL = ROOT / "build" / "planner.json"
"""What was measured so far; the record is written at the end."""
FORMERS = ROOT / ".venv-formers" / "bin" / "python"


def lines_of(found: dict[str, Any]) -> list[str]:
    """The section of one model in one mode."""

    def mib(size: float | None) -> str:
        return "none" if size is None else f"{size / 2**20:.2f}"

    rows = []
    for row in found["rows"]:
        if "refused" in row:
            rows.append([mib(row["budget"]), "refused", *[""] * 9])
            continue
        error = row["predicted"] / row["measured"] - 1
        timed = row["ratio"] is not None
        hand = row["hand"]
        rows.append(
            [
                mib(row["budget"]),
                mib(row["predicted"]),
                mib(row["measured"]),
                f"{error:+.3%}",
                "OVER" if row["measured"] > row["budget"] else "no",
                f"{row['measured'] / row['budget']:.1%}",
                mib(row["next"]),
                f"{row['predicted ratio']:.3f}" if timed else "",
                f"{row['ratio']:.3f}" if timed else "",
                "" if not timed else "none" if hand is None else f"{hand}, {row['hand ratio']:.3f}",
                f"{row['solving'] * 1e3:.0f}",
            ]
        )
    header = ["budget, MiB", "predicted", "measured", "error", "over?", "used", "next"]
    header += ["time, predicted", "time / plain", "best hand policy at that peak", "solved, ms"]
    return [
        f"## {found['title']}: {found['mode']}",
        "",
        f"{found['calls']} calls; plain "
        f"{mib(found['plain measured'])} MiB (predicted {mib(found['plain'])}), smallest feasible "
        f"{mib(found['smallest'])} MiB; probing took {found['probing / plain step']:.1f} plain "
        f"steps, {found['collecting / plain step']:.1f} of them for collecting garbage once. "
        f"Commit {found['commit']}, {found['seconds']:.0f} s.",
        "",
        *table(header, rows),
        "",
        "Hand policies (peak in MiB, time / plain): "
        + "; ".join(
            f"{key} {mib(p)}" + ("" if r is None else f", {r:.3f}")
            for key, (p, r) in found["hands"].items()
        )
        + ".",
        "",
    ]


def summary(everything: dict[str, dict[str, Any]]) -> list[str]:
    """The goals and what was found."""
    made = [r for one in everything.values() for r in one["rows"] if "refused" not in r]
    refused = sum("refused" in r for one in everything.values() for r in one["rows"])
    used = sorted(r["measured"] / r["budget"] for r in made)
    # A budget leaves more than 3 % although a faster plan would fit into it.
    left = sum(
        r["measured"] < 0.97 * r["budget"] and r["next"] is not None and r["next"] <= r["budget"]
        for r in made
    )
    over = sum(r["measured"] > r["budget"] for r in made)
    timed = [r for r in made if r["ratio"] is not None]
    slower = sum(r["hand ratio"] is not None and r["ratio"] > r["hand ratio"] * 1.03 for r in timed)
    rising = sum(
        after["measured"] < before["measured"] * 0.999
        for one in everything.values()
        for rows in [[r for r in one["rows"] if "refused" not in r]]
        for before, after in itertools.pairwise(rows)
    )
    # Collecting garbage once takes as long whatever the model is.
    probing = sorted(
        one["probing / plain step"] - one["collecting / plain step"] for one in everything.values()
    )
    goals = [
        ("budgets", ">= 100", str(len(made) + refused)),
        ("over the budget after verification", "0", f"{over} of {len(made)}"),
        ("refused", "0", f"{refused}"),
        ("peaks that fall where the budget rises", "0", f"{rising}"),
        ("budget used, median", ">= 97 %", f"{statistics.median(used):.1%}"),
        ("budget used, least", ">= 97 %", f"{used[0]:.1%}"),
        ("less than 97 % used though a faster plan would fit", "0", f"{left}"),
    ]
    for mode in ("dygraph", "static"):
        rows = [r for one in everything.values() if one["mode"] == mode for r in one["rows"]]
        rows = [r for r in rows if "refused" not in r]
        for name, kind in (("predicted", "peak"), ("verified", "peak after verification")):
            if rows:
                errors = sorted(abs(r[name] / r["measured"] - 1) for r in rows)
                middle = statistics.median(errors)
                goals += [
                    (f"{kind}, median error, {mode}", "<= 0.3 %", f"{middle:.3%}"),
                    (f"{kind}, worst error, {mode}", "<= 1 %", f"{errors[-1]:.3%}"),
                ]
        times = sorted(abs(r["predicted ratio"] / r["ratio"] - 1) for r in rows if r["ratio"])
        if times:
            goals += [
                (f"time, median error, {mode}", "<= 3 %", f"{statistics.median(times):.1%}"),
                (f"time, worst error, {mode}", "<= 8 %", f"{times[-1]:.1%}"),
            ]
    goals += [
        (
            "slower than a hand policy at its peak by more than 3 %",
            "0",
            f"{slower} of {len(timed)}",
        ),
        ("probing, plain steps, median", "<= 8", f"{statistics.median(probing):.1f}"),
        ("probing, plain steps, worst", "<= 8", f"{probing[-1]:.1f}"),
        ("longest solution", "1 s", f"{max(r['solving'] for r in made):.2f} s"),
    ]
    return ["## Goals", "", *table(["what", "goal", "found"], goals), ""]


def measured_apart(case: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one case, from a process of its own; None: it failed or took too long."""
    python = options.formers_python if case.startswith("formers") else sys.executable
    arguments = ["--case", case, "--budgets", str(options.budgets), "--rounds", str(options.rounds)]
    arguments += ["--bytes-only"] if options.bytes_only else []
    try:
        return dict(
            in_own_process(
                "benchmarks.memory.planner",
                *arguments,
                python=python,
                timeout=options.minutes * 60,
            )
        )
    except (subprocess.TimeoutExpired, SystemExit) as error:
        print(f"{case}: left out: {error}", flush=True)
        return None


def main() -> None:
    """Measure what is asked for and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(ALL))
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--bytes-only", action="store_true")
    parser.add_argument("--minutes", type=float, default=10, help="the most that a case may take")
    parser.add_argument("--case", help="internal: one case, in this process")
    parser.add_argument("--formers-python", default=str(FORMERS))
    options = parser.parse_args()
    if options.case:
        name, _, mode = options.case.partition(":")
        rounds = 0 if options.bytes_only else options.rounds
        print(json.dumps(measure(CASES[name], mode, options.budgets, rounds)))
        return
    commit = environment()["commit"]
    kept = sorted(RESULTS.glob(f"planner_{hardware_tag()}_*.json"))
    everything: dict[str, dict[str, Any]] = {}
    for path in (*kept[-1:], PARTIAL):
        if path.is_file():
            everything |= json.loads(path.read_text(encoding="utf-8"))
    everything = {key: everything[key] for key in ALL if key in everything}
    everything = {key: one for key, one in everything.items() if "commit" in one}
    for case in filter(None, options.cases.split(",")):
        if options.go_on and everything.get(case, {}).get("commit") == commit:
            continue
        if case.startswith("formers") and not os.path.exists(options.formers_python):
            print(f"{case}: left out, there is no {options.formers_python}")
            continue
        found = measured_apart(case, options)
        if found is None:
            continue
        everything[case] = found | {"commit": commit}
        # Not into the record yet: it would change the state of the repository that is noted.
        PARTIAL.parent.mkdir(exist_ok=True)
        PARTIAL.write_text(json.dumps(everything) + "\n", encoding="utf-8")
        print(f"{case} done", flush=True)
    record({key: everything[key] for key in ALL if key in everything}, options.rounds)


def record(everything: dict[str, dict[str, Any]], rounds: int) -> None:
    """Write the record and the figures."""
    sections = [line for found in everything.values() for line in lines_of(found)]
    path = write_record(
        "planner",
        "Plans against measurements",
        f"python -m benchmarks.memory.planner --rounds {rounds}",
        [
            *(__doc__ or "").strip().splitlines()[:15],
            "",
            "Each case says at which commit it was measured. Times are ratios of the same run. "
            "They are left out where other work loaded the machine.",
            "",
            *(summary(everything) if everything else []),
            *sections,
        ],
    )
    path.with_suffix(".json").write_text(json.dumps(everything) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
