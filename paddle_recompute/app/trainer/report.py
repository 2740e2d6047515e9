"""One self-contained HTML page about a run: the loss, the memory saved, recall before and after.

The pictures are embedded in the page and also written beside it as PNG files, for slides and
issues. Matplotlib is used through its objects only: importing this module selects no backend and
does not change the figures of a notebook or a script.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from paddle_recompute._files import writing
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.errors import DependencyError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise DependencyError(
        "the report of a training run needs Matplotlib, which is not installed; "
        "pip install matplotlib (or 'paddle-recompute[train]')"
    ) from error

INK, QUIET, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BEFORE, AFTER = "#b8c4ce", "#0f766e"

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #f5f7fa; margin: 0; }}
  main {{ max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }}
  h1 {{ font-size: 1.6rem; margin: 0; }}
  h2 {{ font-size: 1.1rem; margin: 0 0 .5rem; }}
  p.quiet {{ color: #616e7c; margin: .25rem 0 1.5rem; }}
  section {{ background: #fff; border-radius: .6rem; padding: 1.25rem 1.5rem; margin: 1rem 0;
            box-shadow: 0 1px 3px rgb(0 0 0 / 8%); }}
  .tiles {{ display: grid; gap: 1rem;
           grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }}
  .tiles section {{ margin: 0; padding: 1rem 1.25rem; }}
  .tiles strong {{ display: block; font-size: 1.7rem; line-height: 1.2; color: #0f766e; }}
  .tiles span {{ color: #616e7c; font-size: .85rem; }}
  .pair {{ display: grid; gap: 1rem;
          grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); }}
  .pair section {{ margin: 0; }}
  img {{ width: 100%; height: auto; }}
  table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
  th, td {{ text-align: right; padding: .35rem .75rem; border-bottom: 1px solid #e4e7eb; }}
  th:first-child, td:first-child {{ text-align: left; }}
  pre {{ overflow-x: auto; font-size: .85rem; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="quiet">{subtitle}</p>
<div class="tiles">{tiles}</div>
<section><h2>Loss</h2>{loss}</section>
<div class="pair">
<section><h2>Peak memory of a training step</h2>{memory}
<p class="quiet">On the largest rank, with parameters, gradients and optimizer state. The plain
step is one without recompute, measured before training on texts of full length.</p></section>
<section><h2>Retrieval on held-out pairs</h2>{recall}{table}</section>
</div>
<section><details><summary>Configuration</summary><pre>{config}</pre></details></section>
</main>
</body>
</html>
"""


def write_report(
    folder: Path,
    *,
    record: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    config: dict[str, Any],
) -> Path:
    """Write ``report.html`` and its pictures into `folder`.

    Args:
        folder: An existing folder.
        record: The final record of a run, as `Trainer.run` returns it.
        metrics: The records of the metrics file, in the order of their steps.
        config: The configuration as plain values.

    Returns:
        The path of the page.
    """
    pictures = {
        "loss": loss_figure(metrics),
        "memory": memory_figure(record["plain_peak_bytes"], record["peak_bytes"]),
        "recall": recall_figure(record),
    }
    images = {}
    for name, figure in pictures.items():
        png = _png(figure)
        (folder / f"{name}.png").write_bytes(png)
        data = base64.b64encode(png).decode("ascii")
        images[name] = f'<img alt="{name}" src="data:image/png;base64,{data}">'
    skipped = record.get("skipped_steps", 0)
    overflow = f", {skipped} of the steps skipped (overflow in float16)" if skipped else ""
    chunks = "".join(
        f", {record[name]} {unit} encoded at a time"
        for name, unit in (("chunk_size", "pairs"), ("chunk_tokens", "tokens"))
        if record.get(name)
    )
    ranks = "1 rank" if record["world_size"] == 1 else f"{record['world_size']} ranks"
    page = _PAGE.format(
        title=html.escape(Path(record["output_dir"]).name),
        subtitle=html.escape(
            f"{record['steps']} steps of {config['contrastive']['global_batch']} pairs on {ranks}"
            f"{chunks}{overflow}, {record['examples_per_second']:.0f} pairs per second"
        ),
        tiles=_tiles(record),
        table=_table(record),
        config=html.escape(yaml.safe_dump(config, sort_keys=False, allow_unicode=True)),
        **images,
    )
    path = folder / "report.html"
    with writing(path):
        path.write_text(page, encoding="utf-8")
    return path


def loss_figure(metrics: Sequence[dict[str, Any]]) -> Figure:
    """The loss of every record, with the learning rate (lr) in a narrow panel below."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = [record["step"] for record in metrics]
    marker = "o" if len(steps) < 30 else ""
    for axes, key, color in ((loss, "loss", AFTER), (rate, "lr", QUIET)):
        # A skipped step may have no loss: leave a gap in the line.
        values = [math.nan if record[key] is None else record[key] for record in metrics]
        axes.plot(steps, values, color=color, linewidth=2, marker=marker, markersize=4)
        axes.set_ylim(bottom=0)
        axes.set_ylabel({"loss": "loss", "lr": "lr"}[key], color=INK)
        _plain(axes, grid="both")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_xlabel("optimizer step", color=INK)
    return figure


def memory_figure(plain_bytes: int | None, configured_bytes: int) -> Figure:
    """Two bars: the peak of a step without recompute, if known, and as configured."""
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axes = figure.subplots()
    values = [configured_bytes / 2**20, (plain_bytes or 0) / 2**20]
    bars = axes.barh(["as configured", "plain"], values, color=[AFTER, BEFORE], height=0.5)
    plain = "not measured" if plain_bytes is None else format_bytes(plain_bytes)
    axes.bar_label(bars, labels=[format_bytes(configured_bytes), plain], padding=6, color=INK)
    axes.set_xlim(0, max(values) * 1.28)
    axes.set_xlabel("peak, MiB", color=INK)
    axes.tick_params(axis="y", length=0)
    _plain(axes, grid="x")
    axes.spines["left"].set_visible(False)
    return figure


def recall_figure(record: dict[str, Any]) -> Figure:
    """Grouped bars of the retrieval metrics, untrained beside trained."""
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axes = figure.subplots()
    rows = _retrieval_rows(record)
    measured_before = any(before is not None for _, before, _ in rows)
    width = 0.36 if measured_before else 0.5
    for index, (_, before, after) in enumerate(rows):
        shift = width / 2 if measured_before else 0.0
        if before is not None:
            bar = axes.bar(index - shift, before, width, color=BEFORE)
            axes.bar_label(bar, labels=[f"{before:.3f}"], padding=2, color=QUIET, fontsize=9)
        bar = axes.bar(index + shift, after, width, color=AFTER)
        axes.bar_label(bar, labels=[f"{after:.3f}"], padding=2, color=INK, fontsize=9)
    axes.set_xticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(0, max(0.05, *(value or 0.0 for row in rows for value in row[1:])) * 1.3)
    handles = [axes.bar(0, 0, color=color) for color in (BEFORE, AFTER)]
    if measured_before:
        axes.legend(handles, ["untrained", "trained"], frameon=False, ncols=2, loc="upper left")
    _plain(axes, grid="y")
    return figure


def retrieval_table(record: dict[str, Any]) -> str:
    """The retrieval metrics as plain text, for a terminal."""
    rows = [
        (name, "-" if before is None else f"{before:.4f}", f"{after:.4f}")
        for name, before, after in _retrieval_rows(record)
    ]
    head = f"{record['queries']} held-out queries, {record['pool_size']} candidates for each"
    if (best := _ceiling(record)) is not None:
        head += f"; {best}"
    lines = [f"{name:<12}{before:>12}{after:>12}" for name, before, after in rows]
    return "\n".join([head, f"{'':<12}{'untrained':>12}{'trained':>12}", *lines])


def _ceiling(record: dict[str, Any]) -> str | None:
    """Why no model can reach recall@1 of 1, as a sentence; None if one can."""
    if record.get("recall@1_ceiling", 1.0) == 1.0:
        return None
    reasons = ", ".join(
        f"{record[name]:,} {what}"
        for name, what in (
            ("unknown_queries", "queries are [UNK] alone"),
            ("equal_queries", "share their tokens with another query"),
            ("equal_answers", "answers share them with another candidate"),
        )
        if record[name]
    )
    return f"recall@1 is at most {record['recall@1_ceiling']:.4f}: {reasons}"


def _retrieval_rows(record: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """(name, before, after) of every retrieval metric; before is None if not measured."""
    names = ("recall@1", "recall@10", "mrr")
    return [(name, record.get(f"untrained_{name}"), record[name]) for name in names]


def _tiles(record: dict[str, Any]) -> str:
    peak, plain = record["peak_bytes"], record["plain_peak_bytes"]
    memory = (format_bytes(peak), "peak memory of a step")
    if plain is not None:
        memory = (f"{peak / plain - 1:+.0%}", "peak memory of a step, against the plain one")
    tiles = [
        (f"{record['recall@1']:.1%}", f"recall@1 among {record['pool_size']:,} candidates"),
        (f"{record['recall@10']:.1%}", "recall@10"),
        memory,
        (f"{record['examples_per_second']:,.0f}", "pairs per second, all ranks"),
    ]
    return "".join(
        f"<section><strong>{html.escape(value)}</strong><span>{html.escape(words)}</span></section>"
        for value, words in tiles
    )


def _table(record: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{name}</td><td>{'-' if before is None else f'{before:.4f}'}</td>"
        f"<td>{after:.4f}</td></tr>"
        for name, before, after in _retrieval_rows(record)
    )
    caption = f"{record['queries']:,} queries, {record['pool_size']:,} candidates"
    best = _ceiling(record)
    below = f'<p class="quiet">{html.escape(best)}</p>' if best is not None else ""
    head = f"<tr><th>{caption}</th><th>untrained</th><th>trained</th></tr>"
    return f"<table>{head}{rows}</table>{below}"


def _plain(axes: Axes, *, grid: str) -> None:
    """Light grid behind the data, no box around it."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(colors=INK)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()
