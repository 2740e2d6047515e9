"""Does a larger batch help? Batches of 64 to 4096 at equal examples and at equal steps.

Every batch size has its own learning rate, chosen on a validation side; every run starts from the
same warm-up; three seeds. The data are mined at run time: LibreOffice's sentences (which needs
apt-get), then CC-CEDICT. A study that is stopped goes on with the same command, run by run, and
the record is written after each run, whatever comes out.

    python -m benchmarks.batch_size_study [--minutes 75] [--cache FOLDER] [--plan-only]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import _batch_size_report as report
from benchmarks._batch_size_plan import BATCHES, SEEDS, Plan, next_run, remaining
from benchmarks._batch_size_runs import CORPORA, Recipe, Run, Runs, evaluate, new_model, train
from benchmarks._record import RESULTS, environment, hardware_tag
from paddle_recompute.app.config import default_cache_dir
from paddle_recompute.app.data._cache_folder import write_whole

_LEAST_STEPS = 8  # of the largest batch
_MEASURED_STEPS = {64: 12, 256: 4, 1024: 2, 4096: 1}


def measure(runs: Runs, corpora: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds per pair at every batch size, and seconds of the evaluation of a run, by corpus."""
    result = {}
    for name in corpora:
        corpus = runs.corpus(name)
        model = new_model(runs.recipe, corpus.tokenizer.vocab_size)
        cost = {}
        for batch, steps in _MEASURED_STEPS.items():
            for number in (1, steps):  # the first is to warm up
                begin = time.perf_counter()
                train(Run(name, batch, number, 1e-3, 0), runs.recipe, corpus, model, advance=int)
            cost[str(batch)] = (time.perf_counter() - begin) / (batch * steps)
        begin = time.perf_counter()
        evaluate(model, corpus, corpus.test, runs.recipe.max_tokens)
        cost["evaluation"] = 2 * (time.perf_counter() - begin)
        result[name] = cost
    return result


def seconds_of(todo: Sequence[Run], cost: dict[str, dict[str, float]]) -> float:
    """How long these runs take at the measured speed."""
    return sum(
        run.batch * run.steps * cost[run.corpus][str(run.batch)] + cost[run.corpus]["evaluation"]
        for run in todo
    )


def size(minutes: float, cost: dict[str, dict[str, float]], corpora: tuple[str, ...]) -> Plan:
    """The longest runs with which the whole study fits into `minutes`."""
    steps = _LEAST_STEPS
    while True:
        longer = Plan((steps + 1) * max(BATCHES), corpora)
        if seconds_of(remaining(longer, lambda run: None), cost) > 60 * minutes:
            return Plan(steps * max(BATCHES), corpora)
        steps += 1


def write(plan: Plan, runs: Runs, about: dict[str, Any], folder: Path) -> Path:
    """Write the table and the picture; returns the path of the table."""
    cells = report.summary(plan, runs.found)
    begun = [
        corpus
        for corpus in plan.corpora
        if any(cells[cell].tuning.scores for cell in plan.cells(corpus))
    ]
    starts = {corpus: runs.start(corpus) for corpus in begun}
    version = about["paddle"].replace(".", "")
    name = f"batch_size_study_{hardware_tag()}"
    month = date.fromisoformat(about["date"]).strftime("%Y%m")
    path = folder / f"{name}_paddle{version}_{month}.md"
    recipe = ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(runs.recipe).items())
    lines = [
        "# Does a larger batch help here?",
        "",
        "Command: `python -m benchmarks.batch_size_study`",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        f"- recipe of all runs: {recipe}",
        f"- seeds: {len(SEEDS)}; ± is their standard deviation. A seed decides the order of the "
        "pairs; the initial weights are those of the warm-up for all",
        "",
        *_READING,
        "",
        f"![recall and MRR against the batch size]({name}.png)",
        "",
        *report.lines(plan, cells, starts, {c: runs.corpus(c).about for c in begun}),
        "",
    ]
    write_whole(path, "\n".join(lines))
    report.draw(plan, cells, starts, folder / f"{name}.png")
    return path


_READING = (
    "How to read it: at *equal examples* all batch sizes see the same pairs in the same order, so "
    "a large batch makes fewer updates. At *equal steps* a large batch sees more pairs, in "
    "proportion, and costs as much more: a gain there is not one of more negatives alone. Each "
    "learning rate was chosen by the MRR on a validation side; the test side was looked at for "
    "the chosen ones only. The pool of a query is the positives of the test side. The encoder is "
    "very small and trained from scratch on few, short texts: what helps here need not help a "
    "large pretrained encoder, and the other way round.",
)


def main() -> None:
    """Plan, run what is not done, and write the record after every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=75, help="what a new study may take here (75)"
    )
    parser.add_argument("--examples", type=int, help="of a run, instead of --minutes")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache_dir().expanduser() / "batch_size_study",
        help="mined data, warm-ups and runs; a run found here is not run again",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the record is written (%(default)s)"
    )
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--plan-only", action="store_true", help="say what would be run")
    options = parser.parse_args()
    if options.examples is not None and (
        options.examples < 2 * max(BATCHES) or options.examples % max(BATCHES)
    ):
        parser.error(f"--examples {options.examples}: allowed are multiples of {max(BATCHES)}")
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    runs = Runs(Recipe(), cache, lambda line: tqdm.write(line, file=sys.stdout))
    corpora = tuple(options.corpora)
    planned = cache / "plan.json"
    if planned.exists():
        known = json.loads(planned.read_text(encoding="utf-8"))
    else:
        cost = measure(runs, corpora)
        length = options.examples or size(options.minutes, cost, corpora).examples
        known = {"examples": length, "cost": cost, "environment": environment()}
        write_whole(planned, json.dumps(known, indent=1) + "\n")
    examples = options.examples or known["examples"]
    plan, cost = Plan(examples, corpora), known["cost"]
    todo = remaining(plan, runs.found)
    print(
        f"{plan.examples} examples per run; {len(todo)} runs to go and more where a tuning needs "
        f"them, about {seconds_of(todo, cost) / 60:.0f} minutes at the speed measured first; "
        f"found and made in {cache}",
        flush=True,
    )
    if options.plan_only:
        return
    path = write(plan, runs, known["environment"], options.results)
    with tqdm(total=len(todo), unit="run", desc="study", disable=not sys.stderr.isatty()) as bar:
        while (run := next_run(plan, runs.found)) is not None:
            with tqdm(
                total=run.steps,
                unit="step",
                desc=f"{run.corpus} B={run.batch} lr={run.learning_rate:g} seed={run.seed}",
                leave=False,
                disable=not sys.stderr.isatty(),
            ) as steps:
                runs.do(run, steps.update)
            bar.update()
            path = write(plan, runs, known["environment"], options.results)
            left = remaining(plan, runs.found)
            line = f"{len(left)} runs to go, about {seconds_of(left, cost) / 60:.0f} minutes"
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
