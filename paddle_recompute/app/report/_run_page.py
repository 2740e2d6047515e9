"""The page of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup, escape

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._charts import Curve, chart, timeline_chart
from paddle_recompute.app.report._curves import curves_of
from paddle_recompute.app.report._files import RunFiles, flat
from paddle_recompute.app.report._lanes import lanes_of
from paddle_recompute.app.report._page import Page, Part
from paddle_recompute.app.report._results import retrieval_rows
from paddle_recompute.planner import PLAIN, simulate, uniform

_MEASURED_ON = (
    "On the largest rank, with parameters, gradients and optimizer state. The plain step is one "
    "without recompute, measured or predicted before training for texts of full length."
)


def run_page(run: RunFiles) -> Page:
    """The page of one run."""
    parts = [
        *curves_of([run]),
        *_retrieval(run.record),
        *lanes_of(run),
        *_plan(run),
        *_examples(run),
        *_data(run),
        *_happened(run),
        *_settings(run.start),
    ]
    return Page(run.folder.resolve().name, _subtitle(run), list(_tiles(run)), parts)


def state_of(run: RunFiles) -> str:
    """How the run stands, in a few words."""
    if run.is_running:
        return "running"
    if run.record:
        return "finished"
    why = run.last("end").get("why")
    return f"ended: {why}" if why and why != "finished" else "ended before its last step"


def duration(seconds: float | None) -> str:
    """``2 h 5 min``, ``3 min 12 s``, ``40 s``; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _subtitle(run: RunFiles) -> str:
    start, record = run.start, run.record
    last = run.metrics[-1]["step"] if run.metrics else 0
    total = run.last("steps").get("total", record.get("steps", last))
    words = [state_of(run), f"{last:,} of {total:,} steps"]
    ranks = start.get("ranks", record.get("world_size"))
    if ranks is not None:
        words.append("1 rank" if ranks == 1 else f"{ranks} ranks")
    batch = start.get("config", {}).get("contrastive", {}).get("global_batch")
    if batch is not None:
        words.append(f"global batch {batch:,}")
    for name, unit in (("chunk_size", "pairs"), ("chunk_tokens", "tokens")):
        if record.get(name):
            words.append(f"{record[name]:,} {unit} encoded at a time")
    if record.get("skipped_steps"):
        words.append(f"{record['skipped_steps']} of the steps skipped (overflow in float16)")
    if run.seconds is not None:
        words.append(duration(run.seconds))
    return " · ".join(words)


def _tiles(run: RunFiles) -> Iterator[tuple[str, str]]:
    record = run.record
    for name, before, after in retrieval_rows(record, ".1%")[:2]:
        yield after, name if before == "-" else f"{name}, {before} untrained"
    losses = [one["loss"] for one in run.metrics if one.get("loss") is not None]
    if losses:
        yield f"{losses[-1]:.4g}", f"loss, {losses[0]:.4g} at first"
    peaks = [one["peak_bytes"] for one in run.metrics if one.get("peak_bytes") is not None]
    peak, plain = record.get("peak_bytes", max(peaks, default=None)), record.get("plain_peak_bytes")
    if peak is not None:
        against = "" if plain is None else f", {peak / plain - 1:+.0%} against the plain one"
        yield format_bytes(peak), f"peak memory of a step{against}"
    rate = record.get("examples_per_second")
    if rate is None and run.metrics:
        rate = run.metrics[-1].get("examples_per_second")
    if rate is not None:
        yield f"{rate:,.0f}", "pairs per second, all ranks"


def _retrieval(record: dict[str, Any]) -> Iterator[Part]:
    if rows := retrieval_rows(record):
        yield Part(
            "Retrieval on held-out pairs",
            head=("", "untrained", "trained"),
            rows=rows,
            numbers=(1, 2),
            note=f"{record['queries']:,} held-out queries, {record['pool_size']:,} candidates",
        )


def _plan(run: RunFiles) -> Iterator[Part]:
    plan = run.plan
    if plan is None:
        return
    peaks = [one["peak_bytes"] for one in run.metrics if one.get("peak_bytes") is not None]
    levels = {
        "budget": plan.memory_budget,
        "measured before training": plan.measured_bytes,
        "measured in training": max(peaks, default=None),
    }
    plain = simulate(plan.costs, uniform(plan.costs, PLAIN))
    yield Part(
        "Memory over one step, as planned",
        chart=timeline_chart({"plan": plan.timeline, "plain": plain}, levels),
        text=str(plan),
        note=_MEASURED_ON,
        is_wide=True,
    )


def _examples(run: RunFiles) -> Iterator[Part]:
    told = {one["when"]: one["queries"] for one in run.events if one["event"] == "examples"}
    before, after = told.get("untrained", []), told.get("trained", [])
    if not before and not after:
        return
    rows = []
    for number, one in enumerate(after or before):
        was = before[number] if number < len(before) else None
        rows.append((one["query"], one["answer"], _hits(was), _hits(one if after else None)))
    yield Part(
        "Held-out queries and their nearest candidates",
        head=("query", "right answer", "untrained", "trained"),
        rows=rows,
        is_wide=True,
        is_stacked=True,
        note="Queries at equal distances in the list of the held-out pairs, not chosen by their "
        "result. In parentheses: the cosine.",
    )


def _hits(example: dict[str, Any] | None) -> Markup:
    if example is None:
        return Markup("-")
    lines = Markup("").join(
        Markup('<li class="{}">{} ({})</li>').format(
            "right" if hit["text"] == example["answer"] else "", hit["text"], f"{hit['score']:.2f}"
        )
        for hit in example["hits"]
    )
    rank = escape(f"rank {example['rank']:,}")
    return Markup("{}<ol>{}</ol>").format(rank, lines)


def _data(run: RunFiles) -> Iterator[Part]:
    data = run.last("data")
    if not data:
        return
    names = {"train": "training pairs", "valid": "held-out pairs", "pool": "candidates"}
    names |= {"words": "words in the vocabulary", "left_out": "pairs left out in each epoch"}
    rows = [(words, f"{data[name]:,}") for name, words in names.items() if name in data]
    lengths: list[Curve] = []
    for side, about in data.get("lengths", {}).items():
        rows.append((f"{side}: tokens, mean", f"{about['mean']:.1f}"))
        rows.append((f"{side}: tokens, longest", f"{about['longest']:,}"))
        rows.append((f"{side}: cut", f"{about['cut']:,}"))
        rows.append((f"{side}: with unknown words", f"{about['unknown']:,}"))
        lengths.append(Curve(side, range(len(about["counts"])), about["counts"]))
    if lengths:
        plot = chart(lengths, x_label="tokens", y_label="training texts", from_zero=True)
        yield Part("Lengths of the training texts", chart=plot)
    yield Part(
        "Data",
        head=("", ""),
        rows=rows,
        numbers=(1,),
        note="\n".join(data.get("notes", [])),
    )


def _happened(run: RunFiles) -> Iterator[Part]:
    if not run.events:
        return
    rows = []
    for session in run.sessions:
        for event in session:
            if words := _told(event):
                rows.append((time.strftime("%Y-%m-%d %H:%M:%S", _clock(event)), words))
        if session[-1]["event"] != "end" and not (run.is_running and session is run.sessions[-1]):
            rows.append(("", "ended without a word: the process was killed"))
    starts = len(run.sessions)
    yield Part(
        "What happened" + (f": {starts} starts" if starts > 1 else ""),
        head=("time (UTC)", "what"),
        rows=rows,
        is_folded=starts == 1 and bool(run.record),
        is_wide=True,
        is_stacked=True,
    )


def _clock(event: dict[str, Any]) -> time.struct_time:
    return time.gmtime(event["time"])


def _told(event: dict[str, Any]) -> str:
    if event["event"] == "start":
        return "started"
    if event["event"] == "steps":
        return f"training goes on after step {event['done']:,}" if event["done"] else ""
    if event["event"] == "end":
        return "finished" if event["why"] == "finished" else f"ended: {event['why']}"
    return str(event.get("text", "")).strip()


def _settings(start: dict[str, Any]) -> Iterator[Part]:
    if not start:
        return
    yield Part(
        "Environment", head=("", ""), rows=list(start["environment"].items()), is_folded=True
    )
    sources = start.get("sources", {})
    rows = [
        (name, shown(value, name), *([sources.get(name, "")] if sources else []))
        for name, value in flat(start["config"])
    ]
    head = ("setting", "value", "from") if sources else ("setting", "value")
    yield Part("Configuration", head=head, rows=rows, is_folded=True)


def shown(value: Any, name: str = "") -> str:
    """A setting as YAML has it; bytes with their unit, where the name says that they are some."""
    if name.endswith(("_bytes", "memory_budget")) and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
