"""The table and the picture of the batch size study, as far as it has come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks._batch_size_plan import ARMS, BATCHES, LADDER, SEEDS, Cell, Found, Plan, summarize
from benchmarks._batch_size_runs import CORPORA
from benchmarks._record import table

METRICS = {"recall@1": "recall@1", "recall@10": "recall@10", "mrr": "MRR"}
Cells = dict[tuple[str, str, int], Cell]


def summary(plan: Plan, found: Found) -> Cells:
    """Every cell of the study."""
    return {
        cell: summarize(plan, cell, found) for corpus in plan.corpora for cell in plan.cells(corpus)
    }


def lines(
    plan: Plan, cells: Cells, starts: Mapping[str, Mapping[str, float]], about: Mapping[str, str]
) -> list[str]:
    """The record, without its head.

    Args:
        plan: Of the study.
        cells: Of `summary`.
        starts: Test figures of the shared warm-up by corpus, as far as known.
        about: A sentence about the data by corpus, as far as known.
    """
    result = [_state(cells), ""]
    for corpus in plan.corpora:
        result += [f"## {CORPORA[corpus]}", ""]
        if corpus not in starts:
            result += ["Not begun.", ""]
            continue
        start = starts[corpus]
        figures = ", ".join(f"{label} {start[name]:.4f}" for name, label in METRICS.items())
        result += [
            f"{about[corpus]}.",
            "",
            f"All runs start from one warm-up, whose figures on the test side are {figures}.",
            "",
        ]
        for arm, title in ARMS.items():
            of_arm = {batch: cells[corpus, arm, batch] for batch in BATCHES}
            result += [f"### {title[0].upper()}{title[1:]}", ""]
            result += table(_HEADER, [_row(batch, cell) for batch, cell in of_arm.items()])
            result += ["", _verdict(of_arm), ""]
        result += ["### How the learning rate was chosen", ""]
        result += ["MRR on the validation side, first seed; the chosen one in bold.", ""]
        result += [*_tunings(corpus, cells), ""]
    return result[:-1]


def draw(plan: Plan, cells: Cells, starts: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """MRR and recall@1 against the batch size; a point for every seed, a line through the means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(plan.corpora), len(ARMS), figsize=(10, 3.6 * len(plan.corpora)), squeeze=False
    )
    for row, corpus in zip(all_axes, plan.corpora, strict=True):
        for axes, (arm, title) in zip(row, ARMS.items(), strict=True):
            for name, color in (("mrr", "#3182bd"), ("recall@1", "#e6550d")):
                known = {b: cells[corpus, arm, b] for b in BATCHES if cells[corpus, arm, b].figures}
                means, deviations = [], []
                for batch, cell in known.items():
                    mean, deviation = cell.spread(name)
                    means.append(mean)
                    deviations.append(deviation)
                    values = [one[name] for one in cell.figures]
                    axes.plot([batch] * len(values), values, ".", color=color, alpha=0.5)
                axes.errorbar(
                    list(known), means, deviations, color=color, capsize=3, label=METRICS[name]
                )
                if corpus in starts:
                    axes.axhline(starts[corpus][name], color=color, linewidth=0.8, linestyle=":")
            axes.set_xscale("log", base=2)
            axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
            axes.set_xlim(BATCHES[0] / 1.5, BATCHES[-1] * 1.5)
            axes.set_title(f"{CORPORA[corpus]}, {title}", loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        low = min(axes.get_ylim()[0] for axes in row)
        high = max(axes.get_ylim()[1] for axes in row)
        for axes in row:
            axes.set_ylim(low, high)
        row[0].legend(frameon=False, fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("batch size (dotted: the warm-up that all start from)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_HEADER = ("batch", "steps", "examples", "learning rate", *METRICS.values(), "seeds")


def _row(batch: int, cell: Cell) -> list[str]:
    chosen = cell.tuning.chosen
    head = [str(batch), str(cell.steps), f"{batch * cell.steps:,}"]
    if chosen is None:
        return [*head, "being tuned", *["" for _ in METRICS], f"0 of {len(SEEDS)}"]
    spreads = [cell.spread(name) for name in METRICS]
    shown = [
        f"{mean:.4f} ± {deviation:.4f}" if len(cell.figures) > 1 else f"{mean:.4f}"
        for mean, deviation in spreads
    ]
    at_end = ", the end of the ladder" if chosen in (LADDER[0], LADDER[-1]) else ""
    return [*head, f"{chosen:g}{at_end}", *shown, f"{len(cell.figures)} of {len(SEEDS)}"]


def _verdict(cells: dict[int, Cell]) -> str:
    """One sentence: which batch is best, and whether it is more than the seeds differ."""
    if any(len(cell.figures) < len(SEEDS) for cell in cells.values()):
        return "Not all seeds are done: no conclusion yet."
    means = {batch: cell.spread("mrr")[0] for batch, cell in cells.items()}
    best, smallest = max(means, key=means.__getitem__), min(cells)
    if best == smallest:
        worst = min(means, key=means.__getitem__)
        lost = means[best] - means[worst]
        return (
            f"The smallest batch, {best}, has the highest mean MRR: a larger batch does not help "
            f"here; {worst} loses {lost:.4f}{_against(cells[best], cells[worst], lost)}."
        )
    gain = means[best] - means[smallest]
    return (
        f"Batch {best} has the highest mean MRR, {gain:.4f} above batch {smallest}"
        f"{_against(cells[best], cells[smallest], gain)}."
    )


def _against(one: Cell, other: Cell, difference: float) -> str:
    deviation = ((one.spread("mrr")[1] ** 2 + other.spread("mrr")[1] ** 2) / 2) ** 0.5
    values = [[figures["mrr"] for figures in cell.figures] for cell in (one, other)]
    apart = min(values[0]) > max(values[1])
    ratio = f", {difference / deviation:.1f} standard deviations" if deviation else ""
    return f"{ratio}; the seeds of the two {'do not overlap' if apart else 'overlap'}"


def _tunings(corpus: str, cells: Cells) -> list[str]:
    rows = []
    for (of, arm, batch), cell in cells.items():
        if of != corpus:
            continue
        scores, chosen = cell.tuning.scores, cell.tuning.chosen
        shown = [
            ""
            if rate not in scores
            else f"{'**' * (rate == chosen)}{scores[rate]:.4f}{'**' * (rate == chosen)}"
            for rate in LADDER
        ]
        rows.append([ARMS[arm], str(batch), *shown])
    return table(["arm", "batch", *(f"{rate:g}" for rate in LADDER)], rows)


def _state(cells: Cells) -> str:
    done = sum(len(cell.figures) for cell in cells.values())
    wanted = len(cells) * len(SEEDS)
    if done == wanted:
        return "The study is complete."
    return f"**Not complete**: {done} of {wanted} tuned runs are done; the rest is missing below."
