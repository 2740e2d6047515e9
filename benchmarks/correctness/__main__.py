"""Every case of recompute's contract, on Paddle's recompute and on ours, against the plain call.

The cases are those of ``tests/recompute``: each does what a user would do and returns what a user
can look at (outputs, gradients, buffers, flags, random streams, ...). Each runs in a process of its
own, once with plain calls and once for each subject, so a crash costs one cell of the table.

    python -m benchmarks.correctness            # this Paddle's results; then the table of all

Writes ``results/recompute_cases_paddle<version>.json`` and, from all such files,
``docs/recompute_cases.md``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as paddles_recompute

from benchmarks.harness.record import RESULTS, environment, table
from paddle_recompute import recompute
from paddle_recompute.errors import PaddleRecomputeError
from tests.recompute.contract import CASES, Case, Run, differences, is_rounding, plain

# On a CPU, Paddle's auto_cast is off, so what its recompute does about AMP cannot be seen.
SECTIONS = (
    "inputs", "outputs", "randomness", "side_effects", "large_buffers", "nesting", "engine",
    "determinism_check", "reach", "rebinding", "flags", "writes", "views", "exceptions", "lifetime",
    "chains", "called_layers", "keep", "forms",
)  # fmt: skip
TABLE = Path(__file__).parents[2] / "docs" / "recompute_cases.md"
NUM_PROCESSES = 2
SECONDS_PER_CASE = 20


def with_option(function: Run, value: bool) -> Run:
    """`function` with ``use_reentrant=value``."""
    return lambda *args, **kwargs: function(*args, use_reentrant=value, **kwargs)


SUBJECTS: dict[str, Run] = {
    "Paddle": paddles_recompute,
    "Paddle, hooks": with_option(paddles_recompute, False),
    "paddle_recompute": recompute,
}
SYMBOLS = {"ok": "ok", "rounding": "rounding", "refused": "refused", "error": "error",
           "wrong": "**wrong**", "crash": "**crash**"}  # fmt: skip
MEANING = """\
- **ok**: everything that can be seen is bit for bit that of the plain call (or, where the plain
  call fails too, it is refused too; or a case that cannot be repeated is refused by an error);
- **rounding**: only gradients differ, by the last bits of sums taken in another order;
- **refused**: an error of paddle_recompute that says what to do instead;
- **error**: another exception;
- **wrong**: no error, but something differs;
- **crash**: the interpreter dies or hangs."""


# ------------------------------------------------------------------------------------- measuring


def observe(case: Case, run: Run) -> tuple[str, Any]:
    """What a case shows: ``("seen", ...)`` or ``("error", one line)``."""
    try:
        return "seen", case.observe(run)
    except PaddleRecomputeError as error:
        return "refused", str(error)
    except Exception as error:  # the table tells which
        return "error", one_line(error)


def one_line(error: Exception) -> str:
    """The type and the line of the message that says something; Paddle's may have hundreds."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [
        line
        for line in lines
        if line and not line.startswith(("[Hint", "---", "C++ ", "Error Message", "at ", "File "))
    ]
    return f"{type(error).__name__}: {(telling or [''])[0][:160]}"


def in_child(job: Callable[[], Any], result: Path) -> int:
    """Start `job` in a forked child that pickles its result; returns the child's id.

    Safe as long as this process has run no operator: Paddle's threads begin with the first one.
    """
    child = os.fork()
    if child:
        return child
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    signal.alarm(SECONDS_PER_CASE)
    status = 1
    try:
        result.write_bytes(pickle.dumps(job()))
        status = 0
    except BaseException:
        result.write_text(traceback.format_exc())
    finally:
        os._exit(status)


def run_all(jobs: dict[Any, Callable[[], Any]]) -> Iterator[tuple[Any, tuple[str, Any]]]:
    """Run `jobs` in children, `NUM_PROCESSES` at a time; yields each name with its result."""
    with tempfile.TemporaryDirectory() as folder:
        waiting, running = list(enumerate(jobs.items())), {}
        while waiting or running:
            while waiting and len(running) < NUM_PROCESSES:
                number, (name, job) = waiting.pop(0)
                path = Path(folder) / str(number)
                running[in_child(job, path)] = name, path
            child, status = os.wait()
            name, path = running.pop(child)
            if os.WIFSIGNALED(status):
                died_of = signal.Signals(os.WTERMSIG(status))
                hangs = died_of == signal.SIGALRM
                yield name, ("crash", f"hangs for {SECONDS_PER_CASE} s" if hangs else died_of.name)
            elif os.WEXITSTATUS(status):
                raise SystemExit(f"{name}: {path.read_text() if path.exists() else status}")
            else:
                yield name, pickle.loads(path.read_bytes())


def judge(case: Case, found: tuple[str, Any], wanted: dict[str, Any]) -> tuple[str, str]:
    """A key of `SYMBOLS`, and in one line what is not as in the plain call."""
    kind, value = found
    if kind == "seen":
        lines = differences(value, wanted)
        if lines and is_rounding(value, wanted):
            return "rounding", lines[0]
        return ("wrong", lines[0]) if lines else ("ok", "")
    if case.or_error and kind != "crash":
        return "ok", f"refused: {value}"
    return kind, value


def measure(cases: list[Case]) -> dict[str, Any]:
    """All cases on the installed Paddle."""
    runs = {"plain": plain, **SUBJECTS}
    jobs: dict[Any, Callable[[], Any]] = {}
    for number, case in enumerate(cases):
        for subject, run in runs.items():
            jobs[number, subject] = lambda case=case, run=run: observe(case, run)
    found: dict[Any, Any] = {}
    for done, (name, result) in enumerate(run_all(jobs), start=1):
        found[name] = result
        if sys.stderr.isatty():
            print(f"\r{done} of {len(jobs)}", end="", file=sys.stderr)
    rows = []
    for number, case in enumerate(cases):
        kind, wanted = found[number, "plain"]
        if kind != "seen":
            raise SystemExit(f"'{case.title}' fails with plain calls: {kind}, {wanted}")
        if case.expected is not None:
            wanted = case.wanted()
        outcomes = {name: judge(case, found[number, name], wanted) for name in SUBJECTS}
        rows.append({"section": case.section, "title": case.title, "outcomes": outcomes})
    return {"environment": environment(), "cases": rows}


# ------------------------------------------------------------------------------------- the table


def cell(results: dict[str, dict[str, str]], subject: str) -> str:
    """One word if all Paddle versions agree, else one for each, oldest last."""
    words = [SYMBOLS[outcomes[subject][0]] for outcomes in results.values()]
    return words[0] if len(set(words)) == 1 else " / ".join(words)


def write_table(files: list[Path]) -> None:
    """``docs/recompute_cases.md`` from the results of several Paddle versions."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    runs.sort(key=lambda run: run["environment"]["paddle"], reverse=True)
    versions = [run["environment"]["paddle"] for run in runs]
    by_case: dict[tuple[str, str], dict[str, Any]] = {}
    for version, run in zip(versions, runs, strict=True):
        for row in run["cases"]:
            by_case.setdefault((row["section"], row["title"]), {})[version] = row["outcomes"]
    lines = [
        "# Recompute: what is right, case by case",
        "",
        (
            "Each case does what a user would do, once with plain calls and once through "
            "recompute, in a process of its own on a CPU, and compares everything that can be seen "
            "bit for bit. Made by `python -m benchmarks.correctness` from the "
            "cases in `tests/recompute`."
        ),
        "",
        (
            '"Paddle" is `paddle.distributed.fleet.utils.recompute` as it comes '
            '(`use_reentrant=True`), "Paddle, hooks" is its `use_reentrant=False`; '
            '"paddle_recompute" is ours.'
        ),
        "",
        MEANING,
        "",
        f"Where the Paddle versions differ: {' / '.join(versions)}.",
        "",
        *counts(versions, by_case),
    ]
    for section in SECTIONS:
        rows = [
            (title, *(cell(results, subject) for subject in SUBJECTS))
            for (of, title), results in by_case.items()
            if of == section
        ]
        heading = section.replace("_", " ").capitalize()
        lines += ["", f"## {heading}", "", *table(["case", *SUBJECTS], rows)]
    lines += ["", "## What went wrong", "", *details(versions, by_case)]
    lines += ["", "## Measured with", ""]
    for run in runs:
        about = ", ".join(f"{name} {value}" for name, value in run["environment"].items())
        lines.append(f"- {about}")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def counts(versions: list[str], by_case: dict[tuple[str, str], Any]) -> list[str]:
    """How many cases end in which way, for each version and subject."""
    rows = []
    for version in versions:
        for subject in SUBJECTS:
            outcomes = [results[version][subject][0] for results in by_case.values()
                        if version in results]  # fmt: skip
            number = Counter(outcomes)
            rows.append((version, subject, *(number[word] for word in SYMBOLS), len(outcomes)))
    return table(["Paddle", "subject", *SYMBOLS.values(), "cases"], rows)


def details(versions: list[str], by_case: dict[tuple[str, str], Any]) -> list[str]:
    """Each reason once, with the cases that it is the reason of."""
    lines = []
    for version in versions:
        for subject in SUBJECTS:
            reasons: dict[str, list[str]] = {}
            for (_, title), results in by_case.items():
                word, reason = results.get(version, {}).get(subject, ("ok", ""))
                if word != "ok":
                    reasons.setdefault(f"{word}, {reason}", []).append(title)
            if reasons:
                lines += ["", f"### {subject}, Paddle {version}", ""]
            for reason, titles in reasons.items():
                listed = "; ".join(titles[:3])
                more = f"; and {len(titles) - 3} more" if len(titles) > 3 else ""
                lines.append(f"- {listed}{more}: {reason}".replace("|", "\\|"))
    return lines


def main() -> None:
    """Measure this Paddle, then write the table of all that were measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of a case's title; writes no file")
    options = parser.parse_args()
    for section in SECTIONS:
        importlib.import_module(f"tests.recompute.test_{section}")
    cases = [
        case
        for case in CASES
        if case.section in SECTIONS and case.is_listed and options.only in case.title
    ]
    result = measure(cases)
    if options.only:
        print(json.dumps(result["cases"], indent=2))
        return
    version = paddle.__version__.replace(".", "")
    path = RESULTS / f"recompute_cases_paddle{version}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_table(sorted(RESULTS.glob("recompute_cases_paddle*.json")))
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
